"""One file a runtime: from an engine file to a session, arrays in, arrays out.

Importing these modules imports neither numpy nor a runtime; opening a session does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from compressor import plugins
from compressor.errors import DataError, UsageError
from compressor.model import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Feeds = Mapping[str, Array]

__all__ = ["MOST_THREADS", "Session", "availability", "check_feeds", "check_threads"]

MOST_THREADS = 4096


class Session(Protocol):
    """A loaded engine. Both ways to run it take every input by name."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Check `feeds` against `inputs` (`DataError`), run, return all outputs by name.

        Raises `UnsupportedError` in one line when the runtime fails.
        """

    def bind(self, feeds: Feeds) -> Callable[[], Any]:
        """Check `feeds` once and give a call that only runs the engine on them, for timing."""


def availability(names: list[str]) -> dict[str, dict[str, Any]]:
    """For each runtime: "reason" (why it cannot be used here, or None) and its "devices"; a task."""
    found = {}
    for name in names:
        module = plugins.module("runtimes", name)
        reason = module.available()
        found[name] = {"reason": reason, "devices": [] if reason else list(module.devices())}
    return found


def check_threads(threads: int) -> None:
    """Raise `UsageError` for a number of threads that no runtime can be asked for."""
    if not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"threads must be from 1 to {MOST_THREADS}, not {threads}")


def check_feeds(specs: tuple[TensorSpec, ...], feeds: Feeds) -> None:
    """Raise `DataError` that names the first difference between arrays and what the engine takes.

    Compared are names, dtype, rank and the fixed sizes; free dimensions take any size.
    """
    names = {spec.name for spec in specs}
    if not isinstance(feeds, Mapping):
        raise DataError(
            f"the engine takes a dict of arrays by input name ({', '.join(sorted(names))}), "
            f"not {type(feeds).__name__}"
        )
    if names != set(feeds):
        raise DataError(_names_differ(names, set(feeds)))
    for spec in specs:
        _check_array(spec, feeds[spec.name])


def _names_differ(wanted: set[str], given: set[str]) -> str:
    parts = []
    if missing := sorted(wanted - given):
        parts.append(f"missing {', '.join(missing)}")
    if unknown := sorted(given - wanted):
        parts.append(f"not known {', '.join(unknown)}")
    return f"the engine takes the inputs {', '.join(sorted(wanted))}; {' and '.join(parts)}"


def _check_array(spec: TensorSpec, array: Array) -> None:
    if not hasattr(array, "dtype"):
        raise DataError(f"input '{spec.name}' must be a numpy array, not {type(array).__name__}")
    if array.dtype.name != spec.dtype:
        raise DataError(f"input '{spec.name}' must be {spec.dtype}, not {array.dtype.name}")
    fits = len(spec.shape) == array.ndim and all(
        isinstance(want, str) or want == got for want, got in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        given = "x".join(map(str, array.shape)) or "a scalar"
        raise DataError(f"input '{spec.name}' must have the shape {_words(spec.shape)}, not {given}")


def _words(shape: tuple[int | str, ...]) -> str:
    return "x".join("?" if isinstance(size, str) else str(size) for size in shape) or "of a scalar"
