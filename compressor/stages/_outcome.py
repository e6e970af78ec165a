"""What the stages give back: the model that they wrote, or the source as it is, with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events, onnx_files
from compressor.errors import UsageError
from compressor.model import Model
from compressor.store import file_digest

if TYPE_CHECKING:
    from onnx import ModelProto

    from compressor.quantization.view import View

__all__ = ["check_names", "unchanged", "written"]


def written(
    source: Model, folder: str, model: ModelProto, facts: dict[str, Any], device: str | None = None
) -> dict[str, Any]:
    """Write `model` as `folder/model.onnx`; gives the source's JSON with the new path, digest and facts.

    Whether the runtime loads it is tried only where a `device` is named; otherwise it shows when the engine
    is exported or run. Raises `UnsupportedError` if it does not.
    """
    path = Path(folder, "model.onnx")
    if device:
        model = onnx_files.write(model, path, device=device)
    else:
        onnx_files.save(model, path)
    found = {**onnx_files.facts(model), **facts}
    return replace(source, path=path, sha256=file_digest(path), facts=found).json(Path(folder))


def unchanged(source: Model, folder: str, facts: dict[str, Any], reason: str) -> dict[str, Any]:
    """The source model as it is, in its own file; the reason is also a warning."""
    events.warn(reason)
    empty = {"quantized": 0, "stored": 0, "float": []}
    return written(source, folder, onnx_files.read(source.path), {**empty, **facts, "reason": reason})


def check_names(view: View, names: list[str]) -> None:
    """Raise `UsageError` for a node that the model has not."""
    known = {node.name for node in view.graph.node}
    missing = [name for name in names if name not in known]
    if missing:
        raise UsageError(
            f"the model has no node '{missing[0]}' to leave in float; see the report for its nodes"
        )
