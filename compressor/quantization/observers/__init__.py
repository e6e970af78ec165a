"""Observers: how a tensor's range is chosen from what calibration saw of it.

Each module holds one, with its source; all read the same `TensorStatistics`, so one calibration pass
serves them all. A new observer is a module with `limits` and a name in `OBSERVERS`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

from compressor.errors import UsageError
from compressor.quantization.observers import entropy, minmax, moving_average, mse, percentile
from compressor.quantization.observers.grid import Grid
from compressor.quantization.observers.statistics import TensorStatistics

__all__ = ["OBSERVERS", "Grid", "TensorStatistics", "observer_named"]

Observer = Callable[[TensorStatistics, Grid], tuple[float, float]]

OBSERVERS: dict[str, Callable[..., tuple[float, float]]] = {
    "minmax": minmax.limits,
    "moving-average": moving_average.limits,
    "percentile": percentile.limits,
    "entropy": entropy.limits,
    "mse": mse.limits,
}


_LEAST = 1e-6


def observer_named(text: str) -> Observer:
    """The observer `NAME` or `NAME:VALUE` (`percentile:99.9`); its range always holds zero.

    Where next to nothing of the range would be left, as with a percentile when nearly all values are
    zero, the range is the whole one: no scale could be made of it.
    Raises `UsageError` for a name or value that is not understood.
    """
    name, _, value = text.partition(":")
    if name not in OBSERVERS:
        raise UsageError(f"observer '{text}' is unknown; known are {', '.join(OBSERVERS)} (percentile:99.9)")
    limits, extra = OBSERVERS[name], _parameter(text, name, value)

    def observe(statistics: TensorStatistics, grid: Grid) -> tuple[float, float]:
        whole = min(statistics.minimum, 0.0), max(statistics.maximum, 0.0)
        low, high = limits(statistics, grid, *extra)
        low, high = min(float(low), 0.0), max(float(high), 0.0)
        return whole if high - low < _LEAST * (whole[1] - whole[0]) else (low, high)

    return observe


def _parameter(text: str, name: str, value: str) -> tuple[float, ...]:
    if not value:
        return ()
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    takes_one = len(inspect.signature(OBSERVERS[name]).parameters) > 2
    if not takes_one or not math.isfinite(number):
        raise UsageError(f"observer '{text}': '{value}' is not understood; percentile:99.9 is the one form")
    return (number,)
