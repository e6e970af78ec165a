"""Accuracy of engines, measured on the engines themselves: tasks for child processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor import events, plugins
from compressor.errors import DataError
from compressor.metrics import Agreement
from compressor.store import file_digest
from serving.comparison import compare
from serving.outputs import OutputWriter, StoredBatch

if TYPE_CHECKING:
    from compressor.data import Batch
    from serving.runtimes import Array, Session

__all__ = ["VERSION", "compare_task", "precision", "run_engine", "simulation_gap"]

VERSION: int = 3


def run_engine(
    engine: str,
    runtime: str,
    device: str,
    threads: int,
    data: dict[str, Any],
    folder: str,
    simulate: bool = False,
    limit: int | None = None,
) -> dict[str, Any]:
    """Run an engine over all samples of a data reference and keep its outputs below `folder`.

    Memory does not depend on the number of samples; after a kill the same call goes on where it was.
    Returns {"n", "outputs": [names], "seconds" and "cpu_ms_per_sample" of the engine alone, "nan":
    samples with NaN or infinite values in an output}. Raises `DataError`, `UnsupportedError`.
    """
    path = Path(engine)
    how = {"runtime": runtime, "device": device, "simulate": simulate}
    what = {
        "engine": file_digest(path),
        "data": data["sha256"],
        "source": data["source"],
        "batch": data["batch"],
    }
    writer = OutputWriter(Path(folder), {**how, **what})
    session = _open(path, runtime, device, threads, simulate)
    total = min(filter(None, (data.get("n"), limit)), default=None)
    start = int(writer.totals["n"])
    for batch in _batches(data, start, limit):
        writer.append(_run(session, batch))
        events.progress("simulation" if simulate else "accuracy", int(writer.totals["n"]), total)
    writer.flush()
    n = int(writer.totals["n"])
    if not n:
        raise DataError(f"{data['source']}: there are no samples to run the engine on")
    if bad := int(writer.totals["bad"]):
        events.warn(f"{path.name}: {bad} of {n} samples give NaN or infinite outputs")
    return {
        "n": n,
        "outputs": [spec.name for spec in session.outputs],
        "seconds": writer.totals["seconds"],
        "cpu_ms_per_sample": 1000 * writer.totals["cpu_seconds"] / n,
        "nan": bad,
    }


def _open(path: Path, runtime: str, device: str, threads: int, simulate: bool = False) -> Session:
    module = plugins.module("runtimes", runtime)
    session: Session = module.open_session(path, device=device, threads=threads, simulate=simulate)
    return session


def _batches(data: dict[str, Any], start: int, limit: int | None) -> Iterator[Batch]:
    from compressor.data import stream

    done = start
    if limit is not None and done >= limit:
        return
    for batch in stream(data, start):
        yield batch
        done += len(batch.indices)
        if limit is not None and done >= limit:
            return


def _run(session: Session, batch: Batch) -> StoredBatch:
    begin, cpu = time.perf_counter(), time.process_time()
    outputs = session.run(batch.inputs)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    count = len(batch.indices)
    for name, array in outputs.items():
        if array.shape[:1] != (count,) and count > 1:
            shape = "x".join(map(str, array.shape)) or "scalar"
            raise DataError(
                f"output '{name}' ({shape}) has no entry per sample of a batch of {count}; pass --batch 1"
            )
    aligned = {name: array if array.shape[:1] == (count,) else array[None] for name, array in outputs.items()}
    return StoredBatch(batch.indices, batch.labels, aligned, seconds, cpu_seconds, _bad(aligned, count))


def _bad(outputs: dict[str, Array], count: int) -> int:
    """How many samples have a NaN or an infinite value in any float output."""
    floats = [array.reshape(count, -1) for array in outputs.values() if array.dtype.kind == "f"]
    return int(np.sum(~np.all([np.isfinite(array).all(axis=1) for array in floats], axis=0))) if floats else 0


def compare_task(
    baseline: str,
    candidate: str,
    metric: str | None,
    max_drop: float | None,
    data: dict[str, Any],
    labelled: bool,
    folder: str,
    part: bool = False,
) -> dict[str, Any]:
    """`serving.comparison.compare` of two folders of `run_engine` as a step; it writes nothing."""
    return compare(Path(baseline), Path(candidate), metric, max_drop, labelled=labelled, part=part)


def precision(
    engine: str, runtime: str, device: str, threads: int, data: dict[str, Any], folder: str
) -> dict[str, Any]:
    """In which types the engine's compute really runs on the first batch of the data; see the runtime."""
    batch = next(_batches(data, 0, None), None)
    if batch is None:
        raise DataError(f"{data['source']}: there are no samples to run the engine on")
    module = plugins.module("runtimes", runtime)
    found: dict[str, Any] = module.precision(Path(engine), batch.inputs, device=device, threads=threads)
    return found


def simulation_gap(
    engine: str,
    runtime: str,
    device: str,
    threads: int,
    data: dict[str, Any],
    folder: str,
    baseline: str | None = None,
    samples: int = 64,
) -> dict[str, Any]:
    """How far the engine is from the float simulation of its own Q/DQ pairs, over all outputs.

    Both run the same file; the difference is what the kernels do that quantization does not ask for,
    such as saturated sums of u8 x s8 products on x86 without VNNI. Rounding alone leaves about one
    quantization step in some places. Returns {"sqnr_db", "max_abs", "top1", "n"} as
    `compressor.metrics.Agreement` does (200 dB: no difference), and "lost_db": by how much the engine is
    farther than its simulation from the float engine `baseline` (null without one). Kernels that only
    round differently, or leave a quantization out, differ from the simulation and lose nothing.
    """
    fused = _open(Path(engine), runtime, device, threads)
    simulated = _open(Path(engine), runtime, device, threads, simulate=True)
    floating = _open(Path(baseline), runtime, device, threads) if baseline else None
    gap, engine_error, simulated_error, n = Agreement(), Agreement(), Agreement(), 0
    for batch in _batches(data, 0, samples):
        expected, got = _run(simulated, batch), _run(fused, batch)
        gap.update(expected.outputs, got.outputs)
        if floating:
            wanted = _run(floating, batch).outputs
            engine_error.update(wanted, got.outputs)
            simulated_error.update(wanted, expected.outputs)
        n += len(batch.indices)
        events.progress("engine against its simulation", min(n, samples), samples)
    found = gap.result()
    return {
        **{key: found[key] for key in ("sqnr_db", "max_abs", "top1", "n")},
        "lost_db": _lost(simulated_error, engine_error) if floating else None,
    }


def _lost(simulated: Agreement, engine: Agreement) -> float | None:
    best, reached = (error.result()["sqnr_db"] for error in (simulated, engine))
    return None if best is None or reached is None else best - reached
