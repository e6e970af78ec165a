"""The user's own code, named as `module:attribute` or `file.py:attribute`.

A module is found in the working directory or among the installed packages.

What goes wrong inside it becomes one line that names the exception and the user's line.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import CompressError, DataError, UsageError

__all__ = ["files", "is_file_name", "load", "module_of_file", "running"]


def load(reference: str) -> Any:
    """The object that `module:attribute` (dots allowed on both sides) or `file.py:attribute` names.

    The working directory comes first while the module is imported and last afterwards, so that a file
    there shadows none of our own imports. Raises `UsageError` if there is no such module or attribute,
    `DataError` if the module fails.
    """
    name, _, attribute = reference.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        with running(reference):
            value: Any = module_of_file(Path(name)) if is_file_name(name) else importlib.import_module(name)
            for part in attribute.split("."):
                value = getattr(value, part)
            return value
    except DataError as error:
        raise _not_found(reference, error.__cause__) or error from None
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def is_file_name(name: str) -> bool:
    """Whether what stands before the colon means a file of Python code, not a module."""
    return name.endswith(".py") or os.sep in name


def module_of_file(path: Path) -> ModuleType:
    """Import a file as the module of its name; its folder is searched for other modules afterwards.

    Raises `UsageError` if there is no such file, and whatever the file itself raises.
    """
    try:
        resolved = path.expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"there is no file {str(path)[:300]}") from error
    known = sys.modules.get(resolved.stem)
    if known is not None and getattr(known, "__file__", None) == str(resolved):
        return known
    spec = importlib.util.spec_from_file_location(resolved.stem, resolved)
    if spec is None or spec.loader is None or not resolved.is_file():
        raise UsageError(f"{path} is no file of Python code (.py)")
    if str(resolved.parent) not in sys.path:
        sys.path.append(str(resolved.parent))
    module = importlib.util.module_from_spec(spec)
    entered = sys.modules.setdefault(resolved.stem, module) is module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if entered:
            del sys.modules[resolved.stem]
        raise
    return module


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


def files() -> list[dict[str, str]]:
    """The user's own modules that are imported here, as {"path", "sha256"} of their files, sorted by path.

    Those are all that lie neither in the standard library nor in an installed package nor in this project.
    """
    ours = {"compressor", "exporters", "serving"}
    paths = {
        Path(str(module.__file__)).resolve()
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None) and name.partition(".")[0] not in ours
    }
    own = [path for path in sorted(paths) if path.is_file() and not _is_installed(path)]
    return [{"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in own]


def _is_installed(path: Path) -> bool:
    homes = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    homes.add(str(Path(__file__).parent))  # the worker runs as __main__
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(
        path.is_relative_to(Path(home).resolve()) for home in homes
    )


def _not_found(reference: str, error: BaseException | None) -> UsageError | None:
    name, _, attribute = reference.partition(":")
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return UsageError(
            f"{reference}: there is no module '{error.name}' here or among the installed packages"
        )
    module = sys.modules.get(Path(name).stem if is_file_name(name) else name, error)
    if isinstance(error, AttributeError) and error.obj is module:
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
