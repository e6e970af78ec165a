"""What the text after `--data` means: a path, a path with a split, or `module:callable`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from compressor import plugins
from compressor.data._types import DataOptions, Dataset
from compressor.errors import DataError

__all__ = ["Location", "is_reference", "locate", "open_dataset"]

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_REFERENCE = re.compile(rf"{_DOTTED}:{_DOTTED}")
_IN_FILE = re.compile(rf".+\.py:{_DOTTED}")


@dataclass(frozen=True)
class Location:
    """A file or folder that exists, and the part of it that is asked for."""

    path: Path
    split: str | None = None


def locate(source: str) -> Location | None:
    """The path that `source` means; None if it is `module:callable` or nothing that exists.

    In this order: all of it is a path that exists; what stands before the last `:` is one, and what
    follows is the split. A folder with no such sub-folder gives way to a module of the same name.
    Raises `DataError` where a folder may not be searched.
    """
    whole = _existing(source)
    if whole is not None:
        return Location(whole)
    head, colon, split = source.rpartition(":")
    path = _existing(head) if colon and head else None
    if path is None:
        return None
    if path.is_dir() and not (path / split).is_dir() and _is_module(head):
        return None
    return Location(path, split)


def is_reference(source: str) -> bool:
    """Whether `source` reads as `module:callable` and is no path, or as `file.py:callable`."""
    place = locate(source)
    if _IN_FILE.fullmatch(source):
        return place is None or (place.split is not None and place.path.is_file())
    return bool(_REFERENCE.fullmatch(source)) and place is None


def open_dataset(source: str, options: DataOptions) -> Dataset:
    """Open `source` with the plugin that recognises it; raises `DataError` if none does."""
    for name in plugins.names("sources"):
        plugin = plugins.module("sources", name)
        if plugin.recognise(source):
            dataset: Dataset = plugin.open_dataset(source, options)
            return dataset
    raise DataError(_unknown(source))


def _existing(text: str) -> Path | None:
    """The file or folder of that name; raises `DataError` if it may not be looked for."""
    try:
        path = Path(text).expanduser()
        path.stat()
    except PermissionError as error:
        raise DataError(f"data '{text}' cannot be read: permission denied") from error
    except (OSError, RuntimeError, ValueError):  # no such file, or nothing that could be a file's name
        return None
    return path


def _unknown(source: str) -> str:
    ways = (
        "a folder of pictures, an .npz or .npy file (each also with :split), or module:callable or "
        "file.py:callable"
    )
    place = locate(source)
    if place is None:
        return f"data '{' '.join(source.split())[:300]}': there is no such file or folder; pass {ways}"
    if place.path.suffix == ".py":
        return f"data '{source}': name what gives the batches too, e.g. {place.path}:batches"
    if place.split and place.path.is_dir():
        inner = sorted(item.name for item in place.path.iterdir() if item.is_dir())
        there = f"it has {', '.join(inner[:10])}" if inner else "it has none"
        return f"data '{source}': folder {place.path} has no sub-folder '{place.split}' ({there})"
    return f"data '{source}': this kind of file cannot be read as data; pass {ways}"


def _is_module(name: str) -> bool:
    """Whether a file of Python code has this name (a plain folder is no module)."""
    spec = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path]) if name.isidentifier() else None
    return spec is not None and spec.origin is not None
