"""Weights in blocks of a few bits: unsigned codes, with a scale and a zero point for each block of a row.

This is what weight-only kernels take (`MatMulNBits`, `GatherBlockQuantized`): value = (code - zero) x scale.
How codes and parameters are chosen is in `hqq` and `gptq`; here is rounding to nearest, where both begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Blocks", "blocked", "encode", "nearest", "parameters"]

Array = NDArray[np.float32]
Codes = NDArray[np.uint8]
_LEAST_SCALE = 2.0**-60


@dataclass(frozen=True)
class Blocks:
    """`codes` [rows, blocks, group], `scale` and `zero` [rows, blocks]; `width` columns are real."""

    codes: Codes
    scale: Array
    zero: Codes
    bits: int
    width: int

    def values(self) -> Array:
        """The weights that the codes stand for, [rows, width]."""
        real = (self.codes.astype(np.float32) - self.zero[..., None]) * self.scale[..., None]
        return real.reshape(len(real), -1)[:, : self.width]

    def packed_codes(self) -> Codes:
        """[rows, blocks, group x bits / 8]; with 4 bits the first of two codes lies in the low half."""
        return _packed(self.codes, self.bits)

    def packed_zeros(self) -> Codes:
        """[rows, blocks x bits / 8], rows filled up to whole bytes."""
        odd = self.bits == 4 and self.zero.shape[1] % 2 == 1
        return _packed(np.pad(self.zero, ((0, 0), (0, int(odd)))), self.bits)


def blocked(rows: NDArray[Any], group: int) -> Array:
    """[rows, blocks, group] from [rows, columns]; zeros fill the last block."""
    fill = -rows.shape[1] % group
    return np.pad(np.asarray(rows, np.float32), ((0, 0), (0, fill))).reshape(len(rows), -1, group)


def parameters(values: Array, bits: int) -> tuple[Array, Codes]:
    """Scale and zero point [rows, blocks] that reach from the least to the largest value, 0 included."""
    low = np.minimum(values.min(axis=-1), 0)
    high = np.maximum(values.max(axis=-1), 0)
    top = 2**bits - 1
    scale = np.maximum((high - low) / top, np.float32(_LEAST_SCALE))
    zero = np.clip(np.rint(-low / scale), 0, top)
    return scale.astype(np.float32), zero.astype(np.uint8)


def encode(values: Array, scale: Array, zero: Codes, bits: int) -> Codes:
    """The nearest codes [rows, blocks, group]."""
    codes = np.clip(np.rint(values / scale[..., None]) + zero[..., None], 0, 2**bits - 1)
    return np.asarray(codes, np.uint8)


def nearest(rows: NDArray[Any], bits: int, group: int) -> Blocks:
    """Round `rows` [rows, columns] to nearest, ranges from minimum to maximum."""
    values = blocked(rows, group)
    scale, zero = parameters(values, bits)
    return Blocks(encode(values, scale, zero, bits), scale, zero, bits, rows.shape[1])


def _packed(codes: Codes, bits: int) -> Codes:
    if bits == 8:
        return codes
    low, high = codes[..., 0::2], codes[..., 1::2]
    return np.asarray(low | (high << 4), np.uint8)
