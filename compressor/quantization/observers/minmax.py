"""Min-max: the whole range that was seen.

Source: Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, CVPR 2018 (arXiv:1712.05877), section 3.
"""

from __future__ import annotations

from compressor.quantization.observers.grid import Grid
from compressor.quantization.observers.statistics import TensorStatistics

__all__ = ["limits"]


def limits(statistics: TensorStatistics, grid: Grid) -> tuple[float, float]:
    """The least and the largest value; nothing is clipped."""
    return statistics.minimum, statistics.maximum
