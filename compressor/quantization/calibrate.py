"""Calibration: run samples through the float graph and remember what every tensor held.

One pass serves every observer (`ranges` chooses one afterwards). What is kept of a tensor has a fixed
size, so memory does not grow with the number of samples, and a checkpoint is small: killed at any
moment, the same call goes on from the last one and ends with the same ranges to the last bit.

Which samples and values count. A sample with NaN or Inf in an *input* is left out and named. A NaN that
appears *inside* for clean inputs is the model's own doing: the tensor is named, its other values count.
An infinity or a magnitude of 1e30 and more inside is how graphs write masks; it counts for nothing, and
the tensor is `masked`: quantized, its mask would turn into an ordinary value, so it is given no range.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor import events
from compressor.errors import DataError, UnsupportedError
from compressor.quantization import heap
from compressor.quantization.activations import Activations, Batches, Sample, samples, unusable
from compressor.quantization.observers import Grid, TensorStatistics, observer_named
from compressor.quantization.observers.record import Record
from compressor.quantization.segments import write_segments
from compressor.store import digest, file_digest, write_json

if TYPE_CHECKING:
    from compressor.quantization.scheme import Scheme

__all__ = ["calibrate", "left_out", "observe", "ranges"]

RANGES = "ranges.npz"
CHECKPOINT = "checkpoint.npz"
_VERSION = 2
_UINT8 = Grid()
_NAMED = 5  # how many samples or tensors a warning names


def calibrate(model: dict[str, Any], data: dict[str, Any], scheme: str, folder: str) -> dict[str, Any]:
    """The task: calibrate an ONNX model on a data reference; writes `ranges.npz` and `ranges.json`.

    Returns `samples` (how many counted), `skipped` (indices of those left out), `tensors` (how many),
    `masked`, `nan` and `constant` (names of tensors), and `sha256` of `ranges.npz`. Raises `DataError`
    if there is no usable sample, `UnsupportedError` if the model itself gives nothing but NaN.
    """
    from compressor.data import stream
    from compressor.quantization import scheme as schemes

    chosen = schemes.named(scheme)
    with heap.given_back():
        segments, tensors = _written(Path(model["path"]), chosen, Path(folder))

    def batches(start: int) -> Batches:
        # One sample at a time: read in batches, samples would weigh more than the model's own activations.
        return ((batch.indices, batch.inputs) for batch in stream({**data, "batch": 1}, start))

    key = digest(
        _VERSION, model["sha256"], [file_digest(path) for path in segments], data["sha256"], data["binding"]
    )
    low, high = chosen.codes
    grid = Grid(bits=(high - low).bit_length())
    found = observe(segments, tensors, batches, Path(folder), key=key, grid=grid, total=data.get("n"))
    for leftover in Path(folder).glob("observed-*"):
        leftover.unlink()
    return found


def _written(path: Path, scheme: Scheme, folder: Path) -> tuple[list[Path], list[str]]:
    """The pieces of a graph that give the tensors to observe, and these tensors."""
    from compressor.quantization import graph, placement

    prepared = graph.prepare(path)
    tensors = placement.tensors(prepared, scheme)
    return write_segments(prepared, tensors, folder, "observed"), tensors


def observe(
    segments: Sequence[Path],
    tensors: Sequence[str],
    batches: Callable[[int], Batches],
    folder: Path,
    *,
    key: str = "",
    grid: Grid = _UINT8,
    total: int | None = None,
    every: float = 5.0,
) -> dict[str, Any]:
    """Calibrate a graph in segments (see `write_segments`) that give `tensors`; returns as `calibrate` does.

    `batches(start)` gives the data from sample number `start` on, which is where a checkpoint of the same
    `key` in `folder` ends, or 0. A checkpoint is written every `every` seconds.
    """
    record = _resume(folder / CHECKPOINT, key, tensors, grid)
    with heap.given_back():
        activations = Activations(segments, tensors)
    _pass(record, activations, batches, folder / CHECKPOINT, total, every)
    _check(record)
    record.save(folder / RANGES)
    found = _summary(record)
    write_json(folder / "ranges.json", {**found, "ranges": _extremes(record)})
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return {**found, "sha256": file_digest(folder / RANGES)}


def ranges(folder: Path, observer: str) -> dict[str, tuple[float, float]]:
    """Each tensor's range (low <= 0 <= high) by an observer: minmax, moving-average, percentile[:P],
    entropy or mse.

    (0, 0) is the range of a tensor that was always 0. Tensors in `left_out` have none.
    """
    record = _finished(folder)
    choose, without = observer_named(observer), _without_range(record)
    entries = record.statistics.items()
    return {name: choose(entry, record.grid) for name, entry in entries if name not in without}


def left_out(folder: Path) -> dict[str, str]:
    """Tensors that must stay in float, with the reason."""
    return _without_range(_finished(folder))


def _without_range(record: Record) -> dict[str, str]:
    reasons = {}
    for name, entry in record.statistics.items():
        if entry.masked:
            reasons[name] = "holds infinities or values beyond 1e30 (a mask), which no 8-bit range can keep"
        elif not entry.seen:
            reasons[name] = "held no value in any sample"
    return reasons


def _finished(folder: Path) -> Record:
    record = Record.load(folder / RANGES)
    if record is None:
        raise DataError(f"{folder / RANGES} is missing or damaged; calibrate again")
    return record


def _resume(path: Path, key: str, tensors: Sequence[str], grid: Grid) -> Record:
    record = Record.load(path)
    if record and record.key == key and record.grid == grid and list(record.statistics) == list(tensors):
        return record
    return Record(key, grid, {name: TensorStatistics() for name in tensors})


def _pass(
    record: Record,
    activations: Activations,
    batches: Callable[[int], Batches],
    checkpoint: Path,
    total: int | None,
    every: float,
) -> None:
    """Run what the record has not seen yet: the only place where samples meet statistics."""
    saved = time.monotonic()
    for unit in activations.units(_clean(record, batches(record.done))):
        for name, values in activations.run(unit):
            record.statistics[name].update(values, record.units)
            del values  # or it would lie there while the next piece runs
        record.units += 1
        events.progress("calibration", record.done, total)
        if time.monotonic() - saved >= every:
            record.save(checkpoint)
            saved = time.monotonic()


def _clean(record: Record, batches: Batches) -> Iterator[Sample]:
    """Samples whose inputs are finite; the record counts all and keeps the others' indices."""
    for sample in samples(batches):
        record.done += 1
        reason = unusable(sample)
        if reason:
            record.skipped.append((sample.index, reason))
        else:
            _compare(record, sample)
            yield sample


def _compare(record: Record, sample: Sample) -> None:
    """Keep track of whether all samples are alike or zero; costs nothing once they are neither."""
    record.zero = record.zero and not any(array.any() for array in sample.feeds.values())
    if record.alike:
        state = hashlib.sha256()
        for name, array in sorted(sample.feeds.items()):
            state.update(f"{name} {array.shape}".encode())
            state.update(np.ascontiguousarray(array).tobytes())
        record.first = record.first or state.hexdigest()
        record.alike = state.hexdigest() == record.first


def _check(record: Record) -> None:
    """Warn of, or refuse, what makes ranges meaningless."""
    if not record.done:
        raise DataError("calibration: the data hold no sample; pass some (--data or --calib-data)")
    counted = record.done - len(record.skipped)
    if not counted:
        index, reason = record.skipped[0]
        raise DataError(
            f"calibration: all {record.done} samples hold NaN or Inf (sample {index}: {reason}); "
            "mend the data or their preprocessing"
        )
    for kind in dict.fromkeys(reason for _, reason in record.skipped):
        indices = [index for index, reason in record.skipped if reason == kind]
        events.warn(f"calibration: {_listed('sample', indices)} left out: {kind}")
    if record.zero or (record.alike and counted > 1):
        what = "all zero" if record.zero else "the same"
        events.warn(
            f"calibration: every sample is {what} (constant data, {counted} samples); "
            "the ranges found say nothing about other inputs"
        )
    _check_tensors(record)


def _check_tensors(record: Record) -> None:
    broken = [name for name, entry in record.statistics.items() if entry.nan and not entry.seen]
    if broken:
        raise UnsupportedError(
            f"calibration: the model itself makes {_listed('tensor', broken)} NaN for every sample, though "
            "its inputs are finite; look for NaN weights, 0/0 or an overflow before that tensor"
        )
    summary = _summary(record)
    if summary["nan"]:
        count = max(record.statistics[name].nan for name in summary["nan"])
        events.warn(
            f"calibration: NaN appears inside the model for finite inputs ({count} of {record.units} "
            f"samples), first in {_listed('tensor', summary['nan'])}; those values are left out"
        )
    if summary["constant"] and not record.alike:
        events.warn(f"calibration: {_listed('tensor', summary['constant'])} constant over all samples")


def _listed(word: str, items: Sequence[object]) -> str:
    names = ", ".join(str(item) for item in items[:_NAMED])
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return f"{word}{'s' if len(items) > 1 else ''} {names}{more}"


def _summary(record: Record) -> dict[str, Any]:
    entries = record.statistics.items()
    return {
        "samples": record.done - len(record.skipped),
        "skipped": [index for index, _ in record.skipped],
        "tensors": len(record.statistics),
        "masked": [name for name, entry in entries if entry.masked],
        "nan": [name for name, entry in entries if entry.nan],
        "constant": [name for name, entry in entries if entry.seen and entry.minimum == entry.maximum],
    }


def _extremes(record: Record) -> dict[str, list[float]]:
    return {name: [entry.minimum, entry.maximum] for name, entry in record.statistics.items() if entry.seen}
