"""Pairs that change nothing, for runtimes that carry integers over movers of values by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.quantization.constants import drop_unused_initializers
from compressor.quantization.view import View, replace_nodes

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["drop_repeats"]

_MOVERS = {
    "Concat", "Flatten", "Gather", "MaxPool", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
}  # fmt: skip
_Codes = tuple[bytes, ...]


def drop_repeats(model: ModelProto) -> int:
    """Take out pairs whose values all come from pairs of the same scale and were only moved since, in place.

    Rounding twice to one grid is rounding once, so the graph computes the same. Returns how many pairs went.
    """
    view = View(model)
    spare: dict[str, str] = {}
    for node in model.graph.node:
        quantize = view.producers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if quantize is None or quantize.op_type != "QuantizeLinear" or node.output[0] in view.outputs:
            continue
        scale, source = _codes(view, node), quantize.input[0]
        if scale and scale == _codes(view, quantize) and _repeats(view, source, scale):
            spare[node.output[0]] = spare.get(source, source)
    nodes = [node for node in model.graph.node if node.output[0] not in spare]
    for node in nodes:
        node.input[:] = [spare.get(name, name) for name in node.input]
    read = {name for node in nodes for name in node.input} | set(view.outputs) | set(view.captured)
    replace_nodes(
        model, [node for node in nodes if node.op_type != "QuantizeLinear" or node.output[0] in read]
    )
    drop_unused_initializers(model)
    return len(spare)


def _repeats(view: View, name: str, scale: _Codes) -> bool:
    """Whether a tensor holds values of pairs of that scale alone."""
    maker = view.producers.get(name)
    if maker is None:
        return False
    if maker.op_type == "DequantizeLinear":
        return _codes(view, maker) == scale
    sources = maker.input if maker.op_type == "Concat" else maker.input[:1]
    return maker.op_type in _MOVERS and all(_repeats(view, source, scale) for source in sources)


def _codes(view: View, node: NodeProto) -> _Codes:
    """Scale and zero point of half a pair; empty if they are not constants."""
    found = [view.array(name) for name in node.input[1:]]
    return tuple(value.tobytes() for value in found if value is not None) if len(found) == 2 else ()
