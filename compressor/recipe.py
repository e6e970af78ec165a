"""Recipes: what was or is to be done to a model, as data. Each engine carries the recipe that made it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor import plugins
from compressor.errors import UsageError

__all__ = ["Recipe", "Step"]


@dataclass(frozen=True)
class Step:
    """One stage with its parameters."""

    stage: str
    parameters: dict[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """As it stands in a recipe file."""
        return {"stage": self.stage, **self.parameters}


@dataclass(frozen=True)
class Recipe:
    """A named sequence of stages; `what` says in a few words what is special about it."""

    name: str
    steps: tuple[Step, ...] = ()
    what: str = ""

    def json(self) -> dict[str, Any]:
        """As it stands in a recipe file."""
        return {"version": 1, "name": self.name, "what": self.what, "steps": [s.json() for s in self.steps]}

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """From a `.json` or `.toml` file; raises `UsageError` that names what is wrong in it."""
        try:
            text = path.read_text()
            value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise UsageError(f"recipe {path}: {getattr(error, 'strerror', None) or error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("steps"), list):
            raise UsageError(f"recipe {path}: needs a list 'steps'")
        if value.get("version", 1) != 1:
            raise UsageError(f"recipe {path}: version {value['version']} is not known; this is version 1")
        steps = tuple(_step(path, step) for step in value["steps"])
        return cls(str(value.get("name", path.stem)), steps, str(value.get("what", "")))


def _step(path: Path, value: Any) -> Step:
    known = plugins.names("stages")
    if not isinstance(value, dict) or value.get("stage") not in known:
        raise UsageError(f"recipe {path}: step {value!r} names no known stage; known are {', '.join(known)}")
    return Step(value["stage"], {key: item for key, item in value.items() if key != "stage"})
