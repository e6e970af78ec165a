"""Fingerprints of samples, so that every later pass over a source is known to give the same ones.

`split` reads all samples of a source whose content may change from pass to pass, and writes the fingerprints
of those it picks beside their indices; `stream` holds what it reads against them. A fingerprint is the
first 16 bytes of SHA-256 over names, dtypes, shapes and values of the arrays that the model gets (as the
source gives them) and the label. It does not depend on how the source forms its batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.data._types import Batch
from compressor.errors import DataError

__all__ = ["beside", "fingerprints", "read", "refuse_change"]

_SIZE = 16


def beside(indices: Path) -> Path:
    """The file of the fingerprints of a file of indices."""
    return indices.with_name(f"{indices.stem}.fingerprints.npy")


def read(indices: str | None) -> NDArray[np.uint8] | None:
    """The fingerprints that were written for a file of indices (shape n x 16); None: there are none."""
    place = beside(Path(indices)) if indices else None
    return np.load(place, allow_pickle=False) if place and place.exists() else None


def fingerprints(batch: Batch, names: Collection[str]) -> NDArray[np.uint8]:
    """One row of 16 bytes for each sample of a batch, over the arrays `names` and the labels."""
    arrays = [(name, batch.inputs[name]) for name in sorted(names) if name in batch.inputs]
    if batch.labels is not None:
        arrays.append(("", batch.labels))
    rows = [_one(arrays, row) for row in range(len(batch.indices))]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), _SIZE)


def refuse_change(source: str, batch: Batch, names: Collection[str], expected: NDArray[np.uint8]) -> None:
    """Raise `DataError` that names the first sample of `batch` that is not the one of `expected`."""
    same = (fingerprints(batch, names) == expected).all(1)
    if not same.all():
        number = int(batch.indices[int(np.argmin(same))])
        raise DataError(
            f"data '{source}': the source gave other samples than before (first at number {number}, counted "
            "from 0); it must give the same samples in the same order each time it is read (no shuffling, "
            "seed what is random, do not change files while a run goes on)"
        )


def _one(arrays: list[tuple[str, NDArray[Any]]], row: int) -> bytes:
    total = hashlib.sha256()
    for name, array in arrays:
        value = array[row]
        total.update(f"{name}\0{array.dtype}\0{np.shape(value)}\0".encode())
        total.update(repr(value).encode() if array.dtype.hasobject else np.ascontiguousarray(value).tobytes())
    return total.digest()[:_SIZE]
