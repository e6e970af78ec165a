"""Child processes: one task and at most one framework each, JSON in and out.

The parent stays light and alive: a task's memory is given back when it ends, its time and peak memory
are known, and a crash of native code becomes a readable `WorkerError`. `call` starts
`python -m compressor.worker`, hands it `module:function` and keyword arguments, passes progress and
warnings on, and returns what the function returned.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compressor import events
from compressor.errors import CompressError, WorkerError, error_named

__all__ = ["Outcome", "call"]


@dataclass(frozen=True)
class Outcome:
    """What a task returned and what it cost."""

    value: Any
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int


def call(
    task: str,
    arguments: dict[str, Any],
    *,
    threads: int | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Outcome:
    """Run `task` ("module:function") in a child process with JSON `arguments`.

    `threads` bounds the native thread pools of the child. Events of the child go to `on_event`
    (default: this process's own listener). Raises the child's `CompressError` as if raised here,
    `WorkerError` if the child died, and `RuntimeError` with the child's traceback if it has a bug.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log, _child(threads, log) as (process, channel):
        assert process.stdin is not None
        with process.stdin as stdin:
            json.dump({"task": task, "arguments": arguments}, stdin)
        answer: dict[str, Any] = {}
        for line in channel:
            event = json.loads(line)
            if "result" in event or "error" in event:
                answer = event
            else:
                (on_event or events.forward)(event)
        status = process.wait()
        if not answer:
            raise WorkerError(_obituary(task, status, _tail(log)))
    if "error" in answer:
        raise _error(answer["error"])
    return Outcome(
        answer["result"], time.monotonic() - started, answer["cpu_seconds"], answer["peak_rss_bytes"]
    )


@contextmanager
def _child(threads: int | None, log: IO[str]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    read, write = os.pipe()
    environment = dict(os.environ, PYTHONUNBUFFERED="1", TF_CPP_MIN_LOG_LEVEL="3")
    # Threads of numpy's OpenBLAS wait for each other spinning: all cores for them cost twice the CPU time.
    environment.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    if threads:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(threads)
    # -P: a folder named `serving` in the working directory must not shadow ours.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "compressor.worker", str(write), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        text=True,
        env=environment,
        pass_fds=(write,),
        start_new_session=True,  # Ctrl-C reaches the parent, which then ends the child
    )
    os.close(write)
    with os.fdopen(read) as channel:
        try:
            yield process, channel
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _tail(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _obituary(task: str, status: int, last_words: str) -> str:
    said = f"; its last words: {last_words}" if last_words else ""
    if status == -signal.SIGKILL:
        return (
            f"the process for {task} was killed, most likely because memory ran out{said}; "
            "use a smaller --batch or a machine with more memory, and run the same command again"
        )
    if status in (-signal.SIGTERM, -signal.SIGINT):
        return (
            f"the process for {task} was ended by {signal.Signals(-status).name}; run the same command again"
        )
    if status < 0:
        name = signal.Signals(-status).name
        return f"the process for {task} crashed with {name} inside a native library{said}"
    return f"the process for {task} ended with status {status} and no answer{said}"


def _error(error: dict[str, str]) -> Exception:
    if error["kind"] == "bug":
        return RuntimeError(error["message"])
    return error_named(error["kind"], error["message"])


def _main() -> None:
    """The child's side: read the request from stdin, run it, answer on the channel."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    with os.fdopen(descriptor, "w", buffering=1) as channel:

        def send(event: dict[str, Any]) -> None:
            channel.write(json.dumps(event) + "\n")

        events.listen(send)
        request = json.load(sys.stdin)
        try:
            module, function = request["task"].split(":")
            value = getattr(importlib.import_module(module), function)(**request["arguments"])
            answer: dict[str, Any] = {"result": value}
        except CompressError as error:
            answer = {"error": {"kind": type(error).__name__, "message": str(error)}}
        except (SystemExit, KeyboardInterrupt) as error:
            words = f"the code of the model or the data ended the process ({type(error).__name__})"
            answer = {"error": {"kind": "DataError", "message": f"{request['task']}: {words}"}}
        except MemoryError:
            answer = {"error": {"kind": "WorkerError", "message": f"{request['task']}: memory ran out"}}
        except OSError as error:
            answer = {"error": _of_system(error)}
        except Exception:
            answer = {"error": {"kind": "bug", "message": _traceback()}}
        send({**answer, **_cost()})
    sys.stdout.flush()
    os._exit(0)  # native libraries may crash while they are torn down


def _of_system(error: OSError) -> dict[str, str]:
    """A full disk or a missing permission is the user's to mend; any other OSError is a bug."""
    import errno

    known = {
        errno.ENOSPC: "the disk is full: free some space or choose another --out",
        errno.EDQUOT: "the disk quota is used up: free some space or choose another --out",
        errno.EACCES: "permission denied",
        errno.EROFS: "the file system is read-only: choose another --out",
        errno.ENOENT: "no such file or folder",
        errno.EMFILE: "too many open files",
    }
    if error.errno not in known:
        return {"kind": "bug", "message": _traceback()}
    where = f"{error.filename}: " if error.filename else ""
    return {"kind": "StoreError", "message": f"{where}{known[error.errno]}"}


def _traceback() -> str:
    import traceback

    return traceback.format_exc()


def _cost() -> dict[str, Any]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    unit = 1 if sys.platform == "darwin" else 1024
    return {"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_rss_bytes": usage.ru_maxrss * unit}


def _die_with(parent: int) -> None:
    """On Linux, end this process when its parent ends, even by kill -9."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).is_absolute()]
    _main()
