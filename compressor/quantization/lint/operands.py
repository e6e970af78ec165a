"""Rules about weights and biases as integers on CPUs: sums that overflow, types without a fast kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.lint.base import Hit, Rule
from compressor.quantization.lint.graph import LAYERS, QuantizedGraph
from compressor.quantization.pairs import worst_pair
from compressor.quantization.scheme import SCHEMES
from compressor.quantization.view import attribute

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["RULES"]

_SEEN = "seen in onnxruntime 1.31's optimized graphs"
_LIMIT = SCHEMES["ort-x86-avx2"].pair_limit
_INT32 = 6
_INT32_HALF = 2**30
Biases = tuple["NodeProto", "NodeProto", NDArray[Any], NDArray[np.floating], NDArray[np.floating]]


def _weights(graph: QuantizedGraph) -> Iterator[tuple[NodeProto, str, NDArray[Any]]]:
    """Layers that multiply integers, with the operator that they stand for and their constant codes."""
    for node, data, weight in graph.weighted():
        if data is not None and weight is not None and node.op_type != "ConvTranspose":
            codes = graph.codes(weight)
            if codes is not None:
                turned = graph.dequantizer(node.input[1]) is None
                yield node, node.op_type, codes.T if turned and codes.ndim == 2 else codes
    for node in graph.nodes("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"):
        place = 3 if node.op_type.startswith("QLinear") else 1
        codes = graph.constant(node.input[place])
        if codes is not None:
            yield node, "Conv" if "Conv" in node.op_type else "MatMul", codes


def _rows(
    node: NodeProto, operator: str, codes: NDArray[Any], *, restart: bool = False
) -> NDArray[np.float32] | None:
    """Codes as [output channels, k] in the kernel's order of summation, None for a depthwise Conv.

    `restart`: a Conv without groups begins a new pair at every place of its window.
    """
    if operator == "Conv":
        if codes.ndim < 3 or codes.shape[1] == 1:
            return None
        order = (0, *range(2, codes.ndim), 1)
        if restart and attribute(node, "group", 1) == 1 and codes.shape[1] % 2:
            codes = np.pad(codes, [(0, 0), (0, 1), *[(0, 0)] * (codes.ndim - 2)])
        return np.asarray(codes.transpose(order).reshape(len(codes), -1), np.float32)
    if codes.ndim != 2:
        return None
    rows = codes if operator == "Gemm" and attribute(node, "transB", 0) else codes.T
    return np.asarray(rows, np.float32)


def _saturating_in_openvino(graph: QuantizedGraph) -> Iterator[Hit]:
    yield from _saturating(graph, restart=True)


def _saturating(graph: QuantizedGraph, *, restart: bool = False) -> Iterator[Hit]:
    assert _LIMIT is not None
    for node, operator, codes in _weights(graph):
        rows = _rows(node, operator, codes, restart=restart) if codes.dtype == np.int8 else None
        if rows is None or not rows.size:
            continue
        worst = worst_pair(rows)
        bad = int((worst > _LIMIT).sum())
        if bad:
            yield Hit(
                node,
                f"{bad} of {len(rows)} channels hold neighbours of one sign that add up to "
                f"{worst.max():.0f}; above {_LIMIT} their products can overflow 16 bits",
            )


def _unsigned_weights(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, _, codes in _weights(graph):
        if codes.dtype == np.uint8 and not node.op_type.endswith("Integer"):
            yield Hit(node, "its weights are uint8; int8 ones run up to a third faster on x86")


def _to_signed(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    done: dict[str, bool] = {}
    for hit in hits:
        assert hit.node is not None
        weight = graph.weight_dequantizer(hit.node) if hit.node.op_type in LAYERS else None
        if weight is None:
            continue
        key = str(weight.output[0])
        if key not in done:
            done[key] = _shift_weight(graph, weight)
        if done[key]:
            yield hit


def _shift_weight(graph: QuantizedGraph, weight: NodeProto) -> bool:
    codes, given = graph.constant(weight.input[0]), graph.parameters(weight)
    if codes is None or given.zero is None or not (given.zero == 128).all():
        return False
    name = weight.input[0]
    graph.set_input(weight, 0, graph.add(f"{name}_int8", (codes.astype(np.int16) - 128).astype(np.int8)))
    graph.set_input(weight, 2, graph.add(f"{name}_zero_point_int8", np.zeros(given.zero.shape, np.int8)))
    return True


def _biases(
    graph: QuantizedGraph,
) -> Iterator[Biases]:
    """Layer, the bias's DequantizeLinear, its codes less zero point, its scale, and the scale that the kernel
    assumes."""
    for node, data, weight in graph.weighted():
        bias = graph.dequantizer(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if bias is None or data is None or weight is None:
            continue
        scales = [graph.parameters(item).scale for item in (bias, data, weight)]
        codes, zero = graph.constant(bias.input[0]), graph.parameters(bias).zero
        if codes is None or zero is None or any(scale is None or not scale.size for scale in scales):
            continue
        codes = np.asarray(codes.astype(np.float64) - zero.reshape(-1))
        own, of_input, of_weight = (np.asarray(scale, np.float64).reshape(-1) for scale in scales)
        if len(of_input) == 1 and len(own) in (1, len(codes)) and len(of_weight) in (1, len(codes)):
            yield node, bias, codes, own, of_input * of_weight


def _bias_scale(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, bias, _, own, right in _biases(graph):
        kind = graph.kind(bias.input[0])
        off = float(np.abs(own / np.where(right > 0, right, np.nan) - 1).max())
        if kind != _INT32:
            yield Hit(node, "its bias is quantized, but not to int32")
        elif off > 1e-3:
            words = f"the scale of its int32 bias is up to {100 * off:.3g} % off input scale x weight scale"
            yield Hit(node, words)


def _requantize_bias(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    wanted = {str(hit.node.output[0]): hit for hit in hits if hit.node is not None}
    for node, bias, codes, own, assumed in list(_biases(graph)):
        hit, right = wanted.get(str(node.output[0])), np.broadcast_to(assumed, codes.shape)
        new = np.rint(codes * own / right) if (right > 0).all() else np.full(1, np.inf)
        if hit is None or np.abs(new).max(initial=0) >= _INT32_HALF:
            continue
        name = bias.input[0]
        scale = graph.add(f"{name}_scale", right.astype(np.float32))
        made = _dequantized(graph, node, graph.add(f"{name}_rescaled", new.astype(np.int32)), scale)
        graph.set_input(node, 2, made)
        yield hit


def _quantize_bias(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    for hit in hits:
        assert hit.node is not None
        node, data = hit.node, graph.dequantizer(hit.node.input[0])
        weight, bias = graph.dequantizer(node.input[1]), graph.constant(node.input[2])
        if data is None or weight is None or bias is None or bias.ndim != 1:
            continue
        scales = graph.parameters(data).scale, graph.parameters(weight).scale
        if (
            scales[0] is None
            or scales[1] is None
            or scales[0].size != 1
            or scales[1].size not in (1, bias.size)
        ):
            continue
        right = np.broadcast_to(scales[0].reshape(-1) * scales[1].reshape(-1), bias.shape)
        codes = np.rint(bias / right) if (right > 0).all() else np.full(1, np.inf)
        if np.abs(codes).max(initial=0) < _INT32_HALF:
            name = node.input[2]
            scale = graph.add(f"{name}_scale", right.astype(np.float32))
            made = _dequantized(graph, node, graph.add(f"{name}_quantized", codes.astype(np.int32)), scale)
            graph.set_input(node, 2, made)
            yield hit


def _dequantized(graph: QuantizedGraph, node: NodeProto, codes: str, scale: str) -> str:
    return graph.insert(node, "DequantizeLinear", [codes, scale], f"{codes}_dequantized", axis=0)


def _large_bias(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, _, codes, _, _ in _biases(graph):
        most = int(np.abs(codes).max(initial=0))
        if most > _INT32_HALF:
            yield Hit(
                node, f"its int32 bias reaches {most:,}: sums can pass 2,147,483,647, or it was cut there"
            )


def _float_bias(graph: QuantizedGraph) -> Iterator[Hit]:
    for node, data, weight in graph.weighted():
        if (
            node.op_type != "Gemm"
            or data is None
            or weight is None
            or len(node.input) < 3
            or not node.input[2]
        ):
            continue
        if graph.dequantizer(node.input[2]) is None and not graph.read_by_quantizers_only(node.output[0]):
            yield Hit(node, "its bias and its output are float, so it runs in float")


RULES = (
    Rule(
        "ORT009", "weights that saturate on x86 without VNNI",
        {"ort": "warning", "ort-x86-avx2": "error", "ort-x86-vnni": None, "ort-arm": None},
        "VPMADDUBSW adds two products in saturating 16 bits (Intel SDM); microsoft/onnxruntime#6004, #11576",
        "quantize with pair-safe rounding (compress --scheme ort-x86-avx2), or 7-bit weights (reduce_range)",
        _saturating,
    ),
    Rule(
        "OV001", "weights that saturate on x86 without VNNI",
        {
            "openvino": "warning", "openvino-x86-avx2": "error", "openvino-x86-vnni": None,
            "openvino-arm": None,
        },
        "VPMADDUBSW (Intel SDM); NNCF's overflow_fix; pairs begin anew at every place of a Conv's window",
        "quantize with pair-safe rounding (compress --scheme openvino-x86-avx2), or overflow_fix in NNCF",
        _saturating_in_openvino,
    ),
    Rule(
        "ORT011", "bias scale is not input scale x weight scale", {"ort": "warning", "openvino": None},
        f"{_SEEN}: the layer runs in float",
        "round the bias again with that scale", _bias_scale, _requantize_bias,
        "a bias moves by at most half a step of its new scale",
    ),
    Rule(
        "CPU002", "int32 bias close to overflow", {"ort": "warning", "openvino": "warning"},
        "microsoft/onnxruntime#22020, #25278", "raise the scale of such channels' weights", _large_bias,
    ),
    Rule(
        "ORT008", "Gemm with float bias and float output", {"ort": "warning"}, _SEEN,
        "round the bias to int32 with scale input scale x weight scale", _float_bias, _quantize_bias,
        "a bias moves by at most half a step of that scale",
    ),
    Rule(
        "ORT006", "uint8 weights", {"ort": "warning", "ort-arm": None},
        "measured on AVX2: 1.05 to 1.4 times float, int8 weights 1.4 to 1.9 times",
        "shift codes by 128 (exact where the zero point is 128)", _unsigned_weights, _to_signed,
        "nothing: the same numbers have other codes",
    ),
)  # fmt: skip
