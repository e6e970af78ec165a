"""First convolutions with channels of zeros beside those of the image, for kernels that take them by fours.

onnxruntime's x86 kernel for integer convolutions (MLAS, `MlasConvSymPackWSize`) reads windows where they lie,
if input channels come in fours and output channels in eights, from 16 on; others are copied window by window
first. So an image of three channels gets a fourth, whose codes are the zero point and whose weights are 0:
the sums are the same. It pays for small windows only (measured up to 3 x 3; 7 x 7 lose), and before the first
layer, where channels still lie one after the other and a fourth costs nothing but its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.layers import widens
from compressor.quantization.lint.graph import QuantizedGraph, is_dequantizer, is_quantizer
from compressor.quantization.scheme import Scheme
from compressor.quantization.view import attribute

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["widen"]


def widen(model: ModelProto, scheme: Scheme) -> int:
    """Widen the first convolutions of a Q/DQ model of this scheme in place; gives how many there are."""
    graph = QuantizedGraph(model)
    found = [node for node in graph.nodes("Conv") if _can(graph, node, scheme)]
    for node in found:
        _widen(graph, node, scheme.channels)
    return len(found)


def _can(graph: QuantizedGraph, node: NodeProto, scheme: Scheme) -> bool:
    """Whether it reads the model's input and a constant, each through a pair that nothing else reads."""
    data, weight = (graph.producers.get(name) for name in node.input[:2])
    if data is None or weight is None or not (is_dequantizer(data) and is_dequantizer(weight)):
        return False
    maker, codes = graph.producers.get(data.input[0]), weight.input[0]
    if maker is None or not is_quantizer(maker) or len(data.input) < 3 or codes not in graph.initializers:
        return False
    chain = ((maker.input[0], maker), (data.input[0], data), (data.output[0], node), (codes, weight))
    alone = all(graph.only_reader(name) is reader for name, reader in (*chain, (weight.output[0], node)))
    first = maker.input[0] in {item.name for item in graph.graph.input}
    dims = graph.initializers[codes].dims
    return alone and first and widens(scheme, dims, attribute(node, "group", 1))


def _widen(graph: QuantizedGraph, node: NodeProto, multiple: int) -> None:
    data, weight = graph.producers[node.input[0]], graph.producers[node.input[1]]
    codes = graph.array(weight.input[0])
    assert codes is not None
    more = -codes.shape[1] % multiple
    graph.replace(weight.input[0], np.pad(codes, [(0, 0), (0, more), (0, 0), (0, 0)]))
    pads = np.array([0, 0, 0, 0, 0, more, 0, 0], np.int64)
    given = [data.input[0], graph.add(f"{data.input[0]}_pads", pads), data.input[2]]
    graph.set_input(data, 0, graph.insert(data, "Pad", given, f"{data.input[0]}_wide"))
    stale = {data.output[0], weight.output[0]}
    known = [item for item in graph.graph.value_info if item.name not in stale]
    del graph.graph.value_info[:]
    graph.graph.value_info.extend(known)
