"""True channels of convolutions that ONNX Runtime runs in its blocked layout (NCHWc).

There channels come in blocks of 8 or 16, and weights and outputs are padded to whole blocks, so that neither
the optimized graph nor the profile tells how many there are. The engine's own file does: the optimized node
is named after the tensor that the convolution, with what was fused into it by then, gave.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

__all__ = ["blocked_weight", "convolution_weights"]

Shape = tuple[int, ...]

_DOMAIN = "com.microsoft.nchwc"
_NAME = re.compile(r"(.*)_nchwc(_token_\d+)?")
_STORED = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear"})
_ELEMENTWISE = frozenset(
    {
        "Add", "BatchNormalization", "Cast", "Clip", "DequantizeLinear", "Div", "Dropout", "Elu", "Gelu",
        "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Mish", "Mul", "PRelu", "QuantizeLinear", "Relu",
        "Selu", "Sigmoid", "Softplus", "Softsign", "Sub", "Swish", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip


def convolution_weights(model: onnx.ModelProto) -> dict[str, Shape]:
    """The weight's shape of the one Conv behind a tensor with only elementwise operators between, by name."""
    weights: dict[str, Shape] = {}
    for graph in _graphs(model.graph):
        constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        for node in graph.node:
            found: set[Shape] = set()
            if node.op_type == "Constant":
                constants[node.output[0]] = tuple(node.attribute[0].t.dims)
            elif node.op_type in _STORED and node.input[0] in constants:
                constants[node.output[0]] = constants[node.input[0]]
            elif node.op_type == "Conv":
                found = {constants[name] for name in node.input[1:2] if name in constants}
            elif node.op_type in _ELEMENTWISE:
                found = {weights[name] for name in node.input if name in weights}
            if len(found) == 1:
                weights[node.output[0]] = found.pop()
    return weights


def blocked_weight(node: onnx.NodeProto, weights: dict[str, Shape]) -> Shape | None:
    """The true shape of the weight of a Conv in the blocked layout; None for other nodes, or if unknown."""
    named = _NAME.fullmatch(node.name)
    if node.domain != _DOMAIN or node.op_type != "Conv" or named is None:
        return None
    return weights.get(named[1])


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, then those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _graphs(inner)
