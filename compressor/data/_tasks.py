"""Tasks on data: say what a source holds, and choose the samples to calibrate and to evaluate with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.data import _fingerprints
from compressor.data._match import match, reshaped
from compressor.data._source import open_dataset
from compressor.data._stream import Binder
from compressor.data._types import Batch, DataOptions, Dataset
from compressor.errors import DataError
from compressor.model import TensorSpec
from compressor.store import digest

__all__ = ["describe", "describe_task", "split"]

_CHUNK = 64


def describe(
    source: str, preprocess: dict[str, Any] | None = None, inputs: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """What a source holds: kind, n, arrays (of one sample), labels, sha256, notes, warnings.

    With the model's `inputs`, also `binding`: the array for each of them. `labels` is None, or
    `{"classes": k, "counts": {label: samples}}` with both None for labels that are no class numbers.
    Raises `DataError` if the data cannot be read or do not fit the inputs.
    """
    specs = tuple(TensorSpec.of(spec) for spec in inputs or [])
    dataset = open_dataset(source, DataOptions(preprocess, specs))
    facts: dict[str, Any] = {"kind": dataset.kind, "arrays": [asdict(array) for array in dataset.arrays]}
    binding = match(dataset.arrays, specs) if specs else None
    if binding is not None:
        facts["binding"] = binding
    labels = None if dataset.labels is None else dataset.labels[dataset.usable]
    warnings = [*dataset.warnings, *_label_warnings(labels), *_constant(dataset, binding)]
    if binding is not None:
        warnings += _unscaled(dataset.arrays, specs, binding)
    return {
        **facts,
        "n": len(dataset.usable),
        "labels": None if labels is None else _classes(labels),
        "sha256": dataset.sha256,
        "notes": [*dataset.notes, *(_reshaped(dataset.arrays, specs, binding) if binding else ())],
        "warnings": warnings,
    }


def describe_task(
    source: str, preprocess: dict[str, Any] | None, inputs: list[dict[str, Any]], folder: str
) -> dict[str, Any]:
    """`describe` as a step: its warnings are reported. It writes nothing into `folder`."""
    facts = describe(source, preprocess, inputs)
    for warning in facts["warnings"]:
        events.warn(f"{source}: {warning}")
    return facts


def split(
    source: str,
    preprocess: dict[str, Any] | None,
    inputs: list[dict[str, Any]],
    calibration: int,
    seed: int,
    held_out: bool,
    folder: str,
) -> dict[str, Any]:
    """Choose `calibration` samples to calibrate with, balanced over classes, and all to evaluate with.

    With `held_out` the evaluation has none of the calibration's, which then are at most half of all. Samples
    with NaN or infinite values are left out of both. Writes `calibration.npy` and `evaluation.npy`, sorted
    int64 positions, below `folder`, and their fingerprints where the source may change. The choice hangs on
    the seed and positions by SHA-256 alone, so it is the same with every version of numpy. `sha256` covers
    content and choice. Raises `DataError` if no sample is left.
    """
    specs = tuple(TensorSpec.of(spec) for spec in inputs)
    dataset = open_dataset(source, DataOptions(preprocess, specs))
    binder = Binder.of(dataset, specs) if specs else None
    bad, marks = _read_through(dataset, binder)
    sound = dataset.usable[~np.isin(dataset.usable, bad)]
    if not len(sound):
        raise DataError(f"data '{source}': every sample holds NaN or infinite values; mend the preprocessing")
    if held_out and calibration and len(sound) < 2:
        raise DataError(
            f"data '{source}': one sample cannot be both calibrated and evaluated with; "
            "give more, or --calib-data and --eval-data apart"
        )
    group = (binder and binder.batch) or 1
    chosen = _choose(sound, dataset.labels, _wanted(calibration, len(sound), group, held_out), seed)
    rest = sound[~np.isin(sound, chosen)] if held_out else sound
    if len(rest) % group:
        events.warn(f"the model takes {group} samples at a time: {len(rest) % group} left over are not used")
        rest = rest[: len(rest) // group * group]
    parts = {"calibration": chosen, "evaluation": rest}
    return {
        **{name: _write(Path(folder), name, part, dataset, marks) for name, part in parts.items()},
        "left_out": [int(place) for place in bad],
    }


def _wanted(calibration: int, sound: int, group: int, held_out: bool) -> int:
    """How many to calibrate with: whole groups of what the model takes at a time, at least one if any."""
    most = (sound // 2 if held_out else sound) // group * group
    if not most:
        apart = " to calibrate and as many to evaluate with" if held_out else ""
        raise DataError(
            f"the model takes {group} samples at a time{apart}, but there are only {sound}; give more"
        )
    return min(-(-calibration // group) * group, most)


def _write(
    folder: Path, name: str, indices: NDArray[Any], dataset: Dataset, marks: NDArray[np.uint8] | None
) -> dict[str, Any]:
    """Indices, and where they are known the fingerprints of their samples."""
    indices = np.sort(indices).astype(np.int64)
    if marks is not None:
        _save(_fingerprints.beside(folder / f"{name}.npy"), marks[np.searchsorted(dataset.usable, indices)])
    _save(folder / f"{name}.npy", indices)
    places = hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()
    return {"n": len(indices), "file": f"{name}.npy", "sha256": digest(dataset.sha256, places)}


def _save(path: Path, array: NDArray[Any]) -> None:
    beside = path.with_name(f"partial.{path.name}")
    np.save(beside, array)
    beside.replace(path)


def _choose(sound: NDArray[Any], labels: NDArray[Any] | None, wanted: int, seed: int) -> NDArray[Any]:
    """`wanted` of the positions: in turn one of each class, in the order that the seed gives."""
    order = sorted(sound.tolist(), key=lambda place: hashlib.sha256(f"{seed}:{place}".encode()).digest())
    if labels is not None and _are_classes(labels):
        turns: dict[int, int] = {}
        ranks = []
        for rank, place in enumerate(order):
            label = int(labels[place])
            turns[label] = turns.get(label, -1) + 1
            ranks.append((turns[label], rank, place))
        order = [place for _, _, place in sorted(ranks)]
    return np.array(order[:wanted], np.int64)


def _read_through(dataset: Dataset, binder: Binder | None) -> tuple[NDArray[Any], NDArray[np.uint8] | None]:
    """Positions of samples with NaN or infinite values as the model would get them, which are named; and the
    fingerprints of all usable samples. None are read of a source whose values are always finite."""
    if dataset.finite:
        return np.array([], np.int64), None
    bad: list[int] = []
    marks: list[NDArray[np.uint8]] = []
    done = 0
    for batch in dataset.batches(dataset.usable, (binder and binder.batch) or _CHUNK):
        done += len(batch.indices)
        events.progress("checking samples", done, len(dataset.usable))
        bad += _unsound(batch, binder)
        marks.append(_fingerprints.fingerprints(batch, binder.binding.values() if binder else batch.inputs))
    if bad and len(bad) < len(dataset.usable):
        listed = ", ".join(map(str, bad[:10])) + (", ..." if len(bad) > 10 else "")
        events.warn(
            f"{len(bad)} sample(s) with NaN or infinite values are left out: number {listed} (counted from 0)"
        )
    return np.array(bad, np.int64), np.concatenate(marks)


def _unsound(batch: Batch, binder: Binder | None) -> list[int]:
    bound = binder is not None and (not binder.batch or len(batch.indices) == binder.batch)
    inputs = binder.bind(batch).inputs if binder and bound else batch.inputs
    if binder and not bound:
        inputs = {name: batch.inputs[name] for name in binder.binding.values()}
    sound = np.ones(len(batch.indices), bool)
    for array in inputs.values():
        if array.dtype.kind in "fc":
            finite = np.isfinite(array)
            alone = array.shape[:1] != sound.shape
            sound &= bool(finite.all()) if alone else finite.reshape(len(sound), -1).all(1)
    return [int(place) for place in batch.indices[~sound]]


def _are_classes(labels: NDArray[Any]) -> bool:
    return labels.ndim == 1 and labels.dtype.kind in "biu"


def _classes(labels: NDArray[Any]) -> dict[str, Any]:
    if not _are_classes(labels):
        return {"classes": None, "counts": None}
    values, counts = np.unique(labels, return_counts=True)
    return {"classes": len(values), "counts": {str(v): int(c) for v, c in zip(values, counts, strict=True)}}


def _label_warnings(labels: NDArray[Any] | None) -> Iterator[str]:
    if labels is not None and _are_classes(labels) and len(labels) > 1 and len(np.unique(labels)) == 1:
        yield (
            f"all {len(labels)} labels are class {labels[0]}: calibration sees one class only, "
            "and accuracy on it says little"
        )


def _constant(dataset: Dataset, binding: dict[str, str] | None) -> Iterator[str]:
    """A warning for each array whose samples are all the same; reads no further than to one that differs."""
    names = set(binding.values()) if binding else _of_one_shape(dataset)
    if not names:
        return
    first: dict[str, NDArray[Any]] = {}
    for batch in dataset.batches(None, 2 if dataset.finite else _CHUNK):
        for name in names & set(batch.inputs):
            first.setdefault(name, batch.inputs[name][:1])
        names = {name for name in names & set(first) if _equal(batch.inputs[name], first[name])}
        if not names:
            return
    if len(dataset.usable) > 1:
        for name in sorted(names):
            yield f"all samples of '{name}' are identical (constant data): no range can be learned from them"


def _of_one_shape(dataset: Dataset) -> set[str]:
    fixed = [array for array in dataset.arrays if all(isinstance(size, int) for size in array.shape)]
    return {array.name for array in fixed if array.shape} if len(fixed) == len(dataset.arrays) else set()


def _equal(array: NDArray[Any], first: NDArray[Any]) -> bool:
    return array.shape[1:] == first.shape[1:] and bool((array == first).all())


def _reshaped(
    arrays: tuple[TensorSpec, ...], inputs: tuple[TensorSpec, ...], binding: dict[str, str]
) -> Iterator[str]:
    known = {array.name: array for array in arrays}
    for spec in inputs:
        if reshaped(known[binding[spec.name]], spec):
            yield f"samples of {known[binding[spec.name]]} are reshaped for input {spec}"


def _unscaled(
    arrays: tuple[TensorSpec, ...], inputs: tuple[TensorSpec, ...], binding: dict[str, str]
) -> Iterator[str]:
    types = {array.name: array.dtype for array in arrays}
    for spec in inputs:
        given = types[binding[spec.name]]
        if "float" in spec.dtype and "float" not in given:
            yield f"array '{binding[spec.name]}' is {given} and goes into input {spec} unscaled"
