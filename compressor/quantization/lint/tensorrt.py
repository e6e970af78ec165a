"""Rules of TensorRT: what its ONNX parser takes, and where pairs keep its fusions whole.

They say that a graph is legal and can be fused; whether a layer runs in int8 on a given GPU only the built
engine tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.layers import thin_reason
from compressor.quantization.lint.base import Hit, Rule
from compressor.quantization.lint.edits import remove_pairs
from compressor.quantization.lint.graph import (
    INTEGER_OPERATORS,
    LAYERS,
    Parameters,
    QuantizedGraph,
    is_dequantizer,
    is_quantizer,
)
from compressor.quantization.scheme import SCHEMES

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["RULES"]

_QDQ = ("QuantizeLinear", "DequantizeLinear")
_PARSER = "TensorRT's ONNX parser (onnxOpImporters.cpp, QuantDequantLinearHelper)"
_GUIDE = "TensorRT developer guide, explicit quantization: Q/DQ placement"
_MODELOPT = "NVIDIA Model Optimizer, onnx.quantization"
_UINT8, _INT8, _INT32 = 2, 3, 6
_FOUR_BITS = (21, 22)
_NEVER_NEGATIVE = ("Relu", "Sigmoid", "Softmax")
_NEVER = ("Softmax", "Sigmoid", "LayerNormalization", "InstanceNormalization")


def _on_output(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("QuantizeLinear", "DequantizeLinear"):
        if node.output[0] in graph.outputs:
            yield Hit(node, f"it makes the model's output '{node.output[0]}'")


def _free_outputs(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    for hit in hits:
        assert hit.node is not None
        behind = graph.quantizer_behind(hit.node) if is_dequantizer(hit.node) else None
        if behind is not None and remove_pairs(graph, behind):
            yield hit


def _asymmetric(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes(*_QDQ):
        zero = graph.parameters(node).zero
        if zero is not None and zero.any():
            found = np.unique(zero)
            yield Hit(node, f"zero point {found[0]:g}" + (f" to {found[-1]:g}" if len(found) > 1 else ""))


def _unsigned(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes(*_QDQ):
        given = graph.parameters(node)
        if given.kind == _UINT8:
            missing = is_quantizer(node) and not given.explicit
            yield Hit(node, "no zero point, which means uint8 in ONNX" if missing else "its codes are uint8")


def _to_symmetric(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    """Rewrite whole pairs: int8, zero point 0, a scale that covers the old range."""
    done: dict[str, bool] = {}
    for hit in hits:
        assert hit.node is not None
        node = hit.node
        codes = node.output[0] if is_quantizer(node) else node.input[0]
        if codes not in done:
            done[codes] = _symmetric_pair(graph, codes)
        if done[codes]:
            yield hit


def _symmetric_pair(graph: QuantizedGraph, codes: str) -> bool:
    maker, readers = graph.producers.get(codes), list(graph.readers(codes))
    if codes in graph.outputs or codes in graph.captured or not all(map(is_dequantizer, readers)):
        return False
    if (maker is None and graph.constant(codes) is None) or (maker is not None and not is_quantizer(maker)):
        return False
    nodes = [*([] if maker is None else [maker]), *readers]
    every = [graph.parameters(node) for node in nodes]
    first = every[0]
    if first.scale is None or first.zero is None or first.kind not in (_UINT8, _INT8) or any(
        given != first for given in every
    ):  # fmt: skip
        return False
    scale, zeros = _symmetric_scale(first), np.zeros(first.scale.shape, np.int8)
    names = graph.add(f"{codes}_scale", scale), graph.add(f"{codes}_zero_point", zeros)
    if maker is None:
        graph.set_input(readers[0], 0, _recoded(graph, readers, first, scale))
        for reader in readers[1:]:
            graph.set_input(reader, 0, readers[0].input[0])
    elif _hides_relu(graph, maker, first):
        graph.set_input(maker, 0, graph.insert(maker, "Relu", [maker.input[0]], f"{maker.input[0]}_relu"))
    for node in nodes:
        graph.set_input(node, 1, names[0])
        graph.set_input(node, 2, names[1])
    return True


def _hides_relu(graph: QuantizedGraph, quantizer: NodeProto, given: Parameters) -> bool:
    """Whether codes have no room for the negative numbers that may come: many tools drop a Relu there."""
    maker = graph.producers.get(quantizer.input[0])
    least = 0 if given.kind == _UINT8 else -128
    return bool(np.all(given.zero == least)) and (maker is None or maker.op_type not in _NEVER_NEGATIVE)


def _symmetric_scale(given: Parameters) -> NDArray[np.float32]:
    """The least scale whose -127 to 127 covers the old range; the old scale if that is symmetric."""
    assert given.scale is not None
    assert given.zero is not None
    if given.kind == _INT8 and not given.zero.any():
        return given.scale.astype(np.float32)
    low, high = (0, 255) if given.kind == _UINT8 else (-128, 127)
    if given.kind == _UINT8 and (given.zero == 128).all():
        return given.scale.astype(np.float32)
    reach = np.maximum(given.zero - low, high - given.zero)
    return np.asarray(given.scale * reach / 127, np.float32)


def _recoded(
    graph: QuantizedGraph,
    readers: Sequence[NodeProto],
    given: Parameters,
    scale: NDArray[np.float32],
) -> str:
    """Constant codes in the new scale."""
    name = readers[0].input[0]
    codes = graph.constant(name)
    assert codes is not None
    assert given.scale is not None
    assert given.zero is not None
    shape = [1] * codes.ndim
    if given.axis is not None:
        shape[given.axis] = -1
    old, zero, new = (
        part.reshape(shape if part.size > 1 else ()) for part in (given.scale, given.zero, scale)
    )
    real = (codes.astype(np.float64) - zero) * old
    return graph.add(f"{name}_symmetric", np.clip(np.rint(real / new), -128, 127).astype(np.int8))


def _bias_codes(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("DequantizeLinear"):
        if graph.kind(node.input[0]) == _INT32:
            yield Hit(node, f"'{node.input[0]}' is int32")


def _float_bias(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    for hit in hits:
        assert hit.node is not None
        node = hit.node
        value, name = graph.real(node.output[0]), node.output[0]
        if value is None or name in graph.outputs | graph.captured:
            continue
        graph.redirect(name, graph.add(name, value))
        graph.remove(node)
        yield hit


def _integer_operators(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes():
        if node.op_type in INTEGER_OPERATORS or node.op_type.startswith("QLinear"):
            yield Hit(node, f"{node.op_type} is not an operator of TensorRT")


def _odd_nibbles(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("DequantizeLinear"):
        shape = graph.shape(node.input[0])
        if graph.kind(node.input[0]) in _FOUR_BITS and shape and all(isinstance(size, int) for size in shape):
            count = int(np.prod([int(size) for size in shape if isinstance(size, int)]))
            if count % 2:
                yield Hit(node, f"'{node.input[0]}' has {count} numbers of 4 bits")


def _half_underflow(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes(*_QDQ):
        scale = graph.parameters(node).scale
        if graph.parameters(node).kind == _INT32:
            continue
        if scale is not None and ((scale > 0) & (scale.astype(np.float16) == 0)).any():
            yield Hit(node, f"its least scale, {scale[scale > 0].min():g}, is 0 in fp16")


def _before_fusion(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("QuantizeLinear"):
        maker = graph.producers.get(node.input[0])
        if maker is None or maker.op_type not in LAYERS or len(graph.readers(node.input[0])) > 1:
            continue
        for reader in _real_readers(graph, node):
            if reader.op_type in ("Relu", "Clip", "BatchNormalization"):
                yield Hit(
                    node, f"it stands between {maker.op_type} and {reader.op_type}, which are fused otherwise"
                )
                break


def _real_readers(graph: QuantizedGraph, quantizer: NodeProto) -> Iterator[NodeProto]:
    for node in graph.readers(quantizer.output[0]):
        if is_dequantizer(node):
            yield from graph.readers(node.output[0])


def _take_off(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    for hit in hits:
        assert hit.node is not None
        if remove_pairs(graph, hit.node):
            yield hit


def _sums(
    graph: QuantizedGraph,
) -> Iterator[tuple[NodeProto, list[NodeProto | None], list[NodeProto | None]]]:
    """Residual sums: Add of two activations; for each, its DequantizeLinear, and the layer right in front."""
    for node in graph.nodes("Add"):
        if len(node.input) != 2 or any(graph.is_constant(name) for name in node.input):
            continue
        pairs = [graph.dequantizer(name) for name in node.input]
        yield node, pairs, [_layer_before(graph, name) for name in node.input]


def _layer_before(graph: QuantizedGraph, name: str) -> NodeProto | None:
    """The weighted layer that makes a tensor, also through a pair and a batch normalization."""
    for _ in range(4):
        maker = graph.producers.get(name)
        if maker is None:
            return None
        if maker.op_type in LAYERS:
            quantized = graph.weight_dequantizer(maker) is not None
            return maker if quantized else None
        if maker.op_type not in (*_QDQ, "BatchNormalization"):
            return None
        name = maker.input[0]
    return None


def _float_residual(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, pairs, layers in _sums(graph):
        if not any(pairs) and any(layers):
            yield Hit(node, "its residual input is float, which makes the layer in front write float")


def _split_residual(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, pairs, layers in _sums(graph):
        if not all(pairs):
            continue
        for pair, layer in zip(pairs, layers, strict=True):
            quantizer = None if pair is None else graph.quantizer_behind(pair)
            alone = quantizer is not None and list(_real_readers(graph, quantizer)) == [node]
            if layer is not None and quantizer is not None and alone:
                yield Hit(
                    quantizer,
                    f"it stands between {layer.op_type} and the sum '{node.name or node.output[0]}'",
                )
                break


def _concat(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("Concat"):
        ends = [pair for name in node.input if (pair := graph.dequantizer(name)) is not None]
        ends += [reader for reader in graph.readers(node.output[0]) if is_quantizer(reader)]
        given = [graph.parameters(end) for end in ends]
        scales = {float(one.scale.reshape(-1)[0]) for one in given if one.scale is not None}
        if len(scales) > 1:
            yield Hit(
                node, f"its quantized inputs and output have {len(scales)} scales: each is rounded again"
            )


def _never_quantized(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("QuantizeLinear"):
        maker = graph.producers.get(node.input[0])
        if maker is not None and maker.op_type in _NEVER and not _silu(graph, maker):
            yield Hit(node, f"it rounds the output of {maker.op_type} '{maker.name or maker.output[0]}'")


def _silu(graph: QuantizedGraph, node: NodeProto) -> bool:
    return node.op_type == "Sigmoid" and any(
        reader.op_type == "Mul" and node.input[0] in reader.input
        for reader in _all_readers(graph, node.output[0])
    )


def _all_readers(graph: QuantizedGraph, name: str) -> Iterator[NodeProto]:
    for reader in graph.readers(name):
        if is_quantizer(reader):
            yield from _real_readers(graph, reader)
        yield reader


def _inside_silu(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("QuantizeLinear"):
        maker = graph.producers.get(node.input[0])
        if maker is not None and _silu(graph, maker):
            yield Hit(node, f"it splits x · sigmoid(x) behind '{maker.input[0]}'")


def _thin(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, data, weight in graph.weighted():
        reason = _too_thin(graph, node)
        if data is not None and weight is not None and reason:
            yield Hit(node, reason)


def _too_thin(graph: QuantizedGraph, node: NodeProto) -> str | None:
    """Why int8 does not pay for a layer of this size; None where it does, or the size is not known."""
    sizes, thin = graph.shape(node.input[1]), SCHEMES["tensorrt"].thin
    known = [size for size in sizes or () if isinstance(size, int)]
    if thin is None or sizes is None or len(known) < max(2, len(sizes)):
        return None
    return thin_reason(node, known, thin)


def _left_in_float(graph: QuantizedGraph) -> Iterator[Hit]:
    if not any(map(is_dequantizer, graph.nodes())):
        return
    for node, data, weight in graph.weighted():
        constant = graph.is_constant(node.input[1])  # products of activations belong to attention
        if data is None and weight is None and constant and not _too_thin(graph, node):
            yield Hit(node, "neither its input nor its weight is quantized")


RULES = (
    Rule(
        "TRT001", "pair on a model output", {"tensorrt": "warning"},
        "NVIDIA/TensorRT#2604 and #1864",
        "end the model in float", _on_output, _free_outputs,
        "an output moves by half a step of its scale, or by what the pair clipped",
    ),
    Rule(
        "TRT002", "zero point is not 0", {"tensorrt": "error"}, f"{_PARSER}; NVIDIA/TensorRT#4698, #2774",
        "quantize symmetrically", _asymmetric, _to_symmetric,
        "steps grow up to twofold; a Relu that lay hidden in the range of the codes is written out",
    ),
    Rule(
        "TRT003", "uint8 codes", {"tensorrt": "error"}, _PARSER,
        "quantize to int8, with a zero point of that type", _unsigned, _to_symmetric,
        "steps grow up to twofold; a Relu that lay hidden in the range of the codes is written out",
    ),
    Rule(
        "TRT004", "quantized bias", {"tensorrt": "error"},
        "NVIDIA/TensorRT#4542; Model Optimizer: QuantizeBias=False",
        "keep biases in float", _bias_codes, _float_bias, "nothing: the same numbers are stored as float",
    ),
    Rule(
        "TRT005", "operator that TensorRT lacks", {"tensorrt": "error"}, "onnx-tensorrt, docs/operators.md",
        "quantize again in Q/DQ form (QuantFormat.QDQ), statically", _integer_operators,
    ),
    Rule(
        "TRT006", "odd number of 4-bit weights", {"tensorrt": "error"}, _PARSER,
        "pad the weight to an even number", _odd_nibbles,
    ),
    Rule(
        "TRT007", "scale vanishes in fp16", {"tensorrt": "warning"}, f"{_PARSER}: scales must be above 0",
        "raise the scale above 6e-8, or build without fp16", _half_underflow,
    ),
    Rule(
        "TRT008", "pair in front of what would be fused", {"tensorrt": "warning"}, _GUIDE,
        "put the pair behind the activation", _before_fusion, _take_off, "one rounding and clipping less",
    ),
    Rule(
        "TRT009", "residual input without a pair", {"tensorrt": "warning"}, _GUIDE,
        "put a pair on the sum's other input (it needs a calibrated scale)", _float_residual,
    ),
    Rule(
        "TRT010", "pair between a layer and its sum", {"tensorrt": "warning"}, _GUIDE,
        "leave the layer's side of the sum without a pair; only the residual side has one", _split_residual,
        _take_off, "one rounding and clipping less",
    ),
    Rule(
        "TRT011", "Concat with several scales", {"tensorrt": "warning"},
        f"{_MODELOPT}: one scale for all of a Concat",
        "give all quantized inputs and the output one scale", _concat,
    ),
    Rule(
        "TRT012", "output that should stay float", {"tensorrt": "warning"},
        f"{_MODELOPT}: never quantized by default; microsoft/onnxruntime#14626",
        "leave Softmax, Sigmoid and normalizations in float", _never_quantized,
    ),
    Rule(
        "TRT013", "pair inside SiLU", {"tensorrt": "warning"}, f"{_MODELOPT}: x · sigmoid(x) is one kernel",
        "take the pair off; quantize behind the product", _inside_silu, _take_off,
        "one rounding and clipping less",
    ),
    Rule(
        "TRT014", "too thin for int8 to pay", {"tensorrt": "info"},
        f"{_MODELOPT}: such Conv, Gemm and MatMul are left out", "leave it in float", _thin,
    ),
    Rule(
        "TRT015", "layer left in float", {"tensorrt": "info"},
        "what is left in float takes most of the time of a model that is else in int8",
        "quantize it, unless it was left out for its accuracy", _left_in_float,
    ),
)  # fmt: skip
