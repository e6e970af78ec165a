"""What a run is asked for: one place for the command line, `compress.toml` and the Python API."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from compressor.errors import UsageError

__all__ = ["Options", "duration", "from_toml"]

MOST = 10**9  # of any count or time
ENGINE_SUFFIXES = (".onnx", ".xml", ".tflite", ".plan", ".pt2")


@dataclass(frozen=True)
class Options:
    """Options of `compress run`; the command line's names with `-` for `_`.

    `bench` is the time in seconds for each engine's latency measurement (0: none), `budget` that of the
    search for each target (None: without end). `batch` is the batch
    of calibration and evaluation; latency is measured at batch 1. `threads` are those of the measured
    engine.
    """

    model: str
    target: tuple[str, ...] = ("int8",)
    data: str | None = None
    calib_data: str | None = None
    eval_data: str | None = None
    preprocess: str | None = None
    calib: int = 300
    arch: str | None = None
    input: tuple[str, ...] = ()
    metric: str | None = None
    max_drop: float | None = None
    budget: float | None = None
    recipe: str | None = None
    scheme: str | None = None
    out: str | None = None
    work: str | None = None
    seed: int = 0
    batch: int = 32
    threads: int = 1
    device: str | None = None
    bench: float = 20.0
    trust: bool = False
    plan: bool = False

    def __post_init__(self) -> None:
        for name, least in (("calib", 1), ("batch", 1), ("threads", 1), ("seed", 0), ("bench", 0)):
            if not least <= getattr(self, name) < MOST:
                raise UsageError(
                    f"--{name} {getattr(self, name)}: must be at least {least} and a finite number"
                )
        if self.max_drop is not None and not 0 <= self.max_drop < float("inf"):
            raise UsageError(f"--max-drop {self.max_drop}: must be 0 or more points of the metric")
        if self.budget is not None and not self.budget > 0:
            raise UsageError(f"--budget {self.budget:g}: must be a time above 0, such as 10m")
        if not self.target:
            raise UsageError("no target is asked; give one or more, such as int8")
        if self.engine_file and len(self.target) > 1:
            raise UsageError(
                f"--out {self.out} names one engine, but {len(self.target)} targets are asked; "
                "give a folder instead"
            )

    @property
    def engine_file(self) -> Path | None:
        """The engine's own path, where --out names a file."""
        return Path(self.out) if self.out and self.out.endswith(ENGINE_SUFFIXES) else None

    @property
    def folder(self) -> Path:
        """Where report, engines and steps go."""
        if self.work:
            return Path(self.work)
        if self.engine_file:
            return self.engine_file.with_name(self.engine_file.name + ".work")
        return Path(self.out or f"{Path(self.model).stem}-compressed")


def duration(text: str) -> float:
    """Seconds of a text such as 90, 600s, 10m or 1.5h; raises `UsageError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not found:
        raise UsageError(f"--budget {text}: must be a time such as 600s, 10m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def from_toml(
    model: str, *, trust: bool = False, given: Collection[str] = ()
) -> tuple[dict[str, Any], Path | None]:
    """The options of `compress.toml` beside the model or, failing that, in the working directory.

    A folder that a model came with is not the user's word: unless it is the working directory or `trust`
    is given, its file may not set what runs code, nor have anything written outside of it; options that
    are `given` elsewhere do not count. Raises `UsageError` that says what was asked for.
    """
    for folder in (Path(model).parent, Path()):
        path = folder / "compress.toml"
        if path.is_file():
            options = _read(path)
            if not trust and folder.resolve() != Path.cwd():
                _check_harmless(path, {name: value for name, value in options.items() if name not in given})
            return options, path
    return {}, None


_RUN_CODE = ("arch", "data", "calib_data", "eval_data", "metric")  # where they name MODULE:CALLABLE
_KNOWN_CODE = re.compile(  # a network by its name, with numbers at most: a path or a module leads anywhere
    r"(torchvision\.models|timm|timm\.models):[a-zA-Z]\w*(\([\w=., ]*\))?"
)


def _check_harmless(path: Path, options: dict[str, Any]) -> None:
    for name in _RUN_CODE:
        value = str(options.get(name) or "")
        head = Path(value.partition(":")[0])
        part_of_a_file = name.endswith("data") and head.exists() and head.suffix != ".py"
        if ":" in value and not part_of_a_file and not _KNOWN_CODE.fullmatch(value):
            raise UsageError(_refused(path, f"{name.replace('_', '-')} = {value}", "is code that would run"))
    if options.get("trust"):
        raise UsageError(_refused(path, "trust = true", "would let the model run code"))
    for name in ("out", "work"):
        place = options.get(name)
        if place and not Path(place).resolve().is_relative_to(path.parent.resolve()):
            raise UsageError(_refused(path, f"{name} = {place}", "is outside of its folder"))


def _refused(path: Path, asked: str, why: str) -> str:
    return (
        f"{path} says {asked}, which {why}, and it does not lie in the working directory: "
        "run in its folder or pass --trust if you trust it, or give the option yourself"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    kinds = {field.name: str(field.type) for field in fields(Options) if field.name not in ("model", "plan")}
    options: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise UsageError(f"{path}: unknown option '{key}'; known are {', '.join(sorted(kinds))}")
        if name in options:
            raise UsageError(f"{path}: {name.replace('_', '-')} is set twice, as '{key}' too; keep one")
        options[name] = _located(path.parent, name, _checked(path, key, value, kinds[name]))
    return options


def _located(folder: Path, name: str, value: Any) -> Any:
    """A file that the table names relative to itself, as seen from the working directory."""
    if name not in ("data", "calib_data", "eval_data", "recipe", "arch", "out", "work"):
        return value
    head, colon, tail = value.partition(":")
    if name in ("out", "work") or (folder / head).exists():
        return str(folder / head) + colon + tail
    if colon and (folder / f"{head}.py").is_file():
        return str(folder / f"{head}.py") + colon + tail
    return value


def _checked(path: Path, key: str, value: Any, kind: str) -> Any:
    if key == "budget" and isinstance(value, str):
        return duration(value)
    if kind.startswith("tuple"):
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(item, str) for item in values):
            return tuple(values)
        raise UsageError(f"{path}: {key} must be a text or a list of texts, not {value!r}")
    wanted = {"str": str, "int": int, "float": (int, float), "bool": bool}[kind.split(" ")[0]]
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):  # type: ignore[arg-type]
        raise UsageError(f"{path}: {key} must be of type {kind.split(' ')[0]}, not {value!r}")
    return value
