"""How a graph's multiply-accumulates (MACs) are shared among its layers, estimated without running it."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from compressor.quantization.layers import LAYERS
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["by_node", "shares"]

_FREE = 32  # stands for a length that the graph leaves open


def shares(view: View) -> dict[str, float]:
    """Share of the MACs by operator type, for one sample; {} without any layer of constant weights."""
    counts: Counter[str] = Counter()
    for node in view.graph.node:
        counts[node.op_type] += _macs(view, node)
    counts = +counts
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total else {}


def by_node(view: View) -> dict[str, float]:
    """Share of the MACs of each node, for one sample; 0 for those that are no layers."""
    counts = {node.name: _macs(view, node) for node in view.graph.node}
    total = sum(counts.values())
    return {name: count / total if total else 0.0 for name, count in counts.items()}


def _macs(view: View, node: NodeProto) -> int:
    """Weights times the places at which they are used."""
    if node.op_type not in LAYERS:
        return 0
    sizes = [int(prod(view.initializers[name].dims)) for name in node.input[1:3] if name in view.initializers]
    if not sizes:
        return 0
    if node.op_type == "Conv":
        return sizes[0] * _places(view, node.output[0], slice(2, None))
    if node.op_type == "ConvTranspose":
        return sizes[0] * _places(view, node.input[0], slice(2, None))
    if node.op_type in ("LSTM", "GRU", "RNN"):
        return sum(sizes) * _places(view, node.input[0], slice(0, 1))
    return sizes[0] * _places(view, node.input[0], slice(1, -1))


def _places(view: View, name: str, axes: slice) -> int:
    shape = view.types.get(name, (0, None))[1]
    if shape is None:
        return _FREE
    return prod(size if isinstance(size, int) and size > 0 else _FREE for size in shape[axes])
