"""Where the time of an engine goes: a task for a child process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compressor import plugins
from compressor.errors import DataError

__all__ = ["VERSION", "profile"]

VERSION: int = 3
_FEWEST, _CALLS = 3, 200
_SECONDS = 1.0


def profile(
    engine: str, runtime: str, device: str, threads: int, data: dict[str, Any], folder: str
) -> dict[str, Any]:
    """The time of each kernel for one sample (or the engine's fixed batch), from a few profiled runs.

    Returns {"kernels": [{"name", "op", "type", "ms"}] in order of execution, "ms": a call without the
    profiler}. What the profiler itself costs, the same for each kernel, is taken off. Names are the
    runtime's own. Raises `DataError` if there is no sample.
    """
    from compressor.data import stream

    batch = next(iter(stream({**data, "batch": 1})), None)
    if batch is None:
        raise DataError(f"{data['source']}: there are no samples to run the engine on")
    module = plugins.module("runtimes", runtime)
    found = module.precision(Path(engine), batch.inputs, device=device, threads=threads)
    session = module.open_session(Path(engine), device=device, threads=threads)
    call = _seconds(session.bind(batch.inputs)) * 1000
    times = [row["microseconds"] / 1000 for row in found["operators"]]
    overhead = _overhead(times, call)
    kernels = [
        {**{key: row[key] for key in ("name", "op", "type")}, "ms": max(0.0, taken - overhead)}
        for row, taken in zip(found["operators"], times, strict=True)
    ]
    return {"kernels": kernels, "ms": call}


def _overhead(times: Sequence[float], whole: float) -> float:
    """What has to be taken off each time (as far as it goes) so that they add up to `whole`."""
    low, high = 0.0, max(times, default=0.0)
    for _ in range(50):
        middle = (low + high) / 2
        over = sum(max(0.0, taken - middle) for taken in times) > whole
        low, high = (middle, high) if over else (low, middle)
    return low


def _seconds(call: Callable[[], Any]) -> float:
    """The lower quartile of some calls, which other processes disturb least."""
    call()
    began = time.perf_counter()
    times: list[float] = []
    while len(times) < _FEWEST or (time.perf_counter() - began < _SECONDS and len(times) < _CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4]
