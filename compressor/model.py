"""What flows between stages: a model in one of two forms, with its inputs and outputs."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from compressor.errors import UsageError

__all__ = ["DTYPES", "Model", "TensorSpec"]

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_LARGEST = 2**31 - 1
_INPUT = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<shape>[^:=]+)(?::(?P<dtype>\w+))?")


@dataclass(frozen=True)
class TensorSpec:
    """An input or output. `shape` holds sizes, and names for free dimensions; `dtype` is numpy's name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Read `NAME=SHAPE[:dtype]`, e.g. `image=?x3x224x224` or `ids=?x?:int64` (`,` works as `x`).

        Raises `UsageError` for another form, for a dtype outside of `DTYPES` and for too large a tensor.
        """
        match = _INPUT.fullmatch(text.strip())
        sizes = re.split(r"[x,]", match["shape"]) if match else []
        if not match or not all(size == "?" or re.fullmatch("0*[1-9][0-9]*", size) for size in sizes):
            raise UsageError(
                f"--input '{text}' is not of the form NAME=SHAPE[:dtype], e.g. image=?x3x224x224 "
                "(? is a free dimension)"
            )
        elements = 1
        for size in sizes:
            elements *= 1 if size == "?" else int(size) if len(size) < 20 else _LARGEST + 1
        if elements > _LARGEST:
            raise UsageError(
                f"--input '{text[:200]}' is too large: at most {_LARGEST:,} elements (2^31 - 1) can be fed"
            )
        if match["dtype"] and match["dtype"] not in DTYPES:
            raise UsageError(
                f"--input '{text}': unknown dtype '{match['dtype']}'; known are {', '.join(DTYPES)}"
            )
        free = {0: "batch"}
        shape = tuple(
            free.get(axis, f"dim{axis}") if size == "?" else int(size) for axis, size in enumerate(sizes)
        )
        return cls(match["name"] or "", match["dtype"] or "float32", shape)

    @classmethod
    def of(cls, value: dict[str, Any]) -> TensorSpec:
        """From its JSON form."""
        return cls(value["name"], value["dtype"], tuple(value["shape"]))

    def __str__(self) -> str:
        return f"{self.name}={'x'.join(map(str, self.shape)) or 'scalar'}:{self.dtype}"


@dataclass(frozen=True)
class Model:
    """A model on disk.

    form "torch": `path` is a `.pt2`, a torch.export program in training form (aten), batch free.
    form "onnx": `path` is an ONNX file with all its data in it or beside it.
    `preprocess` is what the architecture itself asks for (see `compressor.data`), if known.
    """

    form: Literal["torch", "onnx"]
    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sha256: str
    parameters: int
    kind: str
    architecture: str | None = None
    preprocess: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def json(self, relative_to: Path | None = None) -> dict[str, Any]:
        """JSON form, with the path relative to the step folder that holds it."""
        path = self.path.relative_to(relative_to) if relative_to else self.path
        return {**asdict(self), "path": str(path)}

    @classmethod
    def of(cls, value: dict[str, Any], folder: Path | None = None) -> Model:
        """From its JSON form; `folder` is the step folder."""
        specs = {key: tuple(TensorSpec.of(spec) for spec in value[key]) for key in ("inputs", "outputs")}
        return cls(**{**value, **specs, "path": Path(folder or "", value["path"])})
