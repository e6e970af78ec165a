"""The written file: names, types, one copy of each weight, and the runtime's answer."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from compressor.quantization.scheme import SCHEMES

RNG = np.random.default_rng(2)


def array(*shape, scale=0.3):
    return (RNG.normal(0, 1, shape) * scale).astype(np.float32)


IMAGE = {"x": ["N", 8, 10, 10]}
FEEDS = {"x": array(4, 8, 10, 10, scale=1.0)}
WEIGHTS = {"w": array(8, 8, 3, 3), "w2": array(8, 8, 1, 1), "b": array(8)}


def constants(model):
    return {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}


def sqnr(wanted, got):
    return 10 * np.log10(np.square(wanted).sum() / max(np.square(wanted - got).sum(), 1e-30))


@pytest.fixture
def network(build):
    nodes = [("Conv", "x w b", "c"), ("Relu", "c", "r"), ("Conv", "r w2", "y")]
    return build(nodes, IMAGE, {"y": ["N", 8, 8, 8], "r": ["N", 8, 8, 8]}, WEIGHTS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_names_types_and_free_dimensions_stay(network, quantize, run, scheme):
    written = quantize(network, FEEDS, scheme)
    assert [item.SerializeToString() for item in written.graph.input] == [
        item.SerializeToString() for item in network.graph.input
    ]
    assert [item.SerializeToString() for item in written.graph.output] == [
        item.SerializeToString() for item in network.graph.output
    ]
    named = {node.name for node in written.graph.node}
    assert {node.name for node in network.graph.node} <= named
    wanted = run(network, FEEDS)
    for name, got in run(written, FEEDS).items():
        assert sqnr(wanted[name], got) > 25
    assert run(written, FEEDS)["r"].min() >= 0


def test_new_names_are_derived_and_types_fit(network, quantize):
    found = constants(quantize(network, FEEDS))
    assert found["x_scale"].shape == found["x_zero_point"].shape == ()
    assert found["x_zero_point"].dtype == np.uint8
    assert found["w_quantized"].dtype == np.int8
    assert found["w_scale"].shape == (8,)
    assert found["b_quantized"].dtype == np.int32
    np.testing.assert_array_equal(found["b_scale"], found["x_scale"] * found["w_scale"])
    assert not {"w", "w2", "b"} & set(found)


def test_signed_activations(network, quantize):
    assert constants(quantize(network, FEEDS, "ort-arm"))["r_zero_point"] == np.int8(-128)


def test_names_that_are_taken_are_left(build, quantize):
    nodes = [("Conv", "x w b", "x_quantized"), ("Relu", "x_quantized", "y")]
    written = quantize(build(nodes, IMAGE, {"y": None}, WEIGHTS), FEEDS)
    outputs = [name for node in written.graph.node for name in node.output]
    assert len(outputs) == len(set(outputs))
    assert "x_quantized_2" in outputs


@pytest.mark.parametrize("last", [("MatMul", "h turned", "y"), ("Gemm", "h table", "y", {"transB": 1})])
def test_tied_table_is_stored_once_and_serves_both(build, quantize, run, fused_operators, last):
    table = array(500, 16) * RNG.uniform(0.05, 1, (500, 1)).astype(np.float32)
    nodes = [
        ("Gather", "table ids", "e"), ("ReduceMean", "e", "p", {"axes": [1], "keepdims": 0}),
        ("MatMul", "p w", "h"), ("Transpose", "table", "turned", {"perm": [1, 0]}), last,
    ]  # fmt: skip
    if last[0] == "Gemm":
        nodes.pop(3)
    model = build(
        nodes,
        {"ids": (["N", "T"], "int64")},
        {"y": None, "e": None},
        {"table": table, "w": np.eye(16, dtype="f4")},
    )
    feeds = {"ids": RNG.integers(0, 500, (64, 5))}
    written = quantize(model, feeds)
    large = [(name, value.dtype) for name, value in constants(written).items() if value.size >= table.size]
    assert large == [("table_quantized", np.int8)]
    wanted, got = run(model, feeds), run(written, feeds)
    assert sqnr(wanted["e"], got["e"]) > 38
    assert sqnr(wanted["y"], got["y"]) > 20
    found = fused_operators(written)
    assert found["QGemm"] + found["QLinearMatMul"] + found["MatMulIntegerToFloat"] == 2


def test_weight_that_a_float_operator_reads_too_is_stored_once(build, quantize, run):
    nodes = [("MatMul", "x w", "m"), ("MatMul", "w z", "n")]
    model = build(nodes, {"x": ["N", 40], "z": [30, 4]}, {"m": None, "n": None}, {"w": array(40, 30)})
    feeds = {"x": array(8, 40), "z": array(30, 4)}
    written = quantize(model, feeds)
    assert "w" not in constants(written)
    wanted, got = run(model, feeds), run(written, feeds)
    assert sqnr(wanted["m"], got["m"]) > 25
    assert sqnr(wanted["n"], got["n"]) > 30


def test_excluded_layer_keeps_its_float_weight(network, quantize):
    found = constants(quantize(network, FEEDS, exclude=("Conv_0",)))
    np.testing.assert_array_equal(found["w"], WEIGHTS["w"])
    assert "w2_quantized" in found


def test_shared_conv_weight_with_two_inputs(build, quantize, run, fused_operators):
    nodes = [("Conv", "x w b", "p"), ("Conv", "z w b", "q"), ("Add", "p q", "s"), ("Conv", "s w2", "y")]
    model = build(nodes, {**IMAGE, "z": IMAGE["x"]}, {"y": None}, WEIGHTS)
    feeds = {**FEEDS, "z": FEEDS["x"] * 5}
    written = quantize(model, feeds)
    assert sum(value.shape == (8, 8, 3, 3) for value in constants(written).values()) == 1
    assert sqnr(run(model, feeds)["y"], run(written, feeds)["y"]) > 25
    assert fused_operators(written)["QLinearConv"] == 3


@pytest.mark.parametrize(
    ("node", "inputs", "weights"),
    [
        (("ConvTranspose", "x w b", "y", {"group": 2}), {"x": ["N", 16, 8, 8]},
         {"w": array(16, 12, 3, 3), "b": array(24)}),
        (("LSTM", "x w r", "a y", {"hidden_size": 16}), {"x": [7, "N", 24]},
         {"w": array(1, 64, 24), "r": array(1, 64, 16)}),
        (("GRU", "x w r", "a y", {"hidden_size": 24}), {"x": [7, "N", 32]},
         {"w": array(1, 72, 32), "r": array(1, 72, 24)}),
        (("MatMul", "x w", "y"), {"x": ["N", 4, 5, 32]},
         {"w": array(4, 32, 16) * np.float32([1, 0.1, 5, 1])[:, None, None]}),
        (("MatMul", "w x", "y"), {"x": ["N", 40, 5]}, {"w": array(32, 40)}),
    ],
    ids=["ConvTranspose", "LSTM", "GRU", "batched", "left"],
)  # fmt: skip
def test_weights_of_float_layers_are_stored_as_int8_and_computed_at_load(
    build, quantize, run, fused_operators, node, inputs, weights
):
    model = build([node], inputs, {"y": None}, weights)
    feeds = {"x": array(*[3 if size == "N" else size for size in inputs["x"]], scale=1.0)}
    written = quantize(model, feeds)
    stored = sum(value.size for value in constants(written).values() if value.dtype == np.int8)
    assert stored >= 0.6 * sum(value.size for value in weights.values())
    assert sqnr(run(model, feeds)["y"], run(written, feeds)["y"]) > 30
    assert fused_operators(written) == fused_operators(model)


def test_padding_value_outside_the_range_of_a_relu(build, quantize, run):
    nodes = [("Conv", "x w b", "c"), ("Relu", "c", "r"), ("Pad", "r n v", "p"), ("Conv", "p w2", "y")]
    extra = {"n": np.int64([0, 0, 1, 1, 0, 0, 1, 1]), "v": np.float32(-3)}
    model = build(nodes, IMAGE, {"y": None}, {**WEIGHTS, **extra})
    assert sqnr(run(model, FEEDS)["y"], run(quantize(model, FEEDS), FEEDS)["y"]) > 25


def test_subgraph_sees_the_tensors_it_captures(build, quantize, run):
    then = helper.make_graph(
        [helper.make_node("Neg", ["r"], ["t"])], "then", [], [onnx.ValueInfoProto(name="t")]
    )
    other = helper.make_graph(
        [helper.make_node("Mul", ["r", "k"], ["e"])], "else", [], [onnx.ValueInfoProto(name="e")]
    )
    nodes = [
        ("Conv", "x w b", "c"), ("Relu", "c", "r"), ("Conv", "r w2", "y"),
        ("If", "flag", "z", {"then_branch": then, "else_branch": other}),
    ]  # fmt: skip
    model = build(nodes, {**IMAGE, "flag": ([], "bool")}, {"y": None, "z": None}, {**WEIGHTS, "k": array(1)})
    for flag in (True, False):
        feeds = {**FEEDS, "flag": np.asarray(flag)}
        wanted, got = run(model, feeds), run(quantize(model, feeds), feeds)
        assert sqnr(wanted["z"], got["z"]) > 30


def test_half_precision_model_gets_int8_weights(build, quantize, run, fused_operators):
    nodes = [("Conv", "x w b", "c"), ("Relu", "c", "r"), ("Conv", "r w2", "y")]
    halves = {name: value.astype(np.float16) for name, value in WEIGHTS.items()}
    model = build(nodes, IMAGE, {"y": None}, halves, kind="float16")
    feeds = {"x": FEEDS["x"].astype(np.float16)}
    written = quantize(model, feeds)
    wanted, got = run(model, feeds)["y"], run(written, feeds)["y"]
    assert got.dtype == np.float16
    assert sqnr(wanted.astype(np.float32), got.astype(np.float32)) > 25
    assert fused_operators(written)["QLinearConv"] == 2


def test_constant_input_breaks_nothing(network, quantize, run):
    feeds = {"x": np.zeros_like(FEEDS["x"])}
    for got in run(quantize(network, feeds), feeds).values():
        assert np.isfinite(got).all()


def test_file_is_a_quarter(build, quantize):
    model = build([("MatMul", "x w", "y")], {"x": ["N", 256]}, {"y": None}, {"w": array(256, 256)})
    assert quantize(model, {"x": array(4, 256)}).ByteSize() < 0.27 * model.ByteSize()
