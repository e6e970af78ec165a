"""Mean squared error: the clipping that leaves the least squared quantization error.

Sources: Sung et al., Resiliency of Deep Neural Networks under Quantization, 2015 (arXiv:1511.06488);
Choukroun et al., Low-bit Quantization of Neural Networks for Efficient Inference, 2019
(arXiv:1902.06822). Both ends are searched apart, from coarse to fine, on the grid that will be used:
its zero point is rounded as the engine's is. Within a bin of the histogram values count as spread
evenly, and the error of a rounding grid over an interval has a closed form, so bins may be wider or
narrower than a quantization step. The whole range is among the candidates: by this measure the result
is never worse than min-max.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from compressor.quantization.observers.grid import Floats, Grid
from compressor.quantization.observers.statistics import Bins, TensorStatistics

__all__ = ["errors", "limits"]

_COARSE = 2.0 ** -np.linspace(0, 12, 37)
_SPREADS = (4.0, 1.6, 1.2, 1.06, 1.02)
_POINTS = 17


def limits(statistics: TensorStatistics, grid: Grid) -> tuple[float, float]:
    """The range with the least expected squared error; its ends are codes of the grid."""
    low, high = min(statistics.minimum, 0.0), max(statistics.maximum, 0.0)
    if low == high:
        return low, high
    bins = statistics.bins()

    def best(lows: Floats, highs: Floats) -> tuple[float, float]:
        chosen = int(np.argmin(errors(bins, lows, highs, grid)))
        return float(lows[chosen]), float(highs[chosen])

    if grid.symmetric:
        return _search_symmetric(low, high, best)
    found = _search(low, high, best)
    scale, zero = grid.place(np.array([found[0]]), np.array([found[1]]))
    return float(-zero[0] * scale[0]), float((grid.highest - zero[0]) * scale[0])


def errors(bins: Bins, lows: Floats, highs: Floats, grid: Grid) -> Floats:
    """Sum of squared errors over the histogram for each candidate range (shape of `lows`).

    With t the value in steps from the lowest code, the error integrates to n/12 + r**3/3 inside the grid
    (t = n + r, n the nearest code) and to d**3/3 at a distance d outside of it.
    """
    scale, zero = (part[:, None] for part in grid.place(lows, highs))
    top = float(grid.highest - grid.lowest)
    steps = bins.edges / scale + (zero - grid.lowest)
    width = np.diff(bins.edges)
    wide = width > 1e-9 * (bins.edges[-1] - bins.edges[0])
    density = np.where(wide, bins.counts, 0) / np.where(wide, width, 1)
    total = scale[:, 0] ** 3 * (np.diff(_integral(steps, top)) @ density)
    points = (bins.counts > 0) & ~wide
    if points.any():  # bins cut down to a single value by the extremes
        at = steps[:, :-1][:, points]
        total += scale[:, 0] ** 2 * ((at - np.clip(np.rint(at), 0, top)) ** 2 @ bins.counts[points])
    return np.asarray(total)


def _integral(steps: Floats, top: float) -> Floats:
    inside = np.clip(steps, 0, top)
    code = np.rint(inside)
    off, out = inside - code, steps - inside
    return code / 12 + (off * off * off + out * out * out) / 3


Best = Callable[[Floats, Floats], tuple[float, float]]


def _search(low: float, high: float, best: Best) -> tuple[float, float]:
    """Shrink both ends together, then move one end at a time by ever smaller factors."""
    found = best(low * _COARSE, high * _COARSE)
    for spread in _SPREADS:
        factors = np.geomspace(1 / spread, spread, _POINTS)
        if high > 0:
            highs = np.minimum(found[1] * factors, high)
            found = best(np.full(_POINTS, found[0]), highs)
        if low < 0:
            lows = np.maximum(found[0] * factors, low)
            found = best(lows, np.full(_POINTS, found[1]))
    return found


def _search_symmetric(low: float, high: float, best: Best) -> tuple[float, float]:
    largest = max(-low, high)
    reach = best(-largest * _COARSE, largest * _COARSE)[1]
    for spread in _SPREADS:
        reaches = np.minimum(reach * np.geomspace(1 / spread, spread, _POINTS), largest)
        reach = best(-reaches, reaches)[1]
    return max(low, -reach), min(high, reach)
