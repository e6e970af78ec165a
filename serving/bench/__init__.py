"""Latency and memory of engines, as tasks for child processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compressor.errors import UsageError
from compressor.store import write_json
from serving.bench.resident import memory
from serving.bench.rows import Bench
from serving.bench.standalone import standalone

__all__ = ["VERSION", "latency", "memory", "standalone"]

VERSION: int = 1


def latency(
    engines: list[str],
    runtime: str,
    device: str,
    threads: int,
    data: dict[str, Any],
    seconds: float,
    folder: str,
    seed: int = 0,
    batches: list[int] | None = None,
) -> dict[str, Any]:
    """Time engines in turns; the first is the baseline, and it runs against itself as the A/A control.

    `data` is a data reference (with "source" None: made-up inputs of its "inputs"). `seconds` is the
    wall time for everything, shared by the `batches` (default [1]); it is kept to within 30 % unless
    opening the sessions and calling each twice takes longer.

    Returns {"engines": [row of each engine]}, where a row holds, for the first batch size:
    "batch", "threads", "p50_ms", "p90_ms", "p99_ms" (null and a "..._reason" when there are too few
    calls to claim it), "p50_interval_ms" ... ([low, high] or null), "mean_ms", "n" (calls timed),
    "clusters" (fresh sessions), "cpu_ms" (CPU time of the process per call), "throughput_per_s"
    (samples, one caller), "ratio_to_baseline" {"value", "low", "high", "verdict", "reason"} (speed:
    above 1 is faster; null for the baseline), "aa_noise" {"value", "low", "high"} (the baseline against
    itself), "inputs" ("data" or "made-up"); and "batches": such rows for the further sizes.
    Raises `UsageError`, `DataError`, and `UnsupportedError` when an engine fails: then there are no numbers.
    """
    sizes = batches or [1]
    if not engines or seconds <= 0 or min(sizes) < 1 or threads < 1:
        raise UsageError("latency needs an engine, a time above 0 s, batch sizes and threads of at least 1")
    bench = Bench([Path(engine) for engine in engines], runtime, device, threads, data, seed)
    results = []
    for size in sizes:
        checkpoint = Path(folder, f"latency-{size}.json")
        if not checkpoint.is_file():
            write_json(checkpoint, bench.rows(size, seconds / len(sizes)))
        results.append(json.loads(checkpoint.read_text()))
    rows = [{**first, "batches": list(rest)} for first, *rest in zip(*results, strict=True)]
    return {"engines": rows}
