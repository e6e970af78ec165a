"""Running tasks as stored steps: reuse what is there, plan what is not, keep what each one cost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compressor import machine, worker
from compressor.errors import CompressError, StoreError, WorkerError
from compressor.store import Store, digest

__all__ = ["Done", "Planned", "Steps"]


_RECORD = {"value", "warnings", "what", "seconds", "cpu_seconds", "peak_rss_bytes"}


@dataclass(frozen=True)
class Done:
    """A finished step: what the task returned, the folder it wrote to, and its key for those after it."""

    key: str
    value: Any
    folder: Path

    def path(self, name: str) -> str:
        """A file of this step."""
        return str(self.folder / name)


@dataclass(frozen=True)
class Planned:
    """A step of the plan; `seconds` is an estimate (None: cannot be told), 0 if it is stored already."""

    name: str
    what: str
    stored: bool
    seconds: float | None


@dataclass
class Steps:
    """Runs tasks in child processes and stores their results.

    With `planning`, only light steps run and the others are listed in `plan`.
    """

    store: Store
    planning: bool = False
    on_event: Callable[[dict[str, Any]], None] | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    plan: list[Planned] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(
        self,
        name: str,
        task: str,
        given: dict[str, Any],
        *,
        unkeyed: dict[str, Any] | None = None,
        after: Iterable[str] = (),
        measured: bool = False,
        fresh: bool = False,
        always: bool = False,
        light: bool = False,
        expected: Any = None,
        estimate: float | None = None,
        threads: int | None = None,
        what: str = "",
    ) -> Done:
        """Run `task` with `given` and `unkeyed` arguments, or reuse its result.

        The key is made of the task, its version, `given`, the keys of the steps `after` which it comes, and
        the versions of the packages involved; `measured` adds the processor's instruction set. Paths and
        what does not change the result go into `unkeyed`. A `fresh` step is neither kept nor reused; one
        that runs `always` is kept for those after it, but not reused. Each task gets a `folder`. `expected`
        stands for the result, and `estimate` (seconds) for the cost, while planning.
        """
        place = machine.instruction_set() if measured else ""
        key = digest(task, _version(task), given, sorted(after), _packages(), place)
        stored = None if fresh or always else self.store.find(name, key)
        if stored and _RECORD - set(stored.record):
            stored = None
        if self.planning and not light:
            seconds = 0.0 if stored else estimate
            self.plan.append(Planned(name, what, stored is not None, seconds))
            return Done(key, stored.record["value"] if stored else expected, self.store.place(name, key))
        if stored:
            self._replay(name, stored.record)
            return Done(key, stored.record["value"], stored.folder)
        arguments = {**given, **(unkeyed or {}), "folder": str(self.store.begin(name, key))}
        record = self._do(name, key, task, arguments, threads, what)
        if fresh:
            self.store.discard(name, key)
            return Done(key, record["value"], self.store.place(name, key))
        return Done(key, record["value"], self.store.finish(name, key, record).folder)

    def _do(
        self, name: str, key: str, task: str, arguments: dict[str, Any], threads: int | None, what: str
    ) -> dict[str, Any]:
        warnings: list[str] = []
        started = time.monotonic()
        try:
            outcome = worker.call(
                task, arguments, threads=threads, on_event=lambda event: self._heard(event, warnings)
            )
        except (WorkerError, StoreError):
            raise  # what the step has done so far is kept for the next try
        except CompressError:
            self.store.discard(name, key)
            raise
        record = {
            "task": task,
            "what": what,
            "value": outcome.value,
            "warnings": warnings,
            "seconds": round(time.monotonic() - started, 3),
            "cpu_seconds": round(outcome.cpu_seconds, 3),
            "peak_rss_bytes": outcome.peak_rss_bytes,
        }
        self._record(name, record, reused=False)
        return record

    def _heard(self, event: dict[str, Any], warnings: list[str]) -> None:
        if "warning" in event:
            warnings.append(event["warning"])
            self.note(event["warning"])
        elif self.on_event:
            self.on_event(event)

    def note(self, message: str) -> None:
        """Say something to the user once, and keep it for the report."""
        if message not in self.notes:
            self.notes.append(message)
            if self.on_event:
                self.on_event({"warning": message})

    def _replay(self, name: str, record: dict[str, Any]) -> None:
        for message in record["warnings"]:
            self.note(message)
        self._record(name, record, reused=True)

    def _record(self, name: str, record: dict[str, Any], *, reused: bool) -> None:
        shown = ("what", "seconds", "cpu_seconds", "peak_rss_bytes")
        self.records.append({"name": name, **{key: record[key] for key in shown}, "reused": reused})


def _version(task: str) -> str:
    """`VERSION` of the task's module, read without importing it; the package's own version without one."""
    spec = find_spec(task.split(":")[0])
    origin = Path(spec.origin) if spec and spec.origin else None
    match = re.search(r"^VERSION(?:: int)? = (\d+)", origin.read_text(), re.M) if origin else None
    return match[1] if match else "0"


def _packages() -> dict[str, str]:
    decisive = ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", "openvino", "modelpress")
    return {name: version for name, version in machine.packages().items() if name in decisive}
