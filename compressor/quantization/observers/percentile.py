"""Percentile: keep a share of the values and clip the rest, half of it at either end.

Source: Wu et al., Integer Quantization for Deep Learning Inference: Principles and Empirical
Evaluation, 2020 (arXiv:2004.09602), section 4.1 (99.9, 99.99, 99.999 and 99.9999 % are compared there).
"""

from __future__ import annotations

import numpy as np

from compressor.errors import UsageError
from compressor.quantization.observers.grid import Floats, Grid
from compressor.quantization.observers.statistics import Bins, TensorStatistics

__all__ = ["limits"]


def limits(statistics: TensorStatistics, grid: Grid, percentile: float = 99.99) -> tuple[float, float]:
    """The range that keeps `percentile` per cent of the values (50 < percentile <= 100).

    A symmetric grid keeps that share of the magnitudes. Within a bin values count as spread evenly.
    """
    if not 50 < percentile <= 100:
        raise UsageError(
            f"percentile {percentile:g} is not a share to keep; give more than 50 and at most 100"
        )
    if percentile == 100:
        return statistics.minimum, statistics.maximum
    bins = statistics.bins()
    if grid.symmetric:
        reach = _reach(bins, percentile / 100)
        return max(statistics.minimum, -reach), min(statistics.maximum, reach)
    cut = (1 - percentile / 100) / 2
    low, high = _quantiles(bins, [cut, 1 - cut])
    return low, high


def _cumulative(bins: Bins) -> tuple[Floats, Floats]:
    """Points of the cumulative distribution: values, and how many lie at or below; zeros are a step."""
    below = np.concatenate([[0.0], np.cumsum(bins.counts)])
    zero = int(np.searchsorted(bins.edges, 0.0))  # always an edge
    values, count = np.insert(bins.edges, zero, 0.0), np.insert(below, zero, below[zero])
    count[zero + 1 :] += bins.zeros
    return values, count


def _quantiles(bins: Bins, shares: list[float]) -> tuple[float, ...]:
    values, count = _cumulative(bins)
    return tuple(float(np.interp(share * count[-1], count, values)) for share in shares)


def _reach(bins: Bins, share: float) -> float:
    """The magnitude that `share` of the values do not exceed, found by bisection."""
    values, count = _cumulative(bins)
    low, high = 0.0, float(np.abs(values).max())
    for _ in range(50):
        middle = (low + high) / 2
        inside = np.interp(middle, values, count) - np.interp(-middle, values, count)
        low, high = (low, middle) if inside >= share * count[-1] else (middle, high)
    return high
