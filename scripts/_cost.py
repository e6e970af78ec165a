"""CPU-seconds and peak memory of a piece of work, in a process of its own that runs on one core.

    PYTHON scripts/_cost.py JOB.json        # what `cost` starts

What the work imports is imported before the seconds of the work begin; the memory is that of the process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["READING", "RUNNING", "Cost", "cost", "float_pass", "peak", "read"]

ROOT = Path(__file__).resolve().parents[1]
READING = ("numpy", "PIL.Image")
RUNNING = (*READING, "onnxruntime")
Cost = dict[str, Any]


def cost(task: str, folder: Path, imports: tuple[str, ...] = RUNNING, **arguments: Any) -> Cost:
    """Run "module:function" with `arguments` and `folder`, which is made, once the `imports` are there.

    Gives `value`, `cpu_seconds` (of the work), `process_seconds` (imports and all) and `peak_bytes`.
    """
    folder.mkdir(parents=True)
    job, result = folder.with_suffix(".job.json"), folder.with_suffix(".result.json")
    given = {**arguments, "folder": str(folder)}
    request = {"task": task, "imports": imports, "arguments": given, "result": str(result)}
    job.write_text(json.dumps(request))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    subprocess.run([sys.executable, "-P", __file__, str(job)], check=True, env=environment)
    return dict(json.loads(result.read_text()))


def read(data: dict[str, Any], folder: str) -> int:
    """Nothing but reading and preparing the samples."""
    from compressor.data import stream

    return sum(len(batch.indices) for batch in stream({**data, "batch": 1}))


def float_pass(model: dict[str, Any], data: dict[str, Any], folder: str) -> int:
    """The float model over the data, sample by sample in one session: what calibration cannot go below."""
    import onnxruntime

    from compressor.data import stream

    session = onnxruntime.InferenceSession(model["path"], providers=["CPUExecutionProvider"])
    count = 0
    for batch in stream({**data, "batch": 1}):
        session.run(None, batch.inputs)
        count += 1
    return count


def on_one_core() -> None:
    """Thread pools of every runtime get one thread, so that none spends CPU-seconds on waiting."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def peak() -> int:
    """The most memory that this process ever had resident, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        words = status.read_text().split()
        return 1024 * int(words[words.index("VmHWM:") + 1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    on_one_core()
    job = json.loads(Path(sys.argv[1]).read_text())
    name, _, attribute = job["task"].partition(":")
    function = getattr(importlib.import_module(name), attribute)
    for module in job["imports"]:
        importlib.import_module(module)
    started = time.process_time()
    value = function(**job["arguments"])
    ended = time.process_time()
    found = {
        "value": value,
        "cpu_seconds": ended - started,
        "process_seconds": ended,
        "peak_bytes": peak(),
    }
    Path(job["result"]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
