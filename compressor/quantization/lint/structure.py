"""Rules about where pairs stand, which hold for every runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from compressor.quantization.lint.base import Hit, Rule, everywhere
from compressor.quantization.lint.graph import (
    LAYERS,
    MOVERS,
    QuantizedGraph,
    is_dequantizer,
    is_quantizer,
)

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["RULES"]

_SHAPE_INPUTS = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "Slice": (1, 2, 3, 4), "Gather": (1,), "Pad": (1,),
    "Range": (0, 1, 2), "ConstantOfShape": (0,), "TopK": (1,), "OneHot": (0, 1), "Resize": (3,),
    "Unsqueeze": (1,), "Squeeze": (1,), "GatherND": (1,), "GatherElements": (1,), "ScatterND": (1,),
}  # fmt: skip
_SHAPE_ARITHMETIC = frozenset(
    {"Cast", "Floor", "Ceil", "Round", "Mul", "Div", "Add", "Sub", "Concat", "Gather", "Unsqueeze",
     "Squeeze", "Slice", "Reshape", "Identity"}
)  # fmt: skip
_UNWEIGHTED = frozenset({"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool"})
_EXACT = "nothing: the same codes come out"


def _float_weights(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("QuantizeLinear"):
        if graph.is_constant(node.input[0]):
            size = _size(graph, node.input[0])
            yield Hit(
                node, f"weight '{node.input[0]}' ({size:,} numbers) is stored as float and rounded on load"
            )


def _size(graph: QuantizedGraph, name: str) -> int:
    value = graph.constant(name)
    return 0 if value is None else value.size


def _store_codes(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    for hit in hits:
        assert hit.node is not None
        codes, name = graph.rounded(hit.node), hit.node.output[0]
        if not graph.is_float(hit.node.input[0]):
            continue  # in half precision the quotient is rounded before it becomes a code
        if codes is None or name in graph.outputs or name in graph.captured:
            continue
        graph.redirect(name, graph.add(f"{hit.node.input[0]}_quantized", codes))
        graph.remove(hit.node)
        yield hit


def _chains(graph: QuantizedGraph) -> Iterator[tuple[NodeProto, NodeProto, bool]]:
    """(DequantizeLinear, the QuantizeLinear right behind, whether their parameters are the same)."""
    for node in graph.nodes("QuantizeLinear"):
        before = graph.dequantizer(node.input[0])
        if before is not None and not graph.on_constant(before):
            yield before, node, graph.parameters(before) == graph.parameters(node)


def _redundant(graph: QuantizedGraph) -> Iterator[Hit]:
    for before, node, same in _chains(graph):
        if same:
            yield Hit(node, f"it undoes the DequantizeLinear before it ('{before.name or before.output[0]}')")


def _cancel(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    for hit in hits:
        assert hit.node is not None
        before, name = graph.dequantizer(hit.node.input[0]), hit.node.output[0]
        if before is None or name in graph.outputs or name in graph.captured:
            continue
        graph.redirect(name, before.input[0])
        graph.remove(hit.node)
        yield hit


def _requantized(graph: QuantizedGraph) -> Iterator[Hit]:
    for before, node, same in _chains(graph):
        if not same and graph.parameters(node).scale is not None:
            yield Hit(node, f"codes of '{before.input[0]}' are rounded a second time, with other parameters")


def _shape_arithmetic(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("DequantizeLinear"):
        reader = _shape_reader(graph, node.output[0], 8)
        if reader is not None:
            yield Hit(node, f"its values end as shape or index of '{reader.name or reader.output[0]}'")


def _shape_reader(graph: QuantizedGraph, name: str, depth: int) -> NodeProto | None:
    for reader in graph.readers(name):
        places = [place for place, item in enumerate(reader.input) if item == name]
        if set(places) & set(_SHAPE_INPUTS.get(reader.op_type, ())):
            return reader
        if depth and reader.op_type in _SHAPE_ARITHMETIC:
            found = _shape_reader(graph, reader.output[0], depth - 1)
            if found is not None:
                return found
    return None


def _one_sided(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, data, weight in graph.weighted():
        if graph.is_constant(node.input[0]) or (data is None) == (weight is None):
            continue
        if data is None:
            yield Hit(node, "its weight is quantized, its input is not")
        elif graph.parameters(data).axis is None:
            yield Hit(node, "its input is quantized, its weight is not")


def _norm_behind(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("BatchNormalization"):
        layer = _unquantized_maker(graph, node.input[0])
        if layer is not None and layer.op_type in LAYERS and graph.weight_dequantizer(layer) is not None:
            name = layer.name or layer.output[0]
            yield Hit(node, f"the quantized {layer.op_type} '{name}' cannot take it up any more")


def _unquantized_maker(graph: QuantizedGraph, name: str) -> NodeProto | None:
    """What made a tensor, seen through a pair."""
    maker = graph.producers.get(name)
    behind = graph.quantizer_behind(maker) if maker is not None and is_dequantizer(maker) else None
    return maker if behind is None else graph.producers.get(behind.input[0])


def _changed_scale(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes(*MOVERS):
        before = graph.dequantizer(node.input[0]) if node.input else None
        if before is None or graph.on_constant(before):
            continue
        for reader in graph.readers(node.output[0]):
            if is_quantizer(reader) and graph.parameters(before) != graph.parameters(reader):
                yield Hit(node, "it only moves values, and its output has another scale than its input")
                break


def _float_output(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes(*_UNWEIGHTED):
        activations = [name for name in node.input if not graph.is_constant(name)]
        quantized = activations and all(graph.dequantizer(name) for name in node.input if name)
        if quantized and not graph.read_by_quantizers_only(_behind_activation(graph, node)):
            yield Hit(node, "its inputs are quantized, its output is not")


def _behind_activation(graph: QuantizedGraph, node: NodeProto) -> str:
    name = str(node.output[0])
    reader = graph.only_reader(name)
    return str(reader.output[0]) if reader is not None and reader.op_type in ("Relu", "Clip") else name


def _left_in_float(graph: QuantizedGraph) -> Iterator[Hit]:
    if not any(map(is_dequantizer, graph.nodes())):
        return
    for node, data, weight in graph.weighted():
        if data is None and weight is None:
            yield Hit(node, "neither its input nor its weight is quantized")


_GUIDE = "TensorRT developer guide, explicit quantization: Q/DQ placement"

RULES = (
    Rule(
        "QDQ020", "weights stored as float", everywhere("info"),
        "the file is as large as the float model's; TensorRT, ONNX Runtime and OpenVINO all take integer "
        "weights",
        "store the rounded codes", _float_weights, _store_codes, _EXACT,
    ),
    Rule(
        "QDQ021", "pair that undoes the one before", everywhere("info"),
        "onnxruntime's DoubleQDQPairsRemover; TensorRT cancels such pairs when it builds",
        "read the first pair's codes", _redundant, _cancel, _EXACT,
    ),
    Rule(
        "QDQ022", "rounded twice", everywhere("warning"),
        f"{_GUIDE}; seen in onnxruntime 1.31: the two pairs become one and results change",
        "keep one of the two pairs, or give both the same scale", _requantized,
    ),
    Rule(
        "QDQ023", "shape arithmetic in 8 bits", everywhere("error"),
        "ONNX standard: shapes and indices are exact integers; openvinotoolkit/nncf#2105 (graphs that do "
        "not compile)",
        "leave tensors that become shapes or indices unquantized", _shape_arithmetic,
    ),
    Rule(
        "QDQ024", "layer with one quantized operand", everywhere("warning"),
        f"{_GUIDE} (quantize all inputs of weighted operations); seen in onnxruntime 1.31: the layer runs "
        "in float",
        "quantize the other operand too, or leave the layer in float", _one_sided,
    ),
    Rule(
        "QDQ025", "batch normalization behind a quantized layer", everywhere("warning"),
        "seen in onnxruntime 1.31: layer and normalization run in float; TensorRT's guide: fold before "
        "quantizing",
        "fold the normalization into the float weights, then quantize", _norm_behind,
    ),
    Rule(
        "QDQ026", "scale changes where values only move", everywhere("warning"),
        f"{_GUIDE} (commuting operations); seen in onnxruntime 1.31: the operator runs in float",
        "give the pair behind the scale and zero point of the pair in front", _changed_scale,
    ),
    Rule(
        "QDQ027", "operator with quantized inputs and float output",
        {"tensorrt": "warning", "ort": "warning"},
        f"{_GUIDE} (non-weighted operations); seen in onnxruntime 1.31: it runs in float",
        "quantize the output too, or take the pairs off the inputs", _float_output,
    ),
    Rule(
        "QDQ028", "layer left in float", {"ort": "info", "openvino": "info"},
        "what is left in float takes most of the time of a model that is else in int8",
        "quantize it, unless it was left out for its accuracy", _left_in_float,
    ),
)  # fmt: skip
