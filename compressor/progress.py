"""Progress bars with the time left, on a terminal only; warnings always."""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO, Any

__all__ = ["Progress"]

PATIENCE = 2.0  # seconds before a bar is shown


class Progress:
    """Shows the events of child processes on `stream`."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.started: dict[str, float] = {}
        self.tasks: dict[str, Any] = {}
        self.bars: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars:
            self.bars.stop()

    def event(self, event: dict[str, Any]) -> None:
        """Show one event."""
        if "warning" in event:
            self._say(f"warning: {event['warning']}")
        elif "progress" in event and self.stream.isatty():
            self._advance(**event["progress"])

    def _say(self, line: str) -> None:
        if self.bars:
            self.bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self.stream, flush=True)

    def _advance(self, label: str, done: int, total: int | None) -> None:
        started = self.started.setdefault(label, time.monotonic())
        if label not in self.tasks:
            if time.monotonic() - started < PATIENCE or done == total:
                return
            self.tasks[label] = self._shown().add_task(label, total=total)
        self.bars.update(self.tasks[label], completed=done, total=total)
        if total is not None and done >= total:
            self.bars.remove_task(self.tasks.pop(label))
            self.started.pop(label)

    def _shown(self) -> Any:
        if self.bars is None:
            from rich import progress
            from rich.console import Console

            self.bars = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                console=Console(file=self.stream),
                transient=True,
            )
            self.bars.start()
        return self.bars
