"""Half-quadratic quantization of weights, which needs no data.

H. Badri and A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023,
https://mobiusml.github.io/hqq_blog/. Minimise |W - s (Q - z)|^p with p < 1, which forgives outliers, by
turns: an error E that takes the outliers in is split off by shrinkage, then the parameters fit W - E in
closed form. The paper solves for a real zero point. Kernels here take an integer one, so it is rounded in
each turn and the scale is solved for as well; each block keeps its best turn, rounding to nearest included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.blocks import Array, Blocks, Codes, blocked, encode, parameters

__all__ = ["fitted", "round_rows"]

_TURNS = 20
_NORM = 0.7
_BETA, _KAPPA = 10.0, 1.01
_CHUNK = 1 << 20  # weights at a time
_LEAST_SCALE = 2.0**-60


def round_rows(rows: NDArray[np.floating], bits: int, group: int) -> Blocks:
    """Codes and parameters for `rows` [rows, columns] in blocks of `group` columns."""
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    parts = [fitted(blocked(rows[start : start + step], group), bits) for start in range(0, len(rows), step)]
    scale, zero = (np.concatenate(item) for item in zip(*parts, strict=True))
    return Blocks(encode(blocked(rows, group), scale, zero, bits), scale, zero, bits, rows.shape[1])


def fitted(values: Array, bits: int) -> tuple[Array, Codes]:
    """Scale and zero point [rows, blocks] for `values` [rows, blocks, group]."""
    size = np.maximum(np.abs(values).max(axis=-1, keepdims=True), np.float32(_LEAST_SCALE))
    unit = values / size  # the strength of shrinkage is meant for weights of about this size
    scale, zero = parameters(unit, bits)
    best = _Best(unit, bits, scale, zero)
    beta = _BETA
    for _ in range(_TURNS):
        codes = encode(unit, scale, zero, bits)
        rest = unit - (codes - zero[..., None].astype(np.float32)) * scale[..., None]
        aim = unit - _shrink(rest, beta)
        scale, zero = _fit(aim, codes, scale, bits)
        best.offer(scale, zero)
        beta *= _KAPPA
    return (best.scale * size[..., 0]).astype(np.float32), best.zero


def _shrink(rest: Array, beta: float) -> Array:
    """The generalised soft threshold of an l_p norm: what is left of an error beyond |e|^(p-1) / beta."""
    magnitude = np.maximum(np.abs(rest), np.float32(1e-8))
    return np.asarray(np.sign(rest) * np.maximum(magnitude - magnitude ** (_NORM - 1) / beta, 0))


def _fit(aim: Array, codes: Codes, scale: Array, bits: int) -> tuple[Array, Codes]:
    """Zero point, then scale, for which fixed codes come closest to `aim`."""
    zero = np.clip(np.rint((codes - aim / scale[..., None]).mean(axis=-1)), 0, 2**bits - 1)
    steps = codes - zero[..., None]
    square = (steps * steps).sum(axis=-1)
    fitted = (aim * steps).sum(axis=-1) / np.maximum(square, 1)
    return np.where(fitted > _LEAST_SCALE, fitted, scale).astype(np.float32), zero.astype(np.uint8)


class _Best:
    """The parameters of least error so far, block by block."""

    def __init__(self, values: Array, bits: int, scale: Array, zero: Codes) -> None:
        self.values, self.bits = values, bits
        self.scale, self.zero = scale.copy(), zero.copy()
        self.error = self._error(scale, zero)

    def _error(self, scale: Array, zero: Codes) -> Array:
        codes = encode(self.values, scale, zero, self.bits)
        made = (codes - zero[..., None].astype(np.float32)) * scale[..., None]
        return np.asarray((np.abs(self.values - made) ** _NORM).sum(axis=-1))

    def offer(self, scale: Array, zero: Codes) -> None:
        error = self._error(scale, zero)
        better = error < self.error
        self.error[better], self.scale[better], self.zero[better] = error[better], scale[better], zero[better]
