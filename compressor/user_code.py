"""The user's own code, named as `module:attribute`: found in the working directory or an installed package.

What goes wrong inside it becomes one line that names the exception and the user's line.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.errors import CompressError, DataError, UsageError

__all__ = ["load", "running"]


def load(reference: str) -> Any:
    """The object that `module:attribute` (dots allowed on both sides) names.

    The working directory comes first while the module is imported and last afterwards, so that a file
    there shadows none of our own imports. Raises `UsageError` if there is no such module or attribute,
    `DataError` if the module fails.
    """
    name, _, attribute = reference.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        with running(reference):
            value = importlib.import_module(name)
            for part in attribute.split("."):
                value = getattr(value, part)
            return value
    except DataError as error:
        raise _not_found(reference, error.__cause__) or error from None
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


@contextmanager
def running(reference: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a `DataError` with the exception and the user's line."""
    try:
        yield
    except CompressError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        said = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise DataError(f"{reference} failed with {said}{_place(error)}") from error


def _not_found(reference: str, error: BaseException | None) -> UsageError | None:
    name, _, attribute = reference.partition(":")
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return UsageError(
            f"{reference}: there is no module '{error.name}' here or among the installed packages"
        )
    if isinstance(error, AttributeError) and error.obj is sys.modules.get(name, error):
        return UsageError(f"{reference}: module '{name}' has no '{attribute}'")
    return None


def _place(error: BaseException) -> str:
    """Where in the user's code it happened: the innermost frame outside of installed packages and of ours."""
    installed = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(installed) and "site-packages" not in frame.filename
    ]
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
