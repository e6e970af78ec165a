"""A candidate's stored outputs against the baseline's and the labels, read batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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


def compare(
    baseline: Path,
    candidate: Path,
    metric: str | None = None,
    max_drop: float | None = None,
    *,
    labelled: bool = True,
) -> dict[str, Any]:
    """Metric, drop and agreement from two folders that `run_engine` filled.

    `metric` None takes the one that labels and outputs speak for. With `labelled` False the labels that
    may lie in the data are not judged by. Returns {"metric", "baseline_metric" (as
    `compressor.metrics.measure`, or None), "metric_reason", "drop" (as `paired_drop`), "agreement" (as
    `Agreement.result`)}; of a baseline against itself drop and agreement are None. One score a sample
    is held in memory, and all outputs only for a metric of the user's own. Raises `UsageError` for an
    unknown metric, `DataError` where outputs, labels and metric do not fit each other.
    """
    asked = check(metric) if metric else None
    name, reason = _metric(baseline, asked) if labelled else (None, "there are no labels to judge by")
    if asked and not name:
        events.warn(f"--metric {metric} was asked, but {reason}; accuracy is unknown")
    itself = baseline == candidate
    result: dict[str, Any] = {"metric": None, "baseline_metric": None, "metric_reason": reason, "drop": None}
    if name:
        before = _scores(baseline, name)
        after = before if itself else _scores(candidate, name)
        result |= {"metric": measure(after), "baseline_metric": measure(before)}
        result["drop"] = None if itself else paired_drop(before, after, max_drop=max_drop)
    return {**result, "agreement": None if itself else _agreement(baseline, candidate, _classes(name))}


def _classes(metric: str | None) -> bool | None:
    """Whether outputs are class scores, as far as the metric tells."""
    if metric in ("top1", "top5"):
        return True
    return False if metric in ("mse", "rmse", "mae") else None


def _metric(folder: Path, asked: str | None) -> tuple[str | None, str]:
    """The metric for all batches: what is asked, or what every batch speaks for."""
    found: dict[str, str] = {}
    for batch in read_outputs(folder):
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


def _scores(folder: Path, metric: str) -> Scores:
    if ":" in metric:
        outputs, labels = _whole(folder)
        return evaluate(metric, outputs, labels)
    parts = [evaluate(metric, batch.outputs, _labels(batch)) for batch in read_outputs(folder)]
    values = np.concatenate([part.values for part in parts if part.values is not None])
    return replace(parts[0], n=len(values), nonfinite=sum(part.nonfinite for part in parts), values=values)


def _labels(batch: StoredBatch) -> Array:
    if batch.labels is None:
        raise DataError("a metric needs labels, but some samples have none")
    return batch.labels


def _whole(folder: Path) -> tuple[dict[str, Array], Array]:
    batches = list(read_outputs(folder))
    try:
        outputs = {
            name: np.concatenate([batch.outputs[name] for batch in batches]) for name in batches[0].outputs
        }
        return outputs, np.concatenate([_labels(batch) for batch in batches])
    except ValueError as error:
        raise DataError(
            f"the outputs differ in shape from batch to batch, so that no metric takes them whole ({error})"
        ) from error


def _agreement(baseline: Path, candidate: Path, classes: bool | None) -> dict[str, Any]:
    total, done = Agreement(classes), 0
    for before, after in _pairs(baseline, candidate):
        try:
            total.update(before.outputs, after.outputs)
        except ValueError as error:
            raise DataError(f"the engines cannot be compared: {error}") from error
        done += len(before.indices)
        events.progress("comparing", done, None)
    return total.result()


def _pairs(baseline: Path, candidate: Path) -> Iterator[tuple[StoredBatch, StoredBatch]]:
    try:
        for before, after in zip(read_outputs(baseline), read_outputs(candidate), strict=True):
            if not np.array_equal(before.indices, after.indices):
                raise ValueError("other samples")
            yield before, after
    except ValueError as error:
        raise DataError(
            "the engines were run on different samples or in different batches; run both again"
        ) from error
