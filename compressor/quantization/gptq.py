"""Rounding of weights in blocks so that a layer's output changes least, with second moments of its input.

E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", ICLR 2023, https://arxiv.org/abs/2210.17323, algorithm 1: columns are rounded one
after the other, and those not yet rounded take the error over in the direction that the inverse Hessian
tells. `rounding` does the same for int8 rows with one scale; here each block finds its own on the way.

The paper dampens the Hessian by 1 % of its mean diagonal and calibrates on 260,000 tokens. Moments of few
vectors are mostly noise, and following them loses more than rounding to nearest (seen on a sentence encoder:
1,200 tokens for 384 columns). So the damping is at least columns / vectors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.blocks import Array, Blocks, blocked, encode
from compressor.quantization.hqq import fitted

__all__ = ["round_rows"]

_DAMPING = 0.01  # of the mean diagonal


def round_rows(
    rows: NDArray[np.floating], moments: NDArray[np.floating], vectors: int, bits: int, group: int
) -> Blocks:
    """Codes and parameters for `rows` [rows, columns] in blocks of `group` columns.

    `moments` [columns, columns] is the mean of x xT over `vectors` inputs x of the layer. A block's
    parameters are fitted (`hqq.fitted`) when the blocks before it have handed on their errors.
    """
    width = rows.shape[1]
    values = blocked(rows, group).reshape(len(rows), -1).astype(np.float64)
    damping = max(_DAMPING, width / max(1, vectors))
    spread = _spread(np.asarray(moments, np.float64), values.shape[1], damping)
    made = []
    for start in range(0, values.shape[1], group):
        block = slice(start, start + group)
        scale, zero = fitted(values[:, None, block].astype(np.float32), bits)
        made.append((_round_block(values, spread, block, scale, zero, bits), scale, zero))
    codes, scales, zeros = (np.concatenate(item, axis=1) for item in zip(*made, strict=True))
    return Blocks(codes, scales, zeros, bits, width)


def _round_block(
    values: NDArray[np.float64],
    spread: NDArray[np.float64],
    block: slice,
    scale: Array,
    zero: NDArray[np.uint8],
    bits: int,
) -> NDArray[np.uint8]:
    """Codes [rows, 1, group] of one block; its errors go into the columns behind it, in place."""
    codes = np.empty((len(values), 1, block.stop - block.start), np.uint8)
    errors = np.empty((len(values), block.stop - block.start))
    for place, column in enumerate(range(block.start, block.stop)):
        code = encode(values[:, column, None, None].astype(np.float32), scale, zero, bits)
        real = (code[:, 0, 0].astype(np.float64) - zero[:, 0]) * scale[:, 0]
        error = (values[:, column] - real) / spread[column, column]
        values[:, column + 1 : block.stop] -= np.outer(error, spread[column, column + 1 : block.stop])
        codes[:, 0, place], errors[:, place] = code[:, 0, 0], error
    values[:, block.stop :] -= errors @ spread[block, block.stop :]
    return codes


def _spread(moments: NDArray[np.float64], columns: int, damping: float) -> NDArray[np.float64]:
    """The upper Cholesky factor of the inverse of the damped moments, [columns, columns].

    Columns whose input was always 0, and filling, stand alone.
    """
    full = np.zeros((columns, columns))
    full[: len(moments), : len(moments)] = moments
    diagonal = np.diag(full).copy()
    mean = diagonal[diagonal > 0].mean() if (diagonal > 0).any() else 1.0
    full[np.diag_indices(columns)] = np.where(diagonal > 0, diagonal, mean) + damping * mean
    inverse = np.linalg.inv(np.linalg.cholesky(full))
    return np.asarray(np.linalg.cholesky(inverse.T @ inverse).T)
