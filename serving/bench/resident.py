"""How much memory an engine takes."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path
from typing import Any

from compressor import plugins
from serving.bench.inputs import batches_of, fixed_batch, specs_of

__all__ = ["memory"]

_CALLS = 5


def memory(
    engine: str,
    runtime: str,
    device: str,
    threads: int,
    data: dict[str, Any],
    folder: str,
    batch: int = 1,
) -> dict[str, Any]:
    """Peak resident memory of a process that opens one engine and runs it; a task for a process of its own.

    Returns {"peak_rss_bytes": of the whole process from the opening on, "engine_rss_bytes": the part
    that was not there when the runtime and the inputs were loaded, "batch"}. Memory of a GPU is not in it.
    """
    module = plugins.module("runtimes", runtime)
    size = fixed_batch(specs_of(data)) or batch
    feeds = batches_of(data, size)
    module.devices()
    gc.collect()
    before = _forget_peak()
    session = module.open_session(Path(engine), device=device, threads=threads)
    for call in range(_CALLS):
        session.run(feeds[call % len(feeds)])
    peak = _peak()
    return {"peak_rss_bytes": peak, "engine_rss_bytes": max(0, peak - before), "batch": size}


def _forget_peak() -> int:
    """Start a new peak (Linux), and give the resident memory of now (elsewhere: the peak so far)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    """The largest resident memory since `_forget_peak` on Linux, of the whole process elsewhere (bytes)."""
    if sys.platform == "linux":
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
