"""Where the time of an engine goes: a task for a child process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor import plugins
from compressor.errors import DataError

__all__ = ["VERSION", "profile"]

VERSION: int = 1


def profile(
    engine: str, runtime: str, device: str, threads: int, data: dict[str, Any], folder: str
) -> dict[str, Any]:
    """The time of each kernel for one sample (or the engine's fixed batch), from a few profiled runs.

    Returns {"kernels": [{"name", "op", "type", "ms"}] in order of execution, "ms": their sum}. Names are
    the runtime's own. Raises `DataError` if there is no sample.
    """
    from compressor.data import stream

    batch = next(iter(stream({**data, "batch": 1})), None)
    if batch is None:
        raise DataError(f"{data['source']}: there are no samples to run the engine on")
    module = plugins.module("runtimes", runtime)
    found = module.precision(Path(engine), batch.inputs, device=device, threads=threads)
    kernels = [
        {**{key: row[key] for key in ("name", "op", "type")}, "ms": row["microseconds"] / 1000}
        for row in found["operators"]
    ]
    return {"kernels": kernels, "ms": sum(kernel["ms"] for kernel in kernels)}
