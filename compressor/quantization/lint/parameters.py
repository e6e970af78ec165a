"""Rules about scales and zero points, which hold for every runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.lint.base import Hit, Rule, everywhere
from compressor.quantization.lint.graph import Parameters, QuantizedGraph
from compressor.quantization.view import attribute

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["RULES"]

_QDQ = ("QuantizeLinear", "DequantizeLinear")
_LEAST_NORMAL = float(np.finfo(np.float32).tiny)
_STANDARD = "ONNX standard, QuantizeLinear and DequantizeLinear"
_HALF = (10, 16)  # FLOAT16, BFLOAT16
_NEW_CODES = (4, 5, 17, 18, 19, 20, 21, 22)  # 16 and 4 bit integers, float8


def _all(graph: QuantizedGraph) -> Iterator[tuple[NodeProto, Parameters]]:
    for node in graph.nodes(*_QDQ):
        yield node, graph.parameters(node)


def _bad_scale(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, given in _all(graph):
        if given.scale is None:
            continue
        if not given.scale.size:
            yield Hit(node, "its scale is empty")
        elif not np.isfinite(given.scale).all():
            yield Hit(
                node, f"its scale '{node.input[1]}' holds {'NaN' if np.isnan(given.scale).any() else 'Inf'}"
            )
        elif (given.scale <= 0).any():
            yield Hit(
                node,
                f"its scale '{node.input[1]}' is {given.scale.min():g} in {(given.scale <= 0).sum()} places",
            )


def _denormal(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, given in _all(graph):
        if given.scale is not None and ((given.scale > 0) & (given.scale < _LEAST_NORMAL)).any():
            least = given.scale[given.scale > 0].min()
            yield Hit(node, f"its least scale, {least:g}, is no normal float32: 1 / scale overflows")


def _misshapen(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, given in _all(graph):
        reason = _shape_reason(graph, node, given)
        if reason:
            yield Hit(node, reason)


def _shape_reason(graph: QuantizedGraph, node: NodeProto, given: Parameters) -> str | None:
    if given.scale is None or int(attribute(node, "block_size", 0)):
        return None
    if given.explicit and given.zero is not None and given.zero.size != given.scale.size:
        return f"{given.scale.size} scales and {given.zero.size} zero points"
    if given.scale.ndim > 1 and given.scale.size > 1:
        return f"its scale has {given.scale.ndim} dimensions; one scale or one row of scales is allowed"
    shape = graph.shape(node.input[0])
    if given.axis is None or shape is None:
        return None
    if not 0 <= given.axis < len(shape):
        return f"axis {given.axis} does not exist in a tensor of {len(shape)} dimensions"
    size = shape[given.axis]
    if isinstance(size, int) and size != given.scale.size:
        return f"{given.scale.size} scales along axis {given.axis}, which has size {size}"
    return None


def _computed(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, given in _all(graph):
        if given.scale is None or given.zero is None:
            what = "scale" if given.scale is None else "zero point"
            yield Hit(
                node, f"its {what} '{node.input[1 if given.scale is None else 2]}' is computed at run time"
            )


def _old_opset(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, given in _all(graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        needed, why = _needed_opset(graph, node, given)
        if needed > graph.opset:
            yield Hit(node, f"{why} need opset {needed}, the file has {graph.opset}")


def _needed_opset(graph: QuantizedGraph, node: NodeProto, given: Parameters) -> tuple[int, str]:
    if given.kind in _NEW_CODES or int(attribute(node, "block_size", 0)):
        return (19 if given.kind in (17, 18, 19, 20) else 21), "codes other than int8 and uint8, and blocks,"
    if graph.kind(node.input[1]) in _HALF:
        return 19, "scales of half precision"
    if given.axis is not None:
        return 13, "scales per channel"
    return 10, "QuantizeLinear and DequantizeLinear"


def _contradiction(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("QuantizeLinear"):
        told = int(attribute(node, "output_dtype", 0))
        known = graph.kind(node.input[2]) if len(node.input) > 2 and node.input[2] else 0
        if told and known and told != known:
            yield Hit(node, f"output_dtype is {told}, the zero point's type {known}")


def _drop_output_dtype(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    for hit in hits:
        assert hit.node is not None
        kept = [item for item in hit.node.attribute if item.name != "output_dtype"]
        del hit.node.attribute[:]
        hit.node.attribute.extend(kept)
        yield hit


def _other_mapping(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("DequantizeLinear"):
        behind = graph.quantizer_behind(node)
        if behind is None:
            continue
        there, here = graph.parameters(behind), graph.parameters(node)
        known = all(part is not None for part in (there.scale, there.zero, here.scale, here.zero))
        if known and there != here:
            yield Hit(node, "its scale or zero point is not that of the QuantizeLinear that made its codes")


def _activation_per_channel(graph: QuantizedGraph) -> Iterator[Hit]:
    for node in graph.nodes("QuantizeLinear"):
        axis = graph.parameters(node).axis
        if axis is not None and not graph.on_constant(node):
            yield Hit(node, f"activation '{node.input[0]}' has a scale for each place of axis {axis}")


def _wrong_axis(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, _, weight in graph.weighted():
        if weight is None or not graph.on_constant(weight):
            continue
        axis, right = graph.parameters(weight).axis, _output_axis(graph, node)
        if graph.dequantizer(node.input[1]) is None and axis is not None:
            axis = 1 - axis if len(graph.shape(weight.input[0]) or ()) == 2 else None
        if axis is not None and right is not None and axis != right:
            yield Hit(node, f"its weight has scales along axis {axis}; output channels lie on axis {right}")


def _output_axis(graph: QuantizedGraph, node: NodeProto) -> int | None:
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1 if attribute(node, "group", 1) == 1 else None
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    rank = len(graph.shape(node.input[1]) or ())
    return rank - 1 if rank else None


RULES = (
    Rule(
        "QDQ001", "scale is not a positive finite number", everywhere("error"), _STANDARD,
        "calibrate that tensor again; a dead channel needs a small positive scale, not 0", _bad_scale,
    ),
    Rule(
        "QDQ002", "scale is denormal", everywhere("warning"),
        "IEEE 754; microsoft/onnxruntime#22020 (biases that overflow through tiny scales)",
        "raise the scale to a normal number; the channel is zero beside the others", _denormal,
    ),
    Rule(
        "QDQ003", "scale and zero point do not fit the tensor", everywhere("error"), _STANDARD,
        "give one scale, or one for each place of the axis, and as many zero points", _misshapen,
    ),
    Rule(
        "QDQ004", "scale computed at run time", {"tensorrt": "error", "openvino": "warning"},
        "TensorRT's ONNX parser: scales must fold to build-time constants",
        "quantize statically: scale and zero point as initializers", _computed,
    ),
    Rule(
        "QDQ005", "opset too old for its quantizers", everywhere("error"), _STANDARD,
        "export again with the opset named (older runtimes fall back to one scale per tensor)", _old_opset,
    ),
    Rule(
        "QDQ006", "output_dtype contradicts the zero point", everywhere("error"), _STANDARD,
        "drop output_dtype; the zero point's type counts", _contradiction, _drop_output_dtype,
        "nothing changes but the contradiction",
    ),
    Rule(
        "QDQ007", "read with another scale than written", everywhere("warning"), _STANDARD,
        "give both ends of the pair the same scale and zero point", _other_mapping,
    ),
    Rule(
        "QDQ008", "activation quantized per channel",
        {"tensorrt": "error", "ort": "error", "openvino": "warning"},
        "TensorRT's guide: activations per tensor; seen in onnxruntime 1.31: a Conv that writes one "
        "fails when "
        "it runs, one that reads one runs in float",
        "quantize activations with one scale; scales per channel are for weights", _activation_per_channel,
    ),
    Rule(
        "QDQ009", "weight scales on the wrong axis", everywhere("error"),
        "TensorRT's guide and parser; seen in onnxruntime 1.31: the fused kernel takes them for output "
        "channels and its results are wrong",
        "quantize the weight per output channel: axis 0 of Conv and Gemm with transB, 1 of ConvTranspose "
        "and Gemm, the last of MatMul", _wrong_axis,
    ),
)  # fmt: skip
