"""Rules of ONNX Runtime and OpenVINO on CPUs: what becomes an integer kernel, and a right and fast one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.lint.base import Hit, Rule
from compressor.quantization.lint.graph import (
    ACTIVATIONS,
    LAYERS,
    Parameters,
    QuantizedGraph,
    is_dequantizer,
    is_quantizer,
)
from compressor.quantization.scheme import SCHEMES
from compressor.quantization.view import attribute

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["RULES"]

_UINT8, _INT8 = 2, 3
_SEEN = "seen in onnxruntime 1.31's optimized graphs"
_LIMIT = SCHEMES["ort-x86-avx2"].pair_limit
_HALF = (10, 16)  # FLOAT16, BFLOAT16
_NAMES = {_UINT8: "uint8", _INT8: "int8"}


def _no_pair_behind(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in _quantized_convs(graph):
        name = str(node.output[0])
        reader = graph.only_reader(name)
        absorbed = reader is not None and reader.op_type in ACTIVATIONS
        if not absorbed and not graph.read_by_quantizers_only(name):
            yield Hit(node, "its output is not quantized, so it runs in float between conversions")


def _quantized_convs(graph: QuantizedGraph) -> Iterator[NodeProto]:
    for node, data, weight in graph.weighted():
        if node.op_type == "Conv" and data is not None and weight is not None:
            yield node


def _kept_activation(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in _quantized_convs(graph):
        reader = graph.only_reader(node.output[0])
        if reader is None or reader.op_type not in ACTIVATIONS:
            continue
        behind = graph.readers(reader.output[0])
        if not graph.read_by_quantizers_only(reader.output[0]):
            yield Hit(node, f"the output of its {reader.op_type} is not quantized")
        elif not all(_within(graph.parameters(item), _bounds(graph, reader)) for item in behind):
            yield Hit(
                node,
                f"its {reader.op_type} stays, because the codes behind also stand for values outside of it",
            )


def _bounds(graph: QuantizedGraph, node: NodeProto) -> tuple[float, float]:
    if node.op_type == "Relu":
        return 0.0, np.inf
    given = [attribute(node, "min"), attribute(node, "max")]
    for place, name in enumerate(node.input[1:3]):
        value = graph.constant(name) if name else None
        given[place] = None if value is None else float(value.reshape(-1)[0])
    low, high = given
    return -np.inf if low is None else float(low), np.inf if high is None else float(high)


def _within(given: Parameters, bounds: tuple[float, float]) -> bool:
    """Whether all codes stand for values inside the bounds, half a step aside."""
    if given.axis is not None:
        return False
    if given.scale is None or given.zero is None or given.kind not in (_UINT8, _INT8):
        return True
    least, most = (0, 255) if given.kind == _UINT8 else (-128, 127)
    scale, zero = float(given.scale.reshape(-1)[0]), float(given.zero.reshape(-1)[0])
    low, high = (least - zero) * scale, (most - zero) * scale
    return low >= bounds[0] - scale / 2 and high <= bounds[1] + scale / 2


def _activation_codes(graph: QuantizedGraph) -> Iterator[tuple[NodeProto, NodeProto | None, int]]:
    """Layers with an integer kernel, the DequantizeLinear of their input, and the type of its codes."""
    for node, data, weight in graph.weighted():
        if data is not None and weight is not None and node.op_type in LAYERS:
            yield node, data, graph.kind(data.input[0])
    for node in graph.nodes("QLinearConv", "QLinearMatMul"):
        yield node, None, graph.kind(node.input[0])


def _mixed_types(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in _quantized_convs(graph):
        data = graph.dequantizer(node.input[0])
        behind = graph.quantizer_behind(data) if data is not None else None
        writers = [item for item in graph.readers(_written(graph, node)) if is_quantizer(item)]
        if behind is None or not writers:
            continue
        before, after = _type_on_x86(graph, behind), _type_on_x86(graph, writers[0])
        if {before, after} == {_INT8, _UINT8}:
            codes = f"{_NAMES[before]} codes and writes {_NAMES[after]} ones"
            yield Hit(node, f"it reads {codes} once the runtime has rewritten pairs to uint8")


def _written(graph: QuantizedGraph, node: NodeProto) -> str:
    """What a layer writes, behind the activation that its kernel takes up."""
    name = str(node.output[0])
    reader = graph.only_reader(name)
    return str(reader.output[0]) if reader is not None and reader.op_type in ACTIVATIONS else name


def _type_on_x86(graph: QuantizedGraph, quantizer: NodeProto) -> int:
    """The code type after onnxruntime's QDQS8ToU8 pass, which rewrites only pairs with a single reader."""
    given = graph.parameters(quantizer)
    if given.kind != _INT8:
        return given.kind
    twins = [
        item for item in graph.readers(quantizer.input[0])
        if is_quantizer(item) and graph.parameters(item) == given
    ]  # fmt: skip
    count = sum(
        len(graph.readers(reader.output[0])) for item in twins for reader in graph.readers(item.output[0])
    )
    return _UINT8 if count == 1 else _INT8


def _signed(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, data, kind in _activation_codes(graph):
        if data is not None and kind == _INT8:
            yield Hit(node, "its activations are int8; the fast kernels of x86 take uint8")


def _signed_operators(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, data, kind in _activation_codes(graph):
        if data is None and kind == _INT8:
            yield Hit(node, f"{node.op_type} of int8 activations runs on a slow path")


def _to_unsigned(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    """Shift every int8 activation in the file by 128, if all of its codes are only read by dequantizers."""
    pairs = [node for node in graph.nodes("QuantizeLinear") if graph.parameters(node).kind == _INT8]
    pairs = [node for node in pairs if not graph.on_constant(node)]
    shifted = {node.output[0] for node in pairs if _shift(graph, node)}
    for hit in hits:
        assert hit.node is not None
        data = graph.dequantizer(hit.node.input[0])
        if data is not None and data.input[0] in shifted:
            yield hit


def _shift(graph: QuantizedGraph, quantizer: NodeProto) -> bool:
    codes, given = quantizer.output[0], graph.parameters(quantizer)
    readers = list(graph.readers(codes))
    free = codes not in graph.outputs | graph.captured and all(map(is_dequantizer, readers))
    if not free or given.zero is None or any(graph.parameters(reader) != given for reader in readers):
        return False
    name = graph.add(f"{codes}_zero_point", np.asarray(given.zero + 128, np.uint8))
    for node in (quantizer, *readers):
        graph.set_input(node, 2, name)
    kept = [item for item in quantizer.attribute if item.name != "output_dtype"]
    del quantizer.attribute[:]
    quantizer.attribute.extend(kept)
    return True


def _wide(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, data, kind in _activation_codes(graph):
        if data is not None and kind not in (0, _UINT8, _INT8):
            from onnx import TensorProto

            name = TensorProto.DataType.Name(kind).lower()
            yield Hit(node, f"its activations are {name}: there is no such kernel, it runs in float")


def _half(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, data, _ in _activation_codes(graph):
        if data is not None and graph.kind(data.input[1]) in _HALF:
            yield Hit(node, "its pairs are in half precision, so casts stand between them and the layer")


def _dynamic_conv(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("ConvInteger"):
        yield Hit(node, "ConvInteger has no fast kernel; the model runs several times slower than in float")


RULES = (
    Rule(
        "ORT010", "dynamic quantization of convolutions", {"ort": "warning"},
        "microsoft/onnxruntime#12854, #16009; measured 8.4 times slower than float",
        "quantize statically, or leave convolutions in float", _dynamic_conv,
    ),
    Rule(
        "CPU001", "codes of more than 8 bits", {"ort": "warning", "openvino": "warning"}, _SEEN,
        "quantize activations to uint8 or int8", _wide,
    ),
    Rule(
        "ORT002", "Conv without a pair behind it", {"ort": "warning"},
        f"{_SEEN}: a Conv runs in integers only if its output is quantized",
        "quantize its output too (it needs a calibrated scale), or leave the Conv in float", _no_pair_behind,
    ),
    Rule(
        "ORT003", "Relu or Clip keeps a Conv in float", {"ort": "warning"},
        f"{_SEEN}: it vanishes only into a range inside its own, as with a zero point at the least code",
        "quantize behind it with the range from 0 on (asymmetric)", _kept_activation,
    ),
    Rule(
        "ORT007", "Conv between codes of two types", {"ort": "warning", "ort-arm": None},
        f"{_SEEN}: the Conv runs in float; its QDQS8ToU8 pass rewrites int8 pairs with one reader, not "
        "those with several",
        "use uint8 activations throughout", _mixed_types,
    ),
    Rule(
        "ORT012", "pairs in half precision", {"ort": "warning"}, f"{_SEEN}: the layers run in float",
        "quantize the float32 model for CPUs", _half,
    ),
    Rule(
        "ORT004", "int8 activations", {"ort": "warning", "ort-arm": None},
        "microsoft/onnxruntime#6732; measured on AVX2: 1.0 times float, uint8 1.4 to 1.9 times",
        "shift codes and zero points by 128", _signed, _to_unsigned,
        "nothing: the same numbers have other codes",
    ),
    Rule(
        "ORT005", "int8 activations in operator form", {"ort": "warning", "ort-arm": None},
        "onnxruntime's quantization guide; measured on AVX2: 4 times slower than float",
        "quantize in Q/DQ form with uint8 activations", _signed_operators,
    ),
)  # fmt: skip
