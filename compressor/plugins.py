"""The seams: a loader, data source, stage, exporter or runtime exists because a module of its name exists.

`names("runtimes")` lists the files, `module("runtimes", "onnx")` imports one. Nothing is registered.
A module whose name begins with `_` is not a plugin.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from compressor.errors import UnsupportedError

__all__ = ["PACKAGES", "module", "names"]

PACKAGES = {
    "loaders": "compressor.loading",
    "sources": "compressor.data",
    "stages": "compressor.stages",
    "exporters": "exporters",
    "runtimes": "serving.runtimes",
}


@cache
def names(kind: str) -> tuple[str, ...]:
    """The plugins of a kind (a key of `PACKAGES`), sorted; imports none of them."""
    spec = find_spec(PACKAGES[kind])
    assert spec is not None
    found = pkgutil.iter_modules(spec.submodule_search_locations)
    return tuple(sorted(item.name for item in found if not item.name.startswith("_")))


def module(kind: str, name: str) -> ModuleType:
    """Import a plugin; raises `UnsupportedError` with the names that exist."""
    if name not in names(kind):
        raise UnsupportedError(f"there is no '{name}' among the {kind}; there are: {', '.join(names(kind))}")
    return importlib.import_module(f"{PACKAGES[kind]}.{name}")
