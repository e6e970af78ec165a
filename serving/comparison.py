"""A candidate's stored outputs against the baseline's and the labels, read batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor import events
from compressor.errors import DataError
from compressor.metrics import Agreement, Scores, check, choose, evaluate, measure, paired_drop
from serving.outputs import StoredBatch, read_outputs

if TYPE_CHECKING:
    from serving.runtimes import Array

__all__ = ["compare"]

Stored = Callable[[], Iterator[StoredBatch]]


def compare(
    baseline: Path,
    candidate: Path,
    metric: str | None = None,
    max_drop: float | None = None,
    *,
    labelled: bool = True,
    part: bool = False,
) -> dict[str, Any]:
    """Metric, drop and agreement from two folders that `run_engine` filled.

    `part`: the candidate may have run on a part of the baseline's samples, and is compared on these.
    `metric` None takes the one that labels and outputs speak for. With `labelled` False the labels that
    may lie in the data are not judged by. Returns {"metric", "baseline_metric" (as
    `compressor.metrics.measure`, or None), "metric_reason", "drop" (as `paired_drop`), "agreement" (as
    `Agreement.result`)}; of a baseline against itself drop and agreement are None. One score a sample
    is held in memory, and all outputs only for a metric of the user's own. Raises `UsageError` for an
    unknown metric, `DataError` where outputs, labels and metric do not fit each other.
    """
    asked = check(metric) if metric else None
    stored: Stored = partial(read_outputs, candidate)
    wanted: Stored = partial(_same_samples, baseline, candidate) if part else partial(read_outputs, baseline)
    name, reason = _metric(wanted, asked) if labelled else (None, "there are no labels to judge by")
    if asked and not name:
        events.warn(f"--metric {metric} was asked, but {reason}; accuracy is unknown")
    itself = baseline == candidate
    result: dict[str, Any] = {"metric": None, "baseline_metric": None, "metric_reason": reason, "drop": None}
    if name:
        before = _scores(wanted, name)
        after = before if itself else _scores(stored, name)
        result |= {"metric": measure(after), "baseline_metric": measure(before)}
        result["drop"] = None if itself else paired_drop(before, after, max_drop=max_drop)
    return {**result, "agreement": None if itself else _agreement(wanted, stored, _classes(name))}


def _classes(metric: str | None) -> bool | None:
    """Whether outputs are class scores, as far as the metric tells."""
    if metric in ("top1", "top5"):
        return True
    return False if metric in ("mse", "rmse", "mae") else None


def _metric(stored: Stored, asked: str | None) -> tuple[str | None, str]:
    """The metric for all batches: what is asked, or what every batch speaks for."""
    found: dict[str, str] = {}
    for batch in stored():
        if asked and batch.labels is not None:
            return asked, f"--metric {asked}"
        name, reason = choose(batch.labels, batch.outputs)
        if name is None:
            return None, reason
        found[name] = reason
    if set(found) == {"binary", "binary-logit"}:  # batches whose logits happen to lie in 0..1
        found.pop("binary")
    if len(found) != 1:
        return (
            None,
            "the batches speak for different metrics; pass --metric" if found else "there are no samples",
        )
    return next(iter(found.items()))


def _scores(stored: Stored, metric: str) -> Scores:
    if ":" in metric:
        outputs, labels = _whole(stored)
        return evaluate(metric, outputs, labels)
    parts = [evaluate(metric, batch.outputs, _labels(batch)) for batch in stored()]
    values = np.concatenate([part.values for part in parts if part.values is not None])
    return replace(parts[0], n=len(values), nonfinite=sum(part.nonfinite for part in parts), values=values)


def _labels(batch: StoredBatch) -> Array:
    if batch.labels is None:
        raise DataError("a metric needs labels, but some samples have none")
    return batch.labels


def _whole(stored: Stored) -> tuple[dict[str, Array], Array]:
    batches = list(stored())
    try:
        outputs = {
            name: np.concatenate([batch.outputs[name] for batch in batches]) for name in batches[0].outputs
        }
        return outputs, np.concatenate([_labels(batch) for batch in batches])
    except ValueError as error:
        raise DataError(
            f"the outputs differ in shape from batch to batch, so that no metric takes them whole ({error})"
        ) from error


def _agreement(baseline: Stored, candidate: Stored, classes: bool | None) -> dict[str, Any]:
    total, done = Agreement(classes), 0
    for before, after in _pairs(baseline, candidate):
        try:
            total.update(before.outputs, after.outputs)
        except ValueError as error:
            raise DataError(f"the engines cannot be compared: {error}") from error
        done += len(before.indices)
        events.progress("comparing", done, None)
    return total.result()


def _pairs(baseline: Stored, candidate: Stored) -> Iterator[tuple[StoredBatch, StoredBatch]]:
    try:
        for before, after in zip(baseline(), candidate(), strict=True):
            if not np.array_equal(before.indices, after.indices):
                raise ValueError("other samples")
            yield before, after
    except ValueError as error:
        raise DataError(
            "the engines were run on different samples or in different batches; run both again"
        ) from error


def _same_samples(baseline: Path, candidate: Path) -> Iterator[StoredBatch]:
    """The baseline's samples that the candidate was run on, in the candidate's batches.

    Both keep the samples in one order, so one pass over each is enough.
    """
    batches = read_outputs(baseline)
    current = next(batches, None)
    for wanted in read_outputs(candidate):
        parts: list[StoredBatch] = []
        missing = len(wanted.indices)
        while missing:
            if current is None:
                raise DataError("the candidate was run on samples that the baseline was not; run both again")
            here = np.isin(current.indices, wanted.indices)
            if here.any():
                parts.append(_rows(current, here))
                missing -= int(here.sum())
            if missing:
                current = next(batches, None)
        yield _joined(parts)


def _rows(batch: StoredBatch, chosen: Array) -> StoredBatch:
    labels = None if batch.labels is None else batch.labels[chosen]
    return StoredBatch(
        batch.indices[chosen], labels, {name: array[chosen] for name, array in batch.outputs.items()}
    )


def _joined(parts: list[StoredBatch]) -> StoredBatch:
    if len(parts) == 1:
        return parts[0]
    labels = None if parts[0].labels is None else np.concatenate([_labels(part) for part in parts])
    outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs}
    return StoredBatch(np.concatenate([part.indices for part in parts]), labels, outputs)
