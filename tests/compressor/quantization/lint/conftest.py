"""Hand-built graphs: for every rule one that breaks it and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)
CODES = RNG.integers(-60, 61, (16, 16, 3, 3)).astype(np.int8)
MATRIX = RNG.integers(-60, 61, (16, 16)).astype(np.int8)
U8, S8 = np.uint8(128), np.int8(0)


class G:
    """A graph under construction; each method adds nodes and gives the name of what they make."""

    def __init__(self, opset: int = 17, ir: int = 9) -> None:
        self.opset, self.ir = opset, ir
        self.nodes: list[onnx.NodeProto] = []
        self.inits: dict[str, NDArray] = {}
        self.raw: list[onnx.TensorProto] = []
        self.count = 0

    def const(self, value: Any) -> str:
        self.count += 1
        self.inits[f"c{self.count}"] = np.asarray(value)
        return f"c{self.count}"

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.count += 1
        out = f"t{self.count}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=f"{op}_{out}", **attributes))
        return out

    def quantize(self, x: str, scale: Any = 0.03, zero: Any = U8, **attributes: Any) -> str:
        return self.node("QuantizeLinear", x, *self.parameters(scale, zero), **attributes)

    def dequantize(self, q: str, scale: Any = 0.03, zero: Any = U8, **attributes: Any) -> str:
        return self.node("DequantizeLinear", q, *self.parameters(scale, zero), **attributes)

    def parameters(self, scale: Any, zero: Any) -> list[str]:
        names = [scale if isinstance(scale, str) else self.const(np.asarray(scale, np.float32))]
        return names if zero is None else [*names, zero if isinstance(zero, str) else self.const(zero)]

    def pair(self, x: str, scale: Any = 0.03, zero: Any = U8, **attributes: Any) -> str:
        return self.dequantize(self.quantize(x, scale, zero, **attributes), scale, zero, **attributes)

    def weight(self, codes: NDArray = CODES, axis: int = 0, scale: Any = None, zero: Any = None) -> str:
        channels = codes.shape[axis]
        scale = np.full(channels, 0.01, np.float32) if scale is None else scale
        zero = np.zeros(np.shape(scale), codes.dtype) if zero is None else zero
        return self.dequantize(self.const(codes), scale, zero, axis=axis)

    def bias(self, codes: Any = None, scale: float = 0.03 * 0.01) -> str:
        codes = np.full(16, 100, np.int32) if codes is None else codes
        return self.dequantize(self.const(codes), np.full(16, scale, np.float32), None, axis=0)

    def conv(self, x: str, weight: str | None = None, bias: str | None = "") -> str:
        inputs = [x, weight or self.weight()]
        inputs += [self.bias() if bias == "" else bias] if bias is not None else []
        return self.node("Conv", *inputs, pads=[1] * 4)

    def model(
        self, output: str, shape: tuple[int, ...] = (1, 16, 8, 8), rename: bool = False
    ) -> onnx.ModelProto:
        y = output if rename else self.node("Neg", output)
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [onnx.ValueInfoProto(name=y)],
            [*(numpy_helper.from_array(value, name) for name, value in self.inits.items()), *self.raw],
        )
        domains = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=domains, ir_version=self.ir)


def layer(out_zero: Any = U8, in_zero: Any = U8, mid: str = "", **conv: Any) -> onnx.ModelProto:
    """x, pair, Conv, perhaps an activation, pair."""
    g = G()
    y = g.conv(g.pair("x", zero=in_zero), **conv)
    return g.model(g.pair(g.node(mid, y) if mid else y, 0.1, out_zero))


def with_weight(make: Callable[[G], str], bias: str | None = "") -> onnx.ModelProto:
    g = G()
    x = g.pair("x")
    return g.model(g.pair(g.conv(x, make(g), bias), 0.1))


def trt(*, residual: bool, main: bool, before: bool = False) -> onnx.ModelProto:
    """A symmetric residual block with float biases; pairs on the residual input, behind the last Conv."""
    g = G()
    x = g.pair("x", zero=S8)
    y = g.conv(x, bias=None)
    y = g.pair(g.node("Relu", g.pair(y, 0.1, S8) if before else y), 0.1, S8)
    y = g.conv(y, bias=None)
    y = g.node("Add", g.pair(y, 0.3, S8) if main else y, x if residual else "x")
    return g.model(g.pair(g.node("Relu", y), 0.1, S8))


def gemm(bias: bool, *, quantized_output: bool = False, axis: int = 1) -> onnx.ModelProto:
    g = G()
    weight = g.weight(MATRIX, axis)
    made = g.bias() if bias else g.const(np.ones(16, np.float32))
    y = g.node("Gemm", g.pair("x"), weight, made)
    return g.model(g.pair(y, 0.1) if quantized_output else y, (4, 16))


def parameters(scale: Any, zero: Any = U8, **attributes: Any) -> onnx.ModelProto:
    g = G()
    return g.model(g.pair("x", scale, zero, **attributes))


def mover(scale: float) -> onnx.ModelProto:
    g = G()
    return g.model(g.pair(g.node("MaxPool", g.pair("x"), kernel_shape=[2, 2]), scale))


def chain(scale: float) -> onnx.ModelProto:
    g = G()
    return g.model(g.pair(g.pair("x"), scale))


def shape_arithmetic(quantized: bool) -> onnx.ModelProto:
    g = G()
    shape = g.node("Cast", g.node("Shape", "x"), to=1)
    shape = g.node("Cast", g.pair(shape, 1.0) if quantized else shape, to=7)
    return g.model(g.node("Reshape", g.pair("x"), shape))


def one_sided(quantized: bool) -> onnx.ModelProto:
    g = G()
    weight = g.weight() if quantized else g.const(np.ones((16, 16, 3, 3), np.float32))
    return g.model(g.pair(g.conv(g.pair("x"), weight, None), 0.1))


def norm(folded: bool) -> onnx.ModelProto:
    g = G()
    y = g.conv(g.pair("x"))
    if not folded:
        one, zero = g.const(np.ones(16, np.float32)), g.const(np.zeros(16, np.float32))
        y = g.node("BatchNormalization", y, one, zero, zero, one)
    return g.model(g.pair(y, 0.1))


def addition(pair_behind: bool) -> onnx.ModelProto:
    g = G()
    y = g.node("Add", g.pair("x"), g.pair("x", 0.1))
    return g.model(g.pair(y, 0.2) if pair_behind else y)


def float_layer(also: bool) -> onnx.ModelProto:
    g = G()
    y = g.pair("x")
    weight = g.const(np.ones((16, 16, 1, 1), np.float32))
    y = g.pair(g.conv(y), 0.1)
    return g.model(g.node("Conv", g.node("Neg", y), weight) if also else y)


def thin_float_layer() -> onnx.ModelProto:
    g = G()
    y = g.pair(g.conv(g.pair("x")), 0.1)
    return g.model(g.node("MatMul", g.node("Neg", y), g.const(np.ones((8, 4), np.float32))))


def stored_as_float(quantized: bool) -> onnx.ModelProto:
    g = G()
    scale, zero = np.full(16, 0.01, np.float32), np.zeros(16, np.int8)
    codes = (
        g.const(CODES) if quantized else g.quantize(g.const(CODES * np.float32(0.01)), scale, zero, axis=0)
    )
    return g.model(g.pair(g.conv(g.pair("x"), g.dequantize(codes, scale, zero, axis=0)), 0.1))


def twice(constant: bool) -> onnx.ModelProto:
    g = G()
    one = g.const(np.ones((1, 16, 8, 8), np.float32))
    other = g.const(np.ones((1, 16, 8, 8), np.float32) * (1 if constant else 2))
    return g.model(g.node("Add", g.node("Add", "x", one), other))


def unread(left: bool) -> onnx.ModelProto:
    g = G()
    if left:
        g.const(np.ones(100, np.float32))
    return g.model(g.pair("x"))


def precision(kind: Any) -> onnx.ModelProto:
    g = G(19)
    x = g.node("Cast", "x", to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))
    scales = [g.const(np.full(16, 0.01, kind)), g.const(kind(0.03)), g.const(kind(0.1))]
    weight = g.weight(scale=scales[0], zero=np.zeros(16, np.int8))
    return g.model(g.pair(g.conv(g.pair(x, scales[1]), weight, None), scales[2]))


def backwards(order: int) -> onnx.ModelProto:
    made = layer()
    nodes = list(made.graph.node)[::order]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


def versions(ir: int, opset: int = 17) -> onnx.ModelProto:
    g = G(opset, ir)
    return g.model(g.pair("x"))


def output_pair(inside: bool) -> onnx.ModelProto:
    g = G()
    y = g.pair(g.node("Neg", "x"), zero=S8)
    return g.model(g.node("Neg", y) if inside else y, rename=True)


def operators(op: str) -> onnx.ModelProto:
    g = G()
    zero = g.const(np.int8(0) if op == "S8" else np.uint8(128))
    scale, weight_scale, weight_zero = (
        g.const(np.float32(0.03)),
        g.const(np.float32(0.01)),
        g.const(np.int8(0)),
    )
    x = g.node("QuantizeLinear", "x", scale, zero)
    codes = g.const(CODES)
    y = g.node("QLinearConv", x, scale, zero, codes, weight_scale, weight_zero, scale, zero, pads=[1] * 4)
    return g.model(g.node("DequantizeLinear", y, scale, zero))


def dynamic(op: str) -> onnx.ModelProto:
    g = G()
    names = ["codes", "scale", "zero"]
    g.nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], names))
    weight = g.const(CODES if op == "ConvInteger" else MATRIX)
    extra = {"pads": [1] * 4} if op == "ConvInteger" else {}
    y = g.node(op, "codes", weight, "zero", **extra)
    shape = (1, 16, 8, 8) if op == "ConvInteger" else (4, 16)
    return g.model(g.node("Mul", g.node("Cast", y, to=1), "scale"), shape)


def nibbles(count: int) -> onnx.ModelProto:
    g = G(21, 10)
    g.raw.append(helper.make_tensor("w", TensorProto.INT4, [1, count], [1] * count))
    weight = g.dequantize("w", 0.1, None)
    return g.model(g.node("Add", "x", weight), (1, count))


def concat(scale: float) -> onnx.ModelProto:
    g = G()
    y = g.node("Concat", g.pair("x", 0.1, S8), g.pair("x", scale, S8), axis=1)
    return g.model(g.pair(y, 0.1, S8))


def behind(op: str) -> onnx.ModelProto:
    g = G()
    return g.model(g.pair(g.node(op, "x"), 0.01, S8))


def silu(inside: bool) -> onnx.ModelProto:
    g = G()
    gate = g.node("Sigmoid", "x")
    return g.model(g.pair(g.node("Mul", "x", g.pair(gate, 0.01, S8) if inside else gate), 0.1, S8))


def thin(out: int) -> onnx.ModelProto:
    g = G()
    return g.model(g.conv(g.pair("x", zero=S8), g.weight(CODES[:out, :3]), None), (1, 3, 8, 8))


def readers(zero: Any, count: int) -> onnx.ModelProto:
    """Two Convs; the pair between them is read `count` times."""
    g = G()
    middle = g.pair(g.conv(g.pair("x", zero=zero)), 0.1, zero)
    y = g.pair(g.conv(middle, bias=g.bias(scale=0.1 * 0.01)), 0.2, zero)
    if count == 2:
        y = g.node("Concat", y, g.node("Neg", middle), axis=1)
    return g.model(y)


def per_channel(size: int) -> onnx.ModelProto:
    g = G()
    scale = np.full(size, 0.03, np.float32) if size > 1 else np.float32(0.03)
    zero = np.full(size, 128, np.uint8) if size > 1 else U8
    return g.model(g.pair("x", scale, zero, axis=1))


def contradiction(kind: int) -> onnx.ModelProto:
    g = G(23, 10)
    codes = g.quantize("x", zero=U8, output_dtype=kind)
    return g.model(g.dequantize(codes))


def run_time_scale(computed: bool) -> onnx.ModelProto:
    g = G()
    scale = g.node("ReduceMax", "x", keepdims=0) if computed else g.const(np.float32(0.1))
    return g.model(g.pair("x", scale, S8))


def two_ends(scale: float) -> onnx.ModelProto:
    g = G()
    return g.model(g.dequantize(g.quantize("x"), scale))


def old(opset: int) -> onnx.ModelProto:
    g = G(opset)
    return g.model(g.conv(g.pair("x", zero=S8), bias=None))


LOUD = np.full((16, 16, 3, 3), 100, np.int8)
WIDE_LEFT = np.zeros((16, 3, 3, 3), np.int8)
WIDE_LEFT[:, 2, 0, 0] = WIDE_LEFT[:, 0, 0, 1] = 100  # neighbours only where pairs run on over odd channels


def three_channels() -> onnx.ModelProto:
    g = G()
    return g.model(g.pair(g.conv(g.pair("x"), g.weight(WIDE_LEFT)), 0.1), (1, 3, 8, 8))


Make = Callable[[], onnx.ModelProto]
CASES: dict[str, tuple[Make, Make]] = {
    "QDQ001": (lambda: parameters(0.0), lambda: parameters(0.1)),
    "QDQ002": (lambda: parameters(1e-40), lambda: parameters(1e-20)),
    "QDQ003": (
        lambda: with_weight(lambda g: g.weight(scale=np.full(15, 0.01, np.float32)), None),
        lambda: with_weight(lambda g: g.weight(), None),
    ),
    "QDQ004": (lambda: run_time_scale(True), lambda: run_time_scale(False)),
    "QDQ005": (lambda: old(12), lambda: old(13)),
    "QDQ006": (lambda: contradiction(TensorProto.INT8), lambda: contradiction(TensorProto.UINT8)),
    "QDQ007": (lambda: two_ends(0.1), lambda: two_ends(0.03)),
    "QDQ008": (lambda: per_channel(16), lambda: per_channel(1)),
    "QDQ009": (
        lambda: with_weight(lambda g: g.weight(axis=1)),
        lambda: with_weight(lambda g: g.weight(axis=0)),
    ),
    "QDQ020": (lambda: stored_as_float(False), lambda: stored_as_float(True)),
    "QDQ021": (lambda: chain(0.03), lambda: chain(0.04)),
    "QDQ022": (lambda: chain(0.04), lambda: chain(0.03)),
    "QDQ023": (lambda: shape_arithmetic(True), lambda: shape_arithmetic(False)),
    "QDQ024": (lambda: one_sided(False), lambda: one_sided(True)),
    "QDQ025": (lambda: norm(False), lambda: norm(True)),
    "QDQ026": (lambda: mover(0.05), lambda: mover(0.03)),
    "QDQ027": (lambda: addition(False), lambda: addition(True)),
    "QDQ028": (lambda: float_layer(True), lambda: float_layer(False)),
    "TRT001": (lambda: output_pair(False), lambda: output_pair(True)),
    "TRT002": (lambda: parameters(0.1, np.int8(3)), lambda: parameters(0.1, S8)),
    "TRT003": (lambda: parameters(0.1, None), lambda: parameters(0.1, S8)),
    "TRT004": (layer, lambda: trt(residual=True, main=False)),
    "TRT005": (lambda: operators("U8"), layer),
    "TRT006": (lambda: nibbles(3), lambda: nibbles(4)),
    "TRT007": (lambda: parameters(1e-8, S8), lambda: parameters(1e-5, S8)),
    "TRT008": (lambda: trt(residual=True, main=False, before=True), lambda: trt(residual=True, main=False)),
    "TRT009": (lambda: trt(residual=False, main=False), lambda: trt(residual=True, main=False)),
    "TRT010": (lambda: trt(residual=True, main=True), lambda: trt(residual=True, main=False)),
    "TRT011": (lambda: concat(0.2), lambda: concat(0.1)),
    "TRT012": (lambda: behind("Softmax"), lambda: behind("Relu")),
    "TRT013": (lambda: silu(True), lambda: silu(False)),
    "TRT014": (lambda: thin(4), lambda: thin(16)),
    "TRT015": (lambda: float_layer(True), thin_float_layer),
    "CPU001": (
        lambda: layer(np.uint16(9), np.uint16(9)),
        layer,
    ),
    "CPU002": (
        lambda: _with_bias(2**31 - 1),
        lambda: _with_bias(2**20),
    ),
    "ORT001": (lambda: versions(99), lambda: versions(9)),
    "ORT002": (lambda: _no_pair(True), lambda: _no_pair(False)),
    "ORT003": (lambda: layer(U8, mid="Relu"), lambda: layer(np.uint8(0), mid="Relu")),
    "ORT004": (lambda: layer(S8, S8), layer),
    "ORT005": (lambda: operators("S8"), lambda: operators("U8")),
    "ORT006": (
        lambda: with_weight(lambda g: g.weight(_unsigned(), zero=np.full(16, 128, np.uint8))),
        lambda: with_weight(lambda g: g.weight()),
    ),
    "ORT007": (lambda: readers(S8, 2), lambda: readers(S8, 1)),
    "ORT008": (lambda: gemm(False), lambda: gemm(False, quantized_output=True)),
    "ORT009": (three_channels, layer),
    "OV001": (lambda: with_weight(lambda g: g.weight(LOUD)), three_channels),
    "ORT010": (lambda: dynamic("ConvInteger"), lambda: dynamic("MatMulInteger")),
    "ORT011": (lambda: _bias_scale(0.02), lambda: _bias_scale(0.03)),
    "ORT012": (lambda: precision(np.float16), lambda: precision(np.float32)),
    "FILE001": (lambda: twice(True), lambda: twice(False)),
    "FILE003": (lambda: backwards(-1), lambda: backwards(1)),
    "FILE002": (lambda: unread(True), lambda: unread(False)),
}


def _with_bias(code: int) -> onnx.ModelProto:
    g = G()
    return g.model(g.pair(g.conv(g.pair("x"), bias=g.bias(np.full(16, code, np.int32))), 0.1))


def _no_pair(missing: bool) -> onnx.ModelProto:
    g = G()
    y = g.conv(g.pair("x"))
    return g.model(y if missing else g.pair(y, 0.1))


def _unsigned() -> NDArray:
    return (CODES.astype(np.int16) + 128).astype(np.uint8)


def _bias_scale(scale: float) -> onnx.ModelProto:
    g = G()
    return g.model(g.pair(g.conv(g.pair("x"), bias=g.bias(scale=scale * 0.01)), 0.1))


@pytest.fixture(scope="session")
def cases() -> dict[str, tuple[Make, Make]]:
    """By rule: what makes a graph that breaks it, and what makes one that does not."""
    return CASES
