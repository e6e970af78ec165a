"""What calibration remembers of one tensor: extremes, their moving average and a histogram of fixed size.

Everything but the moving average is associative and commutative, so it does not depend on how samples
are batched or ordered; the moving average counts samples, never batches. The histogram's bins are
`[k w, (k + 1) w)` for whole k, where w is the least power of two with which `BINS` bins cover the range
seen so far together with zero. When the range grows, w doubles and neighbours are added up: counts stay
exactly those that a second pass with the last w would give, as scaling by a power of two rounds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINS", "LIMIT", "Bins", "TensorStatistics"]

BINS = 4096
LIMIT = 1e30  # a magnitude from here on is a mask (-inf, float-min), not a value
MOMENTUM = 0.01  # torch's MovingAverageMinMaxObserver
_PICKED = 1 << 14  # elements of a sample's tensor that the histogram takes
_RUN = 16
_LEAST_EXPONENT = -100  # narrower bins would overflow the float32 reciprocal


@dataclass(frozen=True)
class Bins:
    """A histogram as observers read it.

    `counts[i]` values lie between `edges[i]` and `edges[i + 1]` (float64, clipped to the range seen);
    `zeros` further ones are exactly 0, as is much of what a ReLU gives.
    """

    counts: NDArray[np.float64]
    edges: NDArray[np.float64]
    zeros: float


@dataclass
class TensorStatistics:
    """Statistics of one float tensor over the samples given to `update`.

    `minimum > maximum` says that no usable value was seen. `average_low`, `average_high` are the moving
    averages of the samples' extremes. `masked` and `nan` count samples that held a value of at least
    `LIMIT` (or an infinity), or a NaN; such values enter nothing else.
    """

    samples: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    average_low: float = 0.0
    average_high: float = 0.0
    masked: int = 0
    nan: int = 0
    zeros: int = 0
    exponent: int = _LEAST_EXPONENT
    first: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))

    def update(self, values: NDArray[np.floating], ordinal: int) -> None:
        """Take in one sample's tensor of any shape; `ordinal` is the sample's place in the data.

        Extremes are taken over every element. Of a tensor with more than 16,384 elements the histogram
        takes about that many, evenly spread and others for each sample.
        """
        flat = np.asarray(values, np.float32).reshape(-1)
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        if not (low > -LIMIT and high < LIMIT):
            flat = self._usable(flat)
            if not flat.size:
                return
            low, high = float(flat.min()), float(flat.max())
        self._extremes(low, high)
        self._widen()
        self._count(_pick(flat, ordinal))

    @property
    def seen(self) -> bool:
        """Whether any usable value was seen."""
        return self.minimum <= self.maximum

    def bins(self) -> Bins:
        """The histogram, its outer bins cut at the extremes."""
        width = 2.0**self.exponent
        edges = (self.first + np.arange(len(self.counts) + 1)) * width
        edges = np.clip(edges, min(self.minimum, 0.0), max(self.maximum, 0.0))
        return Bins(self.counts.astype(np.float64), edges, float(self.zeros))

    def _usable(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        nan = bool(np.isnan(flat).any())
        with np.errstate(invalid="ignore"):
            usable = np.abs(flat) < LIMIT
        self.nan += nan
        self.masked += bool((~usable & ~np.isnan(flat)).any())
        return flat[usable]

    def _extremes(self, low: float, high: float) -> None:
        self.samples += 1
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        share = max(MOMENTUM, 1 / self.samples)
        self.average_low += share * (low - self.average_low)
        self.average_high += share * (high - self.average_high)

    def _widen(self) -> None:
        """Let the bins reach over zero and both extremes, doubling their width as often as needed."""
        low, high = min(self.minimum, 0.0), max(self.maximum, 0.0)
        exponent = self.exponent
        while _bin(high, exponent) - _bin(low, exponent) >= BINS:
            exponent = max(exponent + 1, math.frexp((high - low) / BINS)[1] - 1)
        if exponent > self.exponent:
            self._coarsen(exponent - self.exponent)
        first, last = _bin(low, exponent), _bin(high, exponent)
        before = self.first - first
        after = last - (self.first + len(self.counts) - 1)
        if before or after:
            self.counts = np.pad(self.counts, (before, after))
            self.first = first

    def _coarsen(self, doublings: int) -> None:
        index = (self.first + np.arange(len(self.counts))) >> min(doublings, 62)
        self.first = int(index[0])
        starts = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
        self.counts = np.add.reduceat(self.counts, starts)
        self.exponent += doublings

    def _count(self, picked: NDArray[np.float32]) -> None:
        # Scaled down, a float32 could vanish below the least one, and -1e-40 fall into the bin of 0.
        kind = np.float32 if self.exponent <= 0 else np.float64
        index = picked * kind(2.0**-self.exponent)
        np.floor(index, out=index)
        index -= kind(self.first)
        found = np.bincount(index.astype(np.intp), minlength=len(self.counts))
        zeros = int(np.count_nonzero(picked == 0))
        found[-self.first] -= zeros
        self.zeros += zeros
        self.counts += found


def _bin(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent))


def _pick(flat: NDArray[np.float32], ordinal: int) -> NDArray[np.float32]:
    """Runs of one cache line each, a period apart that shares no factor with the tensor's size."""
    if flat.size <= _PICKED:
        return flat
    period = _RUN * flat.size // _PICKED
    while math.gcd(period, flat.size) > 1:
        period += 1
    start = ordinal * 2654435761 % (period - _RUN + 1)
    rows = flat[: flat.size // period * period].reshape(-1, period)
    return rows[:, start : start + _RUN].reshape(-1)
