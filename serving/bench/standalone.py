"""Engines timed on their own: a number of requests to one, or several against the first of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from compressor import events, plugins
from compressor.errors import UsageError
from compressor.model import TensorSpec
from serving.bench.inputs import batches_of, fixed_batch
from serving.bench.interleave import FIRST_WARM_UP, Lane, warm_up
from serving.bench.rows import Bench
from serving.engine import locate

__all__ = ["standalone"]

_MS = 1e-6
_LONGEST_WARM_UP = 5.0  # seconds, unless the first call takes longer
_MOST = 10**7  # requests, seconds, samples in a call


@dataclass(frozen=True)
class _Placed:
    file: Path
    runtime: str
    device: str
    preprocess: dict[str, Any] | None
    inputs: tuple[TensorSpec, ...]


def standalone(
    engines: list[str],
    source: str | None,
    preprocess: dict[str, Any] | None,
    requests: int | None,
    seconds: float,
    threads: int,
    batch: int | None,
    seed: int,
    folder: str,
) -> dict[str, Any]:
    """The task: time engine files, or folders with an `engine.json`, outside of a run.

    With `requests`, that many calls of one engine in one session after a warm-up; without, engines of one
    runtime in turns for about `seconds` each (see `serving.bench.latency`). `source` None asks for made-up
    inputs, `batch` None for the one to which the engine is bound, or 1.

    Returns {"runtime", "device", "threads", "batch", "inputs", "engines": [row]}; a row has "engine",
    "p50_ms", "p90_ms", "p99_ms", "mean_ms", "throughput_per_s" (samples) and "cpu_ms" (of a call); with
    `requests` also "requests", "min_ms" and "max_ms", and percentiles are those of the calls that were made,
    however few. Raises `UsageError`, `DataError`, `ModelFileError`, or `UnsupportedError` when a call
    fails: then there are no numbers.
    """
    _check(engines, requests, seconds, batch, seed)
    if source is None and preprocess:
        raise UsageError(
            "--preprocess is for pictures, and made-up inputs are none; leave it out or pass --data"
        )
    placed = [_place(engine, threads) for engine in engines]
    if len({(item.runtime, item.device) for item in placed}) > 1:
        raise UsageError(
            "engines of different runtimes or devices cannot be timed in turns: "
            + ", ".join(f"{item.file} ({item.runtime}:{item.device})" for item in placed)
        )
    first = replace(placed[0], inputs=_shared_inputs(placed))
    data = _data(first, source, preprocess)
    size = _size(placed, first.inputs, batch)
    if requests is not None:
        rows = [_requested(first, data, requests, threads, size, seed)]
    else:
        bench = Bench([item.file for item in placed], first.runtime, first.device, threads, data, seed)
        rows = bench.rows(size, seconds * len(placed))
    return {
        "runtime": first.runtime,
        "device": first.device,
        "threads": threads,
        "batch": size,
        "inputs": source or "made-up",
        "engines": [{"engine": engine, **row} for engine, row in zip(engines, rows, strict=True)],
    }


def _check(
    engines: Sequence[str], requests: int | None, seconds: float, batch: int | None, seed: int
) -> None:
    if requests is not None and not 1 <= requests <= _MOST:
        raise UsageError(f"{requests} requests cannot be timed; ask for 1 to {_MOST}")
    if requests is not None and len(engines) > 1:
        raise UsageError("--requests counts calls of one engine; several are compared by --seconds")
    if not 0 < seconds <= _MOST:
        raise UsageError(f"--seconds {seconds:g}: must be above 0 and at most {_MOST}")
    if batch is not None and not 1 <= batch <= _MOST:
        raise UsageError(f"--batch {batch}: must be 1 to {_MOST} samples")
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be 0 or more")


def _shared_inputs(placed: Sequence[_Placed]) -> tuple[TensorSpec, ...]:
    """What all engines take: free sizes are bound where one of them binds them.

    Raises `UsageError` with the engine, the input and both forms where there is no such thing.
    """
    first, *others = placed
    shared = {spec.name: spec for spec in first.inputs}
    for other in others:
        theirs = {spec.name: spec for spec in other.inputs}
        if theirs.keys() != shared.keys():
            raise _misfit(first, other, f"the inputs {', '.join(shared)}", ", ".join(theirs))
        for name, spec in shared.items():
            joined = _joined(spec, theirs[name])
            if joined is None:
                raise _misfit(first, other, f"'{name}' as {_form(spec)}", _form(theirs[name]))
            shared[name] = joined
    return tuple(shared.values())


def _joined(one: TensorSpec, other: TensorSpec) -> TensorSpec | None:
    """The input that fits both; None: none does."""
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return None
    shape = []
    for ours, theirs in zip(one.shape, other.shape, strict=True):
        if isinstance(ours, int) and isinstance(theirs, int) and ours != theirs:
            return None
        shape.append(theirs if isinstance(ours, str) else ours)
    return replace(one, shape=tuple(shape))


def _misfit(first: _Placed, other: _Placed, ours: str, theirs: str) -> UsageError:
    return UsageError(
        f"{first.file} and {other.file} cannot be timed on the same inputs: the first takes {ours}, the "
        f"other {theirs}; time them one at a time"
    )


def _form(spec: TensorSpec) -> str:
    sizes = "x".join("?" if isinstance(size, str) else str(size) for size in spec.shape)
    return f"{spec.dtype} {sizes or 'scalar'}"


def _size(placed: Sequence[_Placed], inputs: tuple[TensorSpec, ...], batch: int | None) -> int:
    """Samples in a call; raises `UsageError` for others than those to which an engine is bound."""
    fixed = fixed_batch(inputs)
    if fixed and batch and fixed != batch:
        bound = next((item for item in placed if fixed_batch(item.inputs)), placed[0])
        raise UsageError(f"--batch {batch}: {bound.file.name} takes {fixed} samples at a time and no others")
    return fixed or batch or 1


def _place(engine: str, threads: int) -> _Placed:
    """Find and verify an engine, and open it once for what it takes."""
    file, manifest, runtime, device = locate(Path(engine))
    session = plugins.module("runtimes", runtime).open_session(file, device=device, threads=threads)
    return _Placed(file, runtime, device, (manifest or {}).get("preprocess"), tuple(session.inputs))


def _data(engine: _Placed, source: str | None, preprocess: dict[str, Any] | None) -> dict[str, Any]:
    """A reference to all samples of a source, or to made-up ones."""
    from compressor.data import describe

    inputs = [asdict(spec) for spec in engine.inputs]
    if source is None:
        return {"source": None, "inputs": inputs}
    how = preprocess or engine.preprocess
    facts = describe(source, how, inputs)
    pictures = facts["kind"] == "image_folder"
    if preprocess and not pictures:
        events.warn(
            f"{source}: --preprocess is for pictures; these data are given to the engines as they are"
        )
    return {
        "source": source,
        "preprocess": how if pictures else None,
        "inputs": inputs,
        "binding": facts["binding"],
        "sha256": facts["sha256"],
        "indices": None,
        "n": facts["n"],
    }


def _requested(
    engine: _Placed, data: dict[str, Any], requests: int, threads: int, size: int, seed: int
) -> dict[str, Any]:
    feeds = batches_of(data, size, seed)
    session = plugins.module("runtimes", engine.runtime).open_session(
        engine.file, device=engine.device, threads=threads
    )
    lane = Lane(0, cycle([session.bind(inputs) for inputs in feeds]))
    warm_up(lane, *FIRST_WARM_UP, at_most=_LONGEST_WARM_UP)
    times = np.empty(requests)
    cpu = time.process_time_ns()
    for place, call in enumerate(islice(lane.calls, requests)):
        begin = time.perf_counter_ns()
        call()
        times[place] = (time.perf_counter_ns() - begin) * _MS
    cpu = time.process_time_ns() - cpu
    ranks = np.quantile(times, [0.5, 0.9, 0.99], method="inverted_cdf")
    return {
        "requests": requests,
        **{name: float(value) for name, value in zip(("p50_ms", "p90_ms", "p99_ms"), ranks, strict=True)},
        "mean_ms": float(times.mean()),
        "min_ms": float(times.min()),
        "max_ms": float(times.max()),
        "cpu_ms": cpu * _MS / requests,
        "throughput_per_s": 1000 * size * requests / float(times.sum()),
    }
