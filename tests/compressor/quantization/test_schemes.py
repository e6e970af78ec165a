"""What TensorRT and LiteRT ask of a graph, on small graphs quantized with their schemes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from compressor.errors import UnsupportedError
from compressor.quantization.lint import lint
from compressor.quantization.lint.graph import QuantizedGraph, is_dequantizer, is_quantizer
from compressor.quantization.scheme import SCHEMES, for_machine

RNG = np.random.default_rng(5)
SAME = {"pads": [1, 1, 1, 1]}


def array(*shape, scale=0.2):
    return (RNG.normal(0, 1, shape) * scale).astype(np.float32)


X = array(3, 16, 8, 8, scale=1.0)
IMAGE = {"x": ["N", 16, 8, 8]}
WEIGHTS = {
    "w1": array(16, 16, 3, 3), "b1": array(16), "w2": array(16, 16, 3, 3), "b2": array(16),
    "w3": array(16, 16, 1, 1), "b3": array(16), "wf": array(24, 16), "bf": array(24),
}  # fmt: skip
FIRST = [("Conv", "x w1 b1", "c1", SAME), ("Relu", "c1", "r1")]
BLOCK = [*FIRST, ("Conv", "r1 w2 b2", "c2", SAME)]
TAIL = [("GlobalAveragePool", "m", "p"), ("Flatten", "p", "f"), ("Gemm", "f wf bf", "y", {"transB": 1})]
SILU = [("Sigmoid", "c2", "s"), ("Mul", "c2 s", "m")]


@pytest.fixture
def made(build, quantize, run):
    """Quantized for a scheme, near the float graph by its simulation, and seen as a graph."""

    def make(nodes, scheme, outputs=("y",), constants=None, least=22.0):
        used = {name for _, names, *_ in nodes for name in names.split()}
        given = {name: value for name, value in {**WEIGHTS, **(constants or {})}.items() if name in used}
        model = build(nodes, IMAGE, dict.fromkeys(outputs), given, opset=18)
        written = quantize(model, {"x": X}, scheme)
        wanted, got = run(model, {"x": X}), run(written, {"x": X}, fused=False)
        for name, value in wanted.items():
            noise = np.square(value - got[name]).sum()
            assert 10 * np.log10(np.square(value).sum() / max(noise, 1e-30)) > least, name
        return QuantizedGraph(written)

    return make


def paired(graph):
    """Activations in front of a QuantizeLinear."""
    return {node.input[0] for node in graph.nodes("QuantizeLinear")}


def reads(graph, name):
    """The inputs of the node that makes a tensor, those behind a pair in capitals."""
    found = []
    for item in graph.producers[name].input:
        pair = graph.dequantizer(item)
        behind = None if pair is None else graph.quantizer_behind(pair)
        found.append(item if behind is None else behind.input[0].upper())
    return found


def scale(graph, name):
    """Scale and zero point of the pair on a tensor."""
    node = next(node for node in graph.nodes("QuantizeLinear") if node.input[0] == name)
    given = graph.parameters(node)
    return float(given.scale), int(given.zero)


# TensorRT


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        # the residual side of a sum, not the layer's; none between a layer and what is fused into it
        ([*BLOCK, ("Add", "c2 r1", "a"), ("Relu", "a", "m"), *TAIL], {"x", "r1", "m", "p", "f"}),
        ([*BLOCK, ("Add", "r1 c2", "a"), ("Relu", "a", "m"), *TAIL], {"x", "r1", "m", "p", "f"}),
        # of two layers, the way of the longer one is the layer's
        (
            [*BLOCK, ("Conv", "x w3 b3", "d"), ("Add", "c2 d", "a"), ("Relu", "a", "m"), *TAIL],
            {"x", "r1", "d", "m", "p", "f"},
        ),
        # x * sigmoid(x) is one kernel with the layer
        ([*BLOCK, *SILU, ("Conv", "m w3 b3", "y")], {"x", "r1", "m"}),
        ([*BLOCK, *SILU, ("Add", "m r1", "a"), ("Conv", "a w3 b3", "y")], {"x", "r1", "a"}),
        # the builder moves pairs over a pool of maxima by itself
        ([*FIRST, ("MaxPool", "r1", "m", {"kernel_shape": [2, 2]}), ("Conv", "m w3 b3", "y")], {"x", "m"}),
        # two activations that no layer makes, or a constant: sums that stay as they are
        ([*FIRST, ("MaxPool", "r1", "m", {"kernel_shape": [1, 1]}), ("Add", "m r1", "y")], {"x"}),
        ([("Conv", "x w1", "c1", SAME), ("Add", "c1 k", "a"), ("Conv", "a w3 b3", "y")], {"x", "a"}),
    ],
)
def test_pairs_for_tensorrt(made, nodes, pairs):
    graph = made(nodes, "tensorrt", constants={"k": array(1, 16, 8, 8)})
    assert paired(graph) == pairs
    assert lint(graph.model, "tensorrt") == []


def test_a_sum_reads_the_pair_of_the_way_round(made):
    graph = made([*BLOCK, ("Add", "c2 r1", "a"), ("Relu", "a", "m"), *TAIL], "tensorrt")
    assert reads(graph, "a") == ["c2", "R1"]
    assert reads(graph, "c2")[0] == "R1"
    assert len([node for node in graph.nodes("QuantizeLinear") if node.input[0] == "r1"]) == 1


def test_activations_are_symmetric_int8_and_biases_float(made):
    graph = made([*BLOCK, ("Conv", "c2 w3 b3", "y")], "tensorrt")
    for node in graph.nodes("QuantizeLinear", "DequantizeLinear"):
        given = graph.parameters(node)
        assert given.explicit
        assert given.kind == onnx.TensorProto.INT8
        assert not given.zero.any()
    for node in graph.nodes("Conv"):
        assert graph.kind(node.input[2]) == onnx.TensorProto.FLOAT
        assert graph.is_constant(node.input[2])
        assert graph.parameters(graph.weight_dequantizer(node)).axis == 0
    largest = float(np.abs(X).max())
    assert scale(graph, "x") == (pytest.approx(largest / 127, rel=1e-6), 0)


def test_joined_ways_share_one_scale(made):
    nodes = [*BLOCK, ("Concat", "r1 c2", "j", {"axis": 1}), ("Conv", "j w4", "y")]
    graph = made(nodes, "tensorrt", constants={"w4": array(16, 32, 1, 1)})
    assert paired(graph) == {"x", "r1", "j"}
    assert scale(graph, "r1") == scale(graph, "j")
    assert reads(graph, "j") == ["R1", "c2"]
    assert lint(graph.model, "tensorrt") == []


@pytest.mark.parametrize(
    ("node", "shape", "reason"),
    [
        (("Gemm", "f wt", "y", {"transB": 1}), (10, 16), "int8 does not pay for a matrix of 10 x 16"),
        (("Conv", "m wt", "y"), (10, 4, 1, 1), "int8 does not pay for 4 channels in and 10 out"),
        (("Conv", "r1 wt", "y", {"group": 16}), (16, 1, 1, 1), "16 channels in groups and a window of 1"),
        (("Conv", "r1 wt", "y", {"group": 16, **SAME}), (16, 1, 3, 3), None),
        (("Conv", "m wt", "y"), (8, 4, 1, 1), None),
    ],
)
def test_thin_layers_stay_float(build, prepared, node, shape, reason):
    from compressor.quantization import placement
    from compressor.quantization.view import View

    nodes = [*FIRST, ("GlobalAveragePool", "r1", "p"), ("Flatten", "p", "f")]
    nodes += [("Slice", "r1 zero four one", "m")]
    constants = {"wt": array(*shape), "zero": np.array([0]), "four": np.array([4]), "one": np.array([1])}
    model = prepared(build([*nodes, node], IMAGE, {"y": None}, {**WEIGHTS, **constants}))
    placed = placement.place(View(model), SCHEMES["tensorrt"])
    assert ("y" in placed.integer) == (reason is None)
    if reason:
        assert reason in next(item.reason for item in placed.float if item.op == node[0])


def test_dead_channels_keep_a_scale_that_float16_can_hold(made):
    weight = WEIGHTS["w1"].copy()
    weight[3] = 1e-9
    graph = made(
        [("Conv", "x dead b1", "c1", SAME), ("Relu", "c1", "y")], "tensorrt", constants={"dead": weight}
    )
    assert (
        graph.parameters(graph.weight_dequantizer(graph.nodes("Conv")[0])).scale.astype(np.float16) > 0
    ).all()


def test_shared_weights_are_turned_in_the_file(made):
    nodes = [("Flatten", "x", "v"), ("Transpose", "wt", "t", {"perm": [1, 0]}), ("MatMul", "v t", "y")]
    graph = made(nodes, "tensorrt", constants={"wt": array(32, 1024)})
    assert [node.op_type for node in graph.nodes() if node.op_type == "Transpose"] == []
    assert graph.codes(graph.weight_dequantizer(graph.nodes("MatMul")[0])).shape == (1024, 32)


# LiteRT


def test_fixed_output_scales_of_litert(made):
    """Specification: LOGISTIC and SOFTMAX 1/256 and -128, TANH 1/128 and 0."""
    nodes = [*FIRST, ("Conv", "r1 w3 b3", "c3"), ("Sigmoid", "c3", "s"), ("Tanh", "c3", "t")]
    nodes += [("Mul", "s t", "m"), *TAIL[:-1], ("Gemm", "f wf bf", "g", {"transB": 1}), ("Softmax", "g", "y")]
    graph = made(nodes, "litert")
    assert scale(graph, "s") == (1 / 256, -128)
    assert scale(graph, "t") == (1 / 128, 0)
    assert scale(graph, "y_unquantized") == (1 / 256, -128)
    assert paired(graph) == {"x", "r1", "c3", "s", "t", "m", "p", "g", "y_unquantized"} | {"f"}


def test_numeric_contract_of_litert(made):
    graph = made([*BLOCK, ("Add", "c2 r1", "a"), ("Relu", "a", "m"), *TAIL], "litert")
    low, high = float(X.min()), float(X.max())
    step = (high - low) / 255
    assert scale(graph, "x") == (pytest.approx(step, rel=1e-6), round(-128 - low / step))
    assert scale(graph, "r1")[1] == -128  # a Relu in front: all codes stand for what it lets through
    for node in graph.nodes("Conv", "Gemm"):
        weight, bias = graph.weight_dequantizer(node), graph.producers[node.input[2]]
        codes, given = graph.codes(weight), graph.parameters(weight)
        assert (codes.dtype, codes.min() >= -127, given.axis, given.zero.any()) == (np.int8, True, 0, False)
        source = graph.parameters(graph.dequantizer(node.input[0])).scale
        assert graph.kind(bias.input[0]) == onnx.TensorProto.INT32
        np.testing.assert_allclose(graph.parameters(bias).scale, given.scale * source, rtol=1e-6)


def test_all_of_a_graph_is_in_integers_for_litert(made):
    graph = made([*BLOCK, ("Add", "c2 r1", "a"), ("Relu", "a", "m"), *TAIL], "litert")
    for node in graph.nodes():
        if not (is_quantizer(node) or is_dequantizer(node) or node.op_type == "Relu"):
            assert all(graph.dequantizer(name) for name in node.input), node.op_type
    assert is_dequantizer(graph.producers["y"])


def test_litert_concatenates_in_one_scale_and_rounds_fixed_ones_again(made):
    nodes = [*BLOCK, ("Sigmoid", "c2", "s"), ("Concat", "r1 c2 s", "j", {"axis": 1}), ("Conv", "j w4", "y")]
    graph = made(nodes, "litert", constants={"w4": array(16, 48, 1, 1)})
    assert scale(graph, "r1") == scale(graph, "c2") == scale(graph, "j")
    assert scale(graph, "s") == (1 / 256, -128)
    ends = [graph.parameters(graph.dequantizer(name)) for name in graph.producers["j"].input]
    assert all(float(end.scale) == scale(graph, "j")[0] for end in ends)


def test_litert_pools_and_pads_in_one_scale(made):
    fill = {"ends": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "value": np.float32(9.0)}
    nodes = [*FIRST, ("Pad", "r1 ends value", "q"), ("AveragePool", "q", "m", {"kernel_shape": [2, 2]})]
    graph = made([*nodes, ("Conv", "m w3 b3", "y")], "litert", constants=fill, least=18.0)
    assert scale(graph, "r1") == scale(graph, "q") == scale(graph, "m")
    assert scale(graph, "q")[0] * 255 == pytest.approx(9.0, rel=1e-6)


@pytest.mark.parametrize(("factor", "raised"), [(1.0, False), (1e-5, True), (1e5, True)])
def test_litert_keeps_the_ratio_of_a_sum(made, factor, raised):
    """XNNPACK takes sums whose input scale is at least 2^-10 and less than 2^8 of the output's."""
    nodes = [*FIRST, ("Conv", "r1 wk bk", "k"), ("Conv", "r1 w3 b3", "d"), ("Add", "k d", "a")]
    constants = {"wk": WEIGHTS["w3"] * factor, "bk": WEIGHTS["b3"] * factor}
    graph = made([*nodes, ("Conv", "a w3 b3", "y")], "litert", constants=constants, least=10.0)
    ratios = [scale(graph, name)[0] / scale(graph, "a")[0] for name in ("k", "d")]
    assert all(2**-10 <= ratio < 2**8 for ratio in ratios)
    assert any(ratio < 2**-9.99 for ratio in ratios) == raised


def test_products_of_litert_keep_their_ratio(made):
    tiny = {"wk": WEIGHTS["w3"] * np.float32(3e-6), "bk": WEIGHTS["b3"] * np.float32(3e-6)}
    nodes = [*FIRST, ("Conv", "r1 wk bk", "k"), ("Conv", "r1 w3 b3", "d"), ("Mul", "k d", "a")]
    graph = made([*nodes, ("Conv", "a w3 b3", "y")], "litert", constants=tiny, least=5.0)
    product = scale(graph, "k")[0] * scale(graph, "d")[0] / scale(graph, "a")[0]
    assert 2**-16 <= product < 2**8


# names


def test_machines_and_schemes():
    assert for_machine("onnx", "cuda", set()) == "ort-cuda"
    assert for_machine("tensorrt", "cuda", set()) == "tensorrt"
    assert for_machine("tflite", "cpu", {"avx2"}) == "litert"
    with pytest.raises(UnsupportedError, match="abacus:cpu"):
        for_machine("abacus", "cpu", set())
    for scheme in SCHEMES.values():
        assert scheme.narrow is None or SCHEMES[scheme.narrow].pair_limit


def test_litert_leaves_normalization_and_masks_in_float(made):
    """What has a float source or only float readers stays float: a mean that is taken off, a last root."""
    nodes = [*FIRST, ("GlobalAveragePool", "r1", "p"), ("Sqrt", "p", "q"), ("Sub", "r1 q", "d")]
    nodes += [("Conv", "d w3 b3", "c3"), ("Add", "c3 mask", "h"), ("Softmax", "h", "s"), ("Sqrt", "s", "y")]
    graph = made(nodes, "litert", constants={"mask": array(1, 1, 1, 8)})
    assert reads(graph, "q") == ["p"]
    assert reads(graph, "d") == ["R1", "q"]
    assert paired(graph) == {"x", "r1", "d", "c3"}
