"""What the stages give back: the model that they wrote, or the source as it is, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events, onnx_files
from compressor.errors import UsageError
from compressor.model import Model
from compressor.store import file_digest

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from compressor.quantization.view import View

__all__ = ["check_names", "inner_layers", "unchanged", "why_float", "written"]


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


def inner_layers(model: ModelProto) -> list[dict[str, str]]:
    """Name, op and reason of the layers inside of If, Loop and Scan: no stage takes layers there."""
    from compressor.quantization.layers import LAYERS

    found = []
    for node in model.graph.node:
        for inner in _nodes_inside(node):
            if inner.op_type in LAYERS:
                why = f"it lies inside of {node.op_type}, and inner graphs are not quantized"
                found.append({"name": inner.name or inner.output[0], "op": inner.op_type, "reason": why})
    return found


def _nodes_inside(node: NodeProto) -> Iterator[NodeProto]:
    """The nodes of all graphs inside a node."""
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            for inner in graph.node:
                yield inner
                yield from _nodes_inside(inner)


def why_float(layers: Iterable[dict[str, str]], without: str) -> str:
    """Why layers stay float, in a few words; `without`: what is said where there are none."""
    found = sorted({f"{layer['op']} ({layer['reason']})" for layer in layers})
    return "; ".join(found[:3]) or without


def check_names(view: View, names: list[str]) -> None:
    """Raise `UsageError` for a node that the model has not."""
    known = {node.name for node in view.graph.node}
    missing = [name for name in names if name not in known]
    if missing:
        raise UsageError(
            f"the model has no node '{missing[0]}' to leave in float; see the report for its nodes"
        )
