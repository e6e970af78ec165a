"""Entropy: the clipping whose quantized distribution diverges least from the observed one.

Source: Migacz, 8-bit Inference with TensorRT, GTC 2017. A window about zero is widened step by step;
what lies outside is added to its outer bins (P), what lies inside is merged into as many groups as there
are codes and spread again over the bins in use (Q); the window with the least KL(P || Q) wins. Values
that are exactly zero are left out: a code stands for them, and after a ReLU they would outweigh the rest.
"""

from __future__ import annotations

import numpy as np

from compressor.quantization.observers.grid import Floats, Grid
from compressor.quantization.observers.statistics import TensorStatistics

__all__ = ["divergence", "limits"]

_CANDIDATES = 128
_LEAST = 1e-4  # probability that stands for a bin which Q leaves empty, as in MXNet's implementation


def limits(statistics: TensorStatistics, grid: Grid) -> tuple[float, float]:
    """The range |x| <= T, cut to what was seen, of least divergence; of equals the widest."""
    bins, first = statistics.bins(), statistics.first
    levels = grid.highest - grid.lowest + 1
    reach = max(-first, first + len(bins.counts))
    if reach <= levels or not bins.counts.any():
        return statistics.minimum, statistics.maximum
    best, chosen = np.inf, reach
    for half in np.unique(np.linspace(reach, levels // 2, _CANDIDATES).astype(int))[::-1]:
        start, stop = max(0, -half - first), min(len(bins.counts), half - first)
        groups = _groups(start + first, stop + first, grid)
        found = divergence(bins.counts, start, stop, groups) if stop - start >= groups else np.inf
        if found < best - 1e-12:
            best, chosen = found, half
    limit = chosen * 2.0**statistics.exponent
    return max(statistics.minimum, -limit), min(statistics.maximum, limit)


def _groups(first: int, last: int, grid: Grid) -> int:
    """How many codes fall into the bins from `first` to `last`."""
    if not grid.symmetric:
        return grid.highest + 1
    return -(-(last - first) * grid.highest // max(-first, last))


def divergence(counts: Floats, start: int, stop: int, groups: int) -> float:
    """KL(P || Q) in nats for the window `counts[start:stop]` merged into `groups` groups."""
    inside = counts[start:stop]
    p = inside.copy()
    p[0] += counts[:start].sum()
    p[-1] += counts[stop:].sum()
    if not inside.any():
        return float("inf")
    group = np.arange(len(p)) * groups // len(p)
    used = p > 0
    share = np.bincount(group, inside, groups) / np.maximum(np.bincount(group, used, groups), 1)
    q = np.maximum(share[group][used] / inside.sum(), _LEAST / len(p))
    p = p[used] / p.sum()
    return float(np.sum(p * np.log(p / (q / q.sum()))))
