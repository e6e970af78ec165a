"""Rounding of weights to int8, with pairs that cannot saturate.

x86 processors without VNNI multiply uint8 activations by int8 weights and add the products of two
neighbours in saturating int16 (VPMADDUBSW). Two neighbours of one sign with |q1| + |q2| > 128 overflow
there for large activations, and the result is silently wrong. Here each channel gets the scale and the
rounding of least squared error among those that cannot overflow: between the plain scale, with the
offending pairs moved to the nearest allowed point, and a scale so large that no pair offends.

Channels whose calibrated inputs stay below their range's end could be spared, but then the weights are safe
for these samples alone: of 300 test images of CIFAR-10, 61 % drive some channel of ResNet-20 beyond its
maximum over 300 calibration images. So the limit holds for all inputs. What may be chosen is which channels
are neighbours (`reorder`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["project", "quantize_rows", "worst_pair"]

_LIMIT = 127
_CANDIDATES = 9
_CHUNK = 1 << 22


def worst_pair(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Largest |a + b| over neighbours (2i, 2i+1), for each row of `rows` [channels, k].

    For two of one sign that is |a| + |b|; for others it is below the row's largest magnitude.
    """
    first, second = _neighbours(rows)
    sums = np.abs(first + second).max(axis=1, initial=0.0)
    return np.asarray(sums, np.float64)


def project(real: NDArray[np.floating], limit: int) -> NDArray[np.floating]:
    """Round `real` [channels, k], in units of the scale, to int8 codes so that no pair exceeds `limit`.

    A pair of one sign whose rounded magnitudes sum to more than `limit` moves to the nearest point of the
    line |a| + |b| = limit (the Euclidean projection), all others are rounded to nearest.
    """
    rounded = np.rint(real)
    np.clip(rounded, -_LIMIT, _LIMIT, out=rounded)
    first, second = _neighbours(rounded)
    bad = np.nonzero(np.abs(first + second) > limit)
    a, b = (np.abs(part[bad]) for part in _neighbours(real))
    moved = np.clip(np.rint((a - b + limit) / 2), limit - _LIMIT, _LIMIT)
    first[bad] = np.copysign(moved, first[bad])
    second[bad] = np.copysign(limit - moved, second[bad])
    return np.asarray(rounded)


def quantize_rows(
    rows: NDArray[np.floating], floor: NDArray[np.float64], pair_limit: int | None
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric int8 codes [channels, k] and scales [channels] for weights `rows` in the kernel's order.

    `floor` [channels] is the least scale allowed (bias range, normal numbers). Without `pair_limit` the
    scale is absmax / 127.
    """
    codes = np.empty(rows.shape, np.int8)
    scales = np.empty(len(rows), np.float32)
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        codes[part], scales[part] = _quantize(
            np.ascontiguousarray(rows[part], np.float32), floor[part], pair_limit
        )
    return codes, scales


def _quantize(
    rows: NDArray[np.float32], floor: NDArray[np.float64], pair_limit: int | None
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    low = np.maximum(np.abs(rows).max(axis=1, initial=0.0).astype(np.float64) / _LIMIT, floor)
    if pair_limit is None:
        scale = low.astype(np.float32)
        return np.clip(np.rint(rows / scale[:, None]), -_LIMIT, _LIMIT).astype(np.int8), scale
    high = np.maximum(low, worst_pair(rows) / pair_limit)
    best = np.full(len(rows), np.inf)
    codes, scales = np.zeros(rows.shape, np.int8), low.astype(np.float32)
    for share in np.linspace(0.0, 1.0, _CANDIDATES):
        scale = (low + share * (high - low)).astype(np.float32)
        real = rows / scale[:, None]
        trial = project(real, pair_limit)
        real -= trial
        error = np.einsum("ck,ck->c", real, real) * np.square(scale.astype(np.float64))
        better = error < best
        best[better], scales[better], codes[better] = error[better], scale[better], trial[better]
    return codes, scales


def _neighbours(rows: NDArray[np.floating]) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Views of the first and of the second of each pair; a last one without a partner is left out."""
    width = rows.shape[1] // 2 * 2
    return rows[:, 0:width:2], rows[:, 1:width:2]
