"""How near an engine's outputs are to the reference's, without labels; added up batch by batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Agreement", "agreement"]

_LIMIT_DB = 200.0
_UNIT = 1e-3  # how far from 1 the length of a normalized vector may be
_Array = NDArray[Any]


def agreement(reference: Mapping[str, _Array], outputs: Mapping[str, _Array]) -> dict[str, Any]:
    """`Agreement` of whole arrays by output name."""
    total = Agreement()
    total.update(reference, outputs)
    return total.result()


class Agreement:
    """Sums over all samples seen; memory does not depend on their number."""

    def __init__(self, classes: bool | None = None) -> None:
        """`classes`: whether outputs (n, k) are class scores; None judges by the values (see `result`)."""
        self._classes = classes
        self._sums: dict[str, _Sums] = {}

    def update(self, reference: Mapping[str, _Array], outputs: Mapping[str, _Array]) -> None:
        """Add a batch: arrays of equal names and shapes, first axis samples; else `ValueError`."""
        if set(reference) != set(outputs):
            raise ValueError(f"outputs {sorted(outputs)} are compared with {sorted(reference)}")
        for name, expected in reference.items():
            if expected.shape != outputs[name].shape:
                raise ValueError(f"output '{name}' has shape {outputs[name].shape}, not {expected.shape}")
            self._sums.setdefault(name, _Sums()).add(expected, outputs[name])

    def result(self) -> dict[str, Any]:
        """top1 (share 0..1, None without class scores), sqnr_db, cosine, max_abs, n, nonfinite, outputs.

        SQNR is 10 log10(sum ref² / sum (ref - got)²) over all elements of all float outputs, within ±200
        dB; a value that is finite in the reference and not in the output makes it -200. The other
        figures leave such elements out; `nonfinite` counts them, `nonfinite_reference` those that are
        not finite in the reference. `outputs` has the same figures for each output. top1 is that of the
        first output that has classes. Vectors that all have length 1 are embeddings and no class scores,
        unless they are probabilities: which of their elements is the highest says nothing.
        """
        each = {name: sums.result() for name, sums in self._sums.items()}
        for name, sums in self._sums.items():
            if self._classes is False or (self._classes is None and sums.embeds):
                each[name]["top1"] = None
        total = _Sums()
        for sums in self._sums.values():
            total.merge(sums)
        shares = [found["top1"] for found in each.values() if found["top1"] is not None]
        return {**total.result(), "top1": shares[0] if shares else None, "outputs": each}


@dataclass
class _Sums:
    n: int = 0
    signal: float = 0.0
    noise: float = 0.0
    energy: float = 0.0
    product: float = 0.0
    max_abs: float = 0.0
    nonfinite: int = 0
    nonfinite_reference: int = 0
    judged: int = 0
    same_class: int = 0
    embeds: bool = False

    def add(self, expected: _Array, got: _Array) -> None:
        self.n += len(expected)
        self._add_classes(expected, got)
        if expected.dtype.kind not in "fc":
            return
        sound, fine = np.isfinite(expected), np.isfinite(got)
        self.nonfinite += int((sound & ~fine).sum())
        self.nonfinite_reference += int((~sound).sum())
        both = sound & fine
        one, two = expected[both].astype(np.float64), got[both].astype(np.float64)
        error = one - two
        self.signal += float(one @ one)
        self.noise += float(error @ error)
        self.energy += float(two @ two)
        self.product += float(one @ two)
        self.max_abs = max(self.max_abs, float(np.abs(error).max(initial=0.0)))

    def _add_classes(self, expected: _Array, got: _Array) -> None:
        """Class scores (n, k) are compared by their highest; whole numbers (n,) as they are."""
        flat = expected.reshape(expected.shape[:1] + tuple(size for size in expected.shape[1:] if size != 1))
        if flat.ndim == 2 and expected.dtype.kind == "f":
            other = got.reshape(flat.shape)
            sound = ~(np.isnan(flat) | np.isnan(other)).any(1)
            same = (flat.argmax(1) == other.argmax(1)) & sound
            self.embeds = _embeds(flat) and (self.embeds or not self.judged)
        elif flat.ndim == 1 and expected.dtype.kind in "iub":
            same = flat == got.reshape(flat.shape)
        else:
            return
        self.judged += len(flat)
        self.same_class += int(same.sum())

    def merge(self, other: _Sums) -> None:
        for name in ("signal", "noise", "energy", "product", "nonfinite", "nonfinite_reference"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.n = max(self.n, other.n)
        self.max_abs = max(self.max_abs, other.max_abs)

    def result(self) -> dict[str, Any]:
        norm = math.sqrt(self.signal) * math.sqrt(self.energy)
        return {
            "top1": self.same_class / self.judged if self.judged else None,
            "sqnr_db": -_LIMIT_DB if self.nonfinite else _decibels(self.signal, self.noise),
            "cosine": self.product / norm if norm else float(self.signal == self.energy),
            "max_abs": self.max_abs,
            "n": self.n,
            "nonfinite": self.nonfinite,
            "nonfinite_reference": self.nonfinite_reference,
        }


def _embeds(rows: _Array) -> bool:
    """Whether rows (n, k) are vectors of length 1 that are no probabilities."""
    values = rows.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        unit = np.abs(np.linalg.norm(values, axis=1) - 1) < _UNIT
        shares = (values >= 0).all(axis=1) & (np.abs(values.sum(axis=1) - 1) < _UNIT)
    return bool(unit.all() and not shares.all())


def _decibels(signal: float, noise: float) -> float:
    if not noise:
        return _LIMIT_DB
    if not signal:
        return -_LIMIT_DB
    return min(max(10 * (math.log10(signal) - math.log10(noise)), -_LIMIT_DB), _LIMIT_DB)
