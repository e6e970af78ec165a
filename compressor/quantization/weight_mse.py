"""Weight scales of least squared error, one per output channel.

Source: Sung et al., Resiliency of Deep Neural Networks under Quantization, 2015 (arXiv:1511.06488), with
the scale searched per channel. Clipping a channel's few largest weights makes the steps of all others
finer. The plain scale is among the candidates, so a channel is never worse off than with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.pairs import project, worst_pair

__all__ = ["quantize_rows"]

_LIMIT = 127
_SHARES = np.linspace(1.0, 0.5, 26)
_CHUNK = 1 << 22


def quantize_rows(
    rows: NDArray[Any], floor: NDArray[np.float64], limit: int | None
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """As `pairs.quantize_rows`, with scales also below absmax / 127."""
    codes, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        codes[part], scales[part] = _quantize(np.asarray(rows[part], np.float64), floor[part], limit)
    return codes, scales


def _quantize(
    rows: NDArray[np.float64], floor: NDArray[np.float64], limit: int | None
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    plain = np.abs(rows).max(axis=1, initial=0.0) / _LIMIT
    safe = plain if limit is None else np.maximum(plain, worst_pair(rows) / limit)
    best = np.full(len(rows), np.inf)
    codes, scales = np.zeros(rows.shape, np.int8), np.ones(len(rows), np.float32)
    for share in _SHARES:
        scale = np.maximum(safe * share, floor).astype(np.float32)
        trial = project(rows / scale[:, None], 2 * _LIMIT if limit is None else limit)
        error = np.square(trial * scale[:, None].astype(np.float64) - rows).sum(axis=1)
        better = error < best
        best[better], scales[better], codes[better] = error[better], scale[better], trial[better]
    return codes, scales
