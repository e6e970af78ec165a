"""What an engine's outputs are worth against the labels, sample by sample where the metric allows it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import user_code
from compressor.errors import DataError
from compressor.metrics import METRICS, check

__all__ = ["Scores", "choose", "evaluate"]

_Array = NDArray[Any]
_Outputs = Mapping[str, _Array] | _Array


@dataclass(frozen=True)
class Scores:
    """A metric on n samples.

    `values`, shape (n,), are per sample: bool for proportions (whose `value` is in percent), float64
    otherwise, NaN where there is none. A metric of the whole set has `whole` instead, which
    gives it for the samples at some positions and took `seconds` for all of them. `nonfinite` counts
    samples with NaN or infinite outputs.
    `groups` are positions of samples that only count together (the two of a pair), for either kind.
    """

    metric: str
    higher_is_better: bool
    n: int
    nonfinite: int = 0
    values: _Array | None = None
    whole: Callable[[_Array], float] | None = None
    seconds: float = 0.0
    root: bool = False
    groups: list[_Array] | None = None

    @property
    def unit(self) -> str:
        return "%" if self.values is not None and self.values.dtype == bool else ""


def choose(labels: _Array | None, outputs: _Outputs) -> tuple[str | None, str]:
    """The metric that labels and outputs speak for, and why; None where that cannot be known.

    Class numbers of shape (n,) with class scores (n, k) give top1, with one score each binary; float
    labels of an output's shape give mse. Class numbers may be whole floats where they have no output's shape.
    """
    if labels is None:
        return None, "the data have no labels"
    arrays = _named(outputs)
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    if labels.dtype.kind == "f":
        fitting = [name for name, array in arrays.items() if _flat(array).shape == _flat(labels).shape]
        if fitting:
            return "mse", f"labels are numbers of the shape of output '{fitting[0]}'"
        if labels.ndim != 1 or not (np.isfinite(labels) & (labels == np.rint(labels))).all():
            fractions = ", and are no class numbers" if labels.ndim == 1 else ""
            return None, (
                f"labels of shape {labels.shape} fit none of the outputs ({shapes}){fractions}; pass --metric"
            )
    if labels.ndim != 1:
        return None, f"labels of shape {labels.shape} are no class numbers; pass --metric module:callable"
    return _choose_classes(labels, arrays, shapes)


def _choose_classes(labels: _Array, arrays: Mapping[str, _Array], shapes: str) -> tuple[str | None, str]:
    low, high = int(labels.min()), int(labels.max())
    for name, array in arrays.items():
        flat = _flat(array)
        if flat.shape[:1] != labels.shape:
            continue
        if flat.ndim == 1 and array.dtype.kind in "iu":
            return "top1", f"output '{name}' holds class numbers"
        if flat.ndim == 1 and low >= 0 and high <= 1:
            share = bool((flat >= 0).all() and (flat <= 1).all())
            return ("binary" if share else "binary-logit"), f"output '{name}' is one score a sample"
        if flat.ndim == 2 and low >= 0 and high < flat.shape[1]:
            return "top1", f"output '{name}' holds scores of {flat.shape[1]} classes"
    return None, (
        f"labels from {low} to {high} fit none of the outputs ({shapes}): class numbers go from 0 to the "
        "number of classes less one; mend the labels or pass --metric"
    )


def evaluate(metric: str, outputs: _Outputs, labels: _Array) -> Scores:
    """Score outputs (arrays of n rows by name, or one array) against labels of n rows.

    `module:callable` is called with the outputs (the array itself if there is one output, else a dict)
    and the labels, copies that are its own, and gives n scores or one number; its attribute
    `higher_is_better` defaults to True. A function as its attribute `groups` gives from the labels the number
    of each sample's group: samples of a group (the two sentences of a pair) stay together in every resample.
    Raises `UsageError` for an unknown metric, `DataError` if outputs and labels do not fit it.
    """
    metric = check(metric)
    arrays = _named(outputs)
    finite = _finite_rows(arrays, len(labels))
    if ":" in metric:
        return _of_user(metric, arrays, labels, finite)
    values = _values(metric, arrays, labels, finite)
    bad = int((~finite).sum())
    return Scores(
        metric, METRICS[metric].higher_is_better, len(labels), bad, values=values, root=metric == "rmse"
    )


def _values(metric: str, arrays: Mapping[str, _Array], labels: _Array, finite: _Array) -> _Array:
    """One score a sample. A class decided from NaN counts as wrong; an error from NaN is NaN."""
    if metric in ("top1", "top5"):
        scores = _output(arrays, labels, (1, 2), metric)
        return _ranked(scores, labels, int(metric[3:])) & _known(scores)
    if metric.startswith("binary"):
        scores = _output(arrays, labels, (1,), metric)
        return np.equal(scores > (0.5 if metric == "binary" else 0.0), labels > 0) & _known(scores)
    got = _same_shape(arrays, labels, metric)
    with np.errstate(invalid="ignore", over="ignore"):
        error = got.astype(np.float64) - _flat(labels).astype(np.float64)
        error = np.abs(error) if metric == "mae" else error**2
    values: _Array = error.reshape(len(labels), -1).mean(1)
    return np.where(finite, values, np.nan)


def _known(scores: _Array) -> _Array:
    """Samples without NaN. An infinite score has its place in an order."""
    if scores.dtype.kind != "f":
        return np.ones(len(scores), bool)
    return np.asarray(~np.isnan(scores).reshape(len(scores), -1).any(1))


def _ranked(scores: _Array, labels: _Array, k: int) -> _Array:
    """Whether the label is among the k highest; of equal scores the lower class goes first, as in argmax."""
    if (labels != np.rint(labels)).any():
        raise DataError(f"metric top{k} needs labels that are class numbers, but they have fractions")
    if scores.ndim == 1:
        if k > 1:
            raise DataError(f"metric top{k} needs scores of each class, but the output holds class numbers")
        return np.asarray(scores == labels)
    if k > 1 and scores.shape[1] <= k:
        raise DataError(f"metric top{k} says nothing with {scores.shape[1]} classes; use top1")
    if labels.min() < 0 or labels.max() >= scores.shape[1]:
        raise DataError(
            f"labels go from {labels.min()} to {labels.max()}, but the output has {scores.shape[1]} classes"
        )
    own = scores[np.arange(len(labels)), labels.astype(np.int64)][:, None]
    before = np.arange(scores.shape[1]) < labels[:, None]
    return np.asarray(((scores > own) | ((scores == own) & before)).sum(1) < k)


def _output(arrays: Mapping[str, _Array], labels: _Array, ranks: tuple[int, ...], metric: str) -> _Array:
    """The first output whose shape suits."""
    if labels.ndim == 1:
        for array in arrays.values():
            flat = _flat(array)
            if (
                flat.ndim in ranks
                and len(flat) == len(labels)
                and not (flat.ndim == 1 and _is_top(metric, array))
            ):
                return flat
    raise DataError(_unfit(metric, arrays, labels))


def _is_top(metric: str, array: _Array) -> bool:
    return metric.startswith("top") and array.dtype.kind == "f"


def _same_shape(arrays: Mapping[str, _Array], labels: _Array, metric: str) -> _Array:
    for array in arrays.values():
        if _flat(array).shape == _flat(labels).shape:
            return _flat(array)
    raise DataError(_unfit(metric, arrays, labels))


def _unfit(metric: str, arrays: Mapping[str, _Array], labels: _Array) -> str:
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    return f"metric {metric}: labels of shape {labels.shape} do not fit the outputs ({shapes}); pass another"


def _of_user(metric: str, arrays: Mapping[str, _Array], labels: _Array, finite: _Array) -> Scores:
    function = user_code.load(metric)

    def call(rows: _Array | None) -> _Array:
        """What it gives for copies: what it does to its arguments is not done to ours."""
        chosen = {name: _copied(array, rows) for name, array in arrays.items()}
        given = next(iter(chosen.values())) if len(chosen) == 1 else chosen
        wanted = _copied(labels, rows)
        with user_code.running(metric):
            return np.asarray(function(given, wanted))

    started = time.monotonic()
    result = call(None)
    seconds = time.monotonic() - started
    higher = _higher(metric, function)
    bad = int((~finite).sum())
    groups = _groups(metric, getattr(function, "groups", None), labels)
    if _numeric(result) and result.shape == (len(labels),):
        values = result if result.dtype == bool else np.where(np.isfinite(result), result, np.nan)
        return Scores(metric, higher, len(labels), bad, values=values, groups=groups)
    _number(metric, result, f"it must give one number, or one for each of the {len(labels)} samples")
    known: dict[bytes, float] = {}  # all intervals ask for the same resamples

    def whole(rows: _Array) -> float:
        key = hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
        if key not in known:
            known[key] = _number(metric, call(rows), "it must give one number, as it does for all samples")
        return known[key]

    return Scores(metric, higher, len(labels), bad, whole=whole, seconds=seconds, groups=groups)


def _copied(array: _Array, rows: _Array | None) -> _Array:
    return array.copy() if rows is None else array[rows]


def _numeric(result: _Array) -> bool:
    return result.dtype.kind in "biuf"


def _number(metric: str, result: _Array, wanted: str) -> float:
    """The one number that a metric of the whole set gives; `wanted` says what is asked for."""
    if not _numeric(result) or result.shape not in ((), (1,)):
        raise DataError(f"metric {metric} gave {result.dtype} of shape {result.shape}; {wanted}")
    return float(result.reshape(()))


def _higher(metric: str, function: Any) -> bool:
    found = getattr(function, "higher_is_better", True)
    if not isinstance(found, bool | np.bool_):
        raise DataError(f"metric {metric}: higher_is_better is {found!r}; it must be True or False")
    return bool(found)


def _groups(metric: str, function: Any, labels: _Array) -> list[_Array] | None:
    """The positions of each group, in order."""
    if function is None:
        return None
    with user_code.running(metric):
        numbers = np.asarray(function(labels.copy()))
    if numbers.shape != (len(labels),) or numbers.dtype.kind not in "biufUS":
        raise DataError(
            f"metric {metric}: its groups have shape {numbers.shape} and type {numbers.dtype}; "
            f"they must be one number for each of the {len(labels)} samples"
        )
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise DataError(f"metric {metric}: its groups are not all finite; give each sample a group's number")
    _, numbers = np.unique(numbers, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _finite_rows(arrays: Mapping[str, _Array], n: int) -> _Array:
    """Which samples have no NaN and no infinity in any output."""
    finite = np.ones(n, bool)
    for name, array in arrays.items():
        if array.shape[:1] != (n,):
            raise DataError(f"output '{name}' has shape {array.shape}, but there are {n} labels")
        if array.dtype.kind in "fc":
            finite &= np.isfinite(array).reshape(n, -1).all(1)
    return finite


def _named(outputs: _Outputs) -> Mapping[str, _Array]:
    return outputs if isinstance(outputs, Mapping) else {"output": outputs}


def _flat(array: _Array) -> _Array:
    """Without axes of size 1 behind the first: scores (n, k, 1, 1) are (n, k)."""
    return array.reshape(array.shape[:1] + tuple(size for size in array.shape[1:] if size != 1))
