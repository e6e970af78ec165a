"""Labels that lie beside the samples: under which name, and in which form they can be used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from compressor.model import TensorSpec

__all__ = ["label_name", "usable_labels"]

_NAMES = ("label", "labels", "target", "targets", "y")


def label_name(names: Iterable[str], inputs: tuple[TensorSpec, ...]) -> str | None:
    """Which of the arrays holds labels: a usual name that is no input of the model."""
    taken = {spec.name for spec in inputs}
    return next((name for name in names if name.lower() in _NAMES and name not in taken), None)


def usable_labels(labels: NDArray[Any]) -> tuple[NDArray[Any] | None, str]:
    """Labels as metrics take them, and a note if they were changed, or why there are none.

    Shape (n, 1) becomes (n,); one-hot rows (n, k) become class numbers; text is no label.
    """
    if labels.dtype.kind not in "biuf":
        dtype = "str" if labels.dtype.kind in "US" else labels.dtype
        return None, f"labels of dtype {dtype} are left aside: they are not numbers"
    if labels.ndim == 2 and labels.shape[1] == 1:
        return labels[:, 0], ""
    if labels.ndim == 2 and _is_one_hot(labels):
        return labels.argmax(1), f"one-hot labels are taken as class numbers 0 to {labels.shape[1] - 1}"
    return labels, ""


def _is_one_hot(labels: NDArray[Any]) -> bool:
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all())
