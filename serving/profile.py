"""Where the time of engines goes: a task for a child process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compressor import plugins
from compressor.errors import DataError

__all__ = ["VERSION", "profile"]

VERSION: int = 5
_FEWEST, _CALLS = 3, 200
_SECONDS = 1.0
_PROFILER_MS = 0.01  # the most that it takes to note a kernel's time


def profile(
    engines: Sequence[str], runtime: str, device: str, threads: int, data: dict[str, Any], folder: str
) -> list[dict[str, Any]]:
    """The time of each kernel of engines for one sample (or their fixed batch), from a few profiled runs.

    Returns for each {"kernels": [{"name", "op", "type", "ms"}] in order of execution, "ms": a call without
    the profiler}. Calls are timed by turns, so that engines compare even where the machine's speed drifts,
    and kernels add up to a call: what the profiler itself costs, the same for each kernel, is taken off.
    Names are the runtime's own. Raises `DataError` if there is no sample.
    """
    from compressor.data import stream

    batch = next(iter(stream({**data, "batch": 1})), None)
    if batch is None:
        raise DataError(f"{data['source']}: there are no samples to run the engine on")
    module, paths = plugins.module("runtimes", runtime), list(map(Path, engines))
    profiles = [module.precision(path, batch.inputs, device=device, threads=threads) for path in paths]
    sessions = [module.open_session(path, device=device, threads=threads) for path in paths]
    calls = _seconds([session.bind(batch.inputs) for session in sessions])
    return [
        {"kernels": _kernels(found["operators"], 1000 * call), "ms": 1000 * call}
        for found, call in zip(profiles, calls, strict=True)
    ]


def _kernels(operators: Sequence[dict[str, Any]], call: float) -> list[dict[str, Any]]:
    times = _fitted([row["microseconds"] / 1000 for row in operators], call)
    return [
        {**{key: row[key] for key in ("name", "op", "type")}, "ms": taken}
        for row, taken in zip(operators, times, strict=True)
    ]


def _fitted(times: Sequence[float], whole: float) -> list[float]:
    """Times less what the profiler costs each, which is little; what still exceeds `whole` is the machine.

    It was busier under the profiler, or one kernel was held up: all times shrink in proportion, since taking
    the same off each would leave nothing of the short ones.
    """
    overhead = min(_overhead(times, whole), _PROFILER_MS)
    left = [max(0.0, taken - overhead) for taken in times]
    scale = min(1.0, whole / sum(left)) if any(left) else 1.0
    return [scale * taken for taken in left]


def _overhead(times: Sequence[float], whole: float) -> float:
    """What has to be taken off each time (as far as it goes) so that they add up to `whole`."""
    low, high = 0.0, max(times, default=0.0)
    for _ in range(50):
        middle = (low + high) / 2
        over = sum(max(0.0, taken - middle) for taken in times) > whole
        low, high = (middle, high) if over else (low, middle)
    return low


def _seconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """For calls made by turns, the lower quartile of each, which other processes disturb least."""
    for call in calls:
        call()
    began = time.perf_counter()
    times: list[list[float]] = [[] for _ in calls]
    while len(times[0]) < _FEWEST or (time.perf_counter() - began < _SECONDS and len(times[0]) < _CALLS):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 4] for taken in times]
