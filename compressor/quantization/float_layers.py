"""Keeps layers in float that are meant to be: ONNX Runtime would quantize them again.

Its WeightBiasQuantization pass looks for a Conv, ConvTranspose or Gemm with a float weight between a
DequantizeLinear of one scale and a QuantizeLinear, and rounds the weight to int8 with one scale for the
whole tensor. It leaves alone what reads a DequantizeLinear with a scale per channel, which costs nothing:
so such a layer reads a DequantizeLinear of its own, with the same scale written once per channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.view import View, attribute, replace_nodes, unique

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["keep_float"]

_REQUANTIZED = ("Conv", "ConvTranspose", "Gemm")


def keep_float(model: ModelProto) -> ModelProto:
    """Change a Q/DQ model in place so that layers with float weights run in float; gives it back."""
    view = View(model)
    names = {node.name for node in model.graph.node}
    before: dict[str, NodeProto] = {}
    for node in model.graph.node:
        source = view.producers.get(node.input[0]) if node.input else None
        if node.op_type not in _REQUANTIZED or source is None or source.op_type != "DequantizeLinear":
            continue
        weight = view.producers.get(node.input[1])
        if (weight is None or weight.op_type != "DequantizeLinear") and (size := _channels(view, node)):
            before[View.key(node)] = _per_channel(view, source, size, node, names)
    nodes = []
    for node in model.graph.node:
        read = view.consumers.get(View.key(node)) or View.key(node) in view.outputs | view.captured
        if read or node.op_type != "DequantizeLinear":
            nodes += [before[View.key(node)], node] if View.key(node) in before else [node]
    if before:
        replace_nodes(model, nodes)
    return model


def _channels(view: View, node: NodeProto) -> int | None:
    """The length of axis 1 of the layer's input; None where it is not known."""
    shape = _shape(view, node.input[1])
    if shape is None:
        return None
    if node.op_type == "Conv":
        return shape[1] * int(attribute(node, "group", 1))
    if node.op_type == "ConvTranspose":
        return shape[0]
    if attribute(node, "transA", 0):
        return None
    return shape[1 if attribute(node, "transB", 0) else 0]


def _shape(view: View, weight: str) -> tuple[int, ...] | None:
    """The shape of a weight, looked up through the nodes that turn its codes into floats."""
    while weight not in view.initializers:
        maker = view.producers.get(weight)
        if maker is None or maker.op_type not in ("Mul", "Cast", "Identity"):
            return None
        weight = maker.input[0]
    return tuple(view.initializers[weight].dims)


def _per_channel(view: View, source: NodeProto, size: int, node: NodeProto, names: set[str]) -> NodeProto:
    """A copy of `source` with its scale once per channel, which `node` reads from now on."""
    from onnx import helper

    parameters = [view.array(name) for name in source.input[1:]]
    assert all(value is not None for value in parameters)
    rows = [
        view.add(f"{name}_per_channel", np.full(size, value))
        for name, value in zip(source.input[1:], parameters, strict=True)
        if value is not None
    ]
    output = view.new_name(f"{source.output[0]}_per_channel")
    view.set_input(node, 0, output)
    name = unique(output, names)
    return helper.make_node("DequantizeLinear", [source.input[0], *rows], [output], name=name, axis=1)
