"""A random part of a data reference's samples, as a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from compressor.data import _fingerprints

__all__ = ["VERSION", "subset"]

VERSION: int = 2


def subset(indices: str, n: int, seed: int, folder: str) -> dict[str, Any]:
    """Draw `n` of the positions in the file `indices` without order in the choice, kept in their order.

    Returns {"file": name of the file of positions below `folder`, "n"}.
    """
    whole = np.load(indices, allow_pickle=False)
    picked = np.sort(np.random.default_rng(seed).choice(len(whole), min(n, len(whole)), replace=False))
    marks = _fingerprints.read(indices)
    if marks is not None:
        np.save(_fingerprints.beside(Path(folder, "indices.npy")), marks[picked])
    np.save(Path(folder, "indices.npy"), whole[picked])
    return {"file": "indices.npy", "n": len(picked)}
