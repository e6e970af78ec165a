"""Progress and warnings from wherever work is done; a child process passes them on to its parent.

Work reports through `progress` and `warn` without knowing who listens. By default nobody does for
progress, and warnings go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["forward", "listen", "progress", "warn"]

Sink = Callable[[dict[str, Any]], None]


def _default(event: dict[str, Any]) -> None:
    if "warning" in event:
        print(f"warning: {event['warning']}", file=sys.stderr)


_sink: Sink = _default


def listen(sink: Sink) -> None:
    """Send all events of this process to `sink`."""
    global _sink
    _sink = sink


def progress(label: str, done: int, total: int | None) -> None:
    """Say that `done` of `total` units of `label` are finished (total None: unknown)."""
    _sink({"progress": {"label": label, "done": done, "total": total}})


def warn(message: str) -> None:
    """Say something that the user must see and the report must keep."""
    _sink({"warning": message})


def forward(event: dict[str, Any]) -> None:
    """Pass an event on that came from a child process."""
    _sink(event)
