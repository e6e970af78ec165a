"""Moving average: exponential averages of each sample's extremes.

Source: Jacob et al., CVPR 2018 (arXiv:1712.05877), section 3.1; the constant 0.01 is torch's
(`MovingAverageMinMaxObserver`). Here the first hundred samples weigh alike, so that a short calibration
is not ruled by its first sample, and an update is a sample, so that the batch size does not matter.
"""

from __future__ import annotations

from compressor.quantization.observers.grid import Grid
from compressor.quantization.observers.statistics import TensorStatistics

__all__ = ["limits"]


def limits(statistics: TensorStatistics, grid: Grid) -> tuple[float, float]:
    """The averages of the samples' least and largest values."""
    return statistics.average_low, statistics.average_high
