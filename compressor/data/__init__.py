"""Data for calibration and evaluation: one kind of source a module, all read as named batches of arrays.

A source is written as a path (`photos`, `samples.npz`), a path with a split (`photos:val` is a sub-folder,
`samples.npz:val` takes the keys `val_x` or `x_val`), `module:callable`, or `file.py:callable`. What exists
as a path is taken as one. Importing this package does not import numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compressor.data._match import match
from compressor.data._preprocess import parse_preprocess
from compressor.data._source import open_dataset
from compressor.data._types import Batch, DataOptions, Dataset

if TYPE_CHECKING:
    from compressor.data._stream import stream
    from compressor.data._tasks import describe, describe_task, split

__all__ = [
    "Batch",
    "DataOptions",
    "Dataset",
    "describe",
    "describe_task",
    "match",
    "open_dataset",
    "parse_preprocess",
    "split",
    "stream",
]

VERSION = 2


def __getattr__(name: str) -> Any:
    """Import what needs numpy when it is first asked for."""
    import importlib

    home = {"stream": "_stream", **dict.fromkeys(("describe", "describe_task", "split"), "_tasks")}
    if name not in home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home[name]}"), name)
