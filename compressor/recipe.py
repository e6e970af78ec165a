"""Recipes: what was or is to be done to a model, as data. Each engine carries the recipe that made it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from compressor import plugins
from compressor.errors import UsageError

__all__ = ["Recipe", "Step"]

_KEYS = ("version", "name", "what", "steps")
_GIVEN = ("model", "folder", "ranges", "moments", "data")  # to a stage by the run, not by a recipe
_WORDS = {bool: "true or false", float: "a number", int: "a whole number", str: "text", type(None): "null"}
_LONGEST = 60  # characters of a value that are repeated in a message


@dataclass(frozen=True)
class Step:
    """One stage with its parameters."""

    stage: str
    parameters: dict[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """As it stands in a recipe file."""
        return {"stage": self.stage, **self.parameters}

    @property
    def takes(self) -> dict[str, Parameter]:
        """The parameters of the stage that a recipe may name."""
        found = signature(plugins.module("stages", self.stage).run).parameters
        return {name: value for name, value in found.items() if name not in _GIVEN}

    def check(self, recipe: str) -> None:
        """Hold the parameters against the annotated signature of the stage's `run`.

        Raises `UsageError` that names the `recipe` for one that is unknown, missing or of another type.
        """
        takes, where = self.takes, f"recipe {recipe}: stage {self.stage}"
        types = get_type_hints(plugins.module("stages", self.stage).run)
        for name, value in self.parameters.items():
            if name not in takes:
                raise UsageError(f"{where} takes no '{name}'; it takes {', '.join(takes)}")
            if not _fits(value, types[name]):
                raise UsageError(f"{where}: '{name}' must be {_words(types[name])}, not {_shown(value)}")
        for name, parameter in takes.items():
            if parameter.default is Parameter.empty and name not in self.parameters:
                raise UsageError(f"{where} needs '{name}', {_words(types[name])}")


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
        except RecursionError as error:
            raise UsageError(f"recipe {path}: is nested too deeply to be a recipe") from error
        except (OSError, ValueError) as error:
            raise UsageError(f"recipe {path}: {getattr(error, 'strerror', None) or error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("steps"), list):
            raise UsageError(f"recipe {path}: needs a list 'steps'")
        if unknown := [key for key in value if key not in _KEYS]:
            raise UsageError(f"recipe {path}: unknown key '{unknown[0]}'; a recipe has {', '.join(_KEYS)}")
        version = value.get("version", 1)
        if not _fits(version, int) or version != 1:
            raise UsageError(f"recipe {path}: version {_shown(version)} is not known; this is version 1")
        name, what = value.get("name", path.stem), value.get("what", "")
        for key, text in (("name", name), ("what", what)):
            if not isinstance(text, str):
                raise UsageError(f"recipe {path}: '{key}' must be text, not {_shown(text)}")
        return cls(name, tuple(_step(path, step) for step in value["steps"]), what)


def _step(path: Path, value: Any) -> Step:
    known = plugins.names("stages")
    if not isinstance(value, dict) or value.get("stage") not in known:
        raise UsageError(
            f"recipe {path}: step {_shown(value)} names no known stage; known are {', '.join(known)}"
        )
    return Step(value["stage"], {key: item for key, item in value.items() if key != "stage"})


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value out of a file is of an annotated type; a whole number is a number, true is neither."""
    if isinstance(wanted, UnionType):
        return any(_fits(value, one) for one in get_args(wanted))
    if get_origin(wanted) is list:
        return isinstance(value, list) and all(_fits(item, get_args(wanted)[0]) for item in value)
    if wanted is float:
        return type(value) in (int, float) and abs(value) < 2**1000
    return type(value) is wanted


def _words(wanted: Any) -> str:
    """An annotated type as people say it."""
    if isinstance(wanted, UnionType):
        return " or ".join(_words(one) for one in get_args(wanted))
    if get_origin(wanted) is list:
        return f"a list of {_words(get_args(wanted)[0]).removeprefix('a ')}s"
    return _WORDS[wanted]


def _shown(value: Any) -> str:
    """A value as it stands in JSON, as far as it can; the beginning of a long one."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
