"""Preparation: the same function, in the form that the quantizer works on."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from compressor.errors import ModelFileError, UnsupportedError
from compressor.quantization import graph

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(0, 1, shape).astype(np.float32)


def operators(model):
    return [node.op_type for node in model.graph.node]


def same(run, before, after, feeds, tolerance=1e-5):
    wanted, got = run(before, feeds), run(after, feeds)
    assert list(wanted) == list(got)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance * np.abs(value).max())


IMAGE = {"x": ["N", 4, 8, 8]}
FEEDS = {"x": array(2, 4, 8, 8)}
WEIGHT = array(6, 4, 3, 3)


def test_upgrade_converts_upsample_and_clip_attributes(build, prepared, run):
    model = build(
        [
            ("Conv", "x w", "c"), ("Clip", "c", "k", {"min": 0.0, "max": 6.0}),
            ("Upsample", "k s", "y", {"mode": "nearest"}),
        ],
        IMAGE, {"y": ["N", 6, 12, 12]}, {"w": WEIGHT, "s": np.float32([1, 1, 2, 2])}, opset=9, ir=4,
    )  # fmt: skip
    ready = prepared(model)
    assert ready.opset_import[0].version == 13
    assert operators(ready) == ["Conv", "Clip", "Resize"]
    same(run, model, ready, FEEDS)


def test_upgrade_takes_old_files_whose_weights_are_not_inputs(build, prepared, run):
    model = build([("Mul", "x w", "y")], {"x": [3, 2]}, {"y": [3, 2]}, {"w": array(3, 2)}, opset=7, ir=3)
    model.ir_version = 4
    same(run, model, prepared(model), {"x": array(3, 2)})


def test_opset_that_cannot_be_converted_is_refused(build, prepared):
    model = build([("Crop", "x", "y", {"border": [1, 1, 1, 1]})], IMAGE, {"y": None}, opset=6, ir=4)
    with pytest.raises(UnsupportedError, match="opset 6"):
        prepared(model)


def test_new_versions_are_left(build, prepared):
    model = build([("Conv", "x w", "y")], IMAGE, {"y": None}, {"w": WEIGHT}, opset=21, ir=14)
    ready = prepared(model)
    assert (ready.opset_import[0].version, ready.ir_version) == (21, 13)


def test_initializers_leave_the_inputs(build, prepared):
    model = build([("Conv", "x w", "y")], {**IMAGE, "w": [6, 4, 3, 3]}, {"y": None}, {"w": WEIGHT})
    assert [item.name for item in prepared(model).graph.input] == ["x"]


def norm_constants(channels):
    return {
        "g": array(channels),
        "o": array(channels),
        "m": array(channels),
        "v": np.abs(array(channels)) + 0.1,
    }


@pytest.mark.parametrize("bias", [False, True])
def test_batch_normalization_goes_into_conv(build, prepared, run, bias):
    constants = {"w": WEIGHT, "b": array(6), **norm_constants(6)}
    model = build(
        [("Conv", "x w b" if bias else "x w", "c"), ("BatchNormalization", "c g o m v", "y")],
        IMAGE, {"y": ["N", 6, 6, 6]}, constants,
    )  # fmt: skip
    ready = prepared(model)
    assert operators(ready) == ["Conv"]
    same(run, model, ready, FEEDS)


def test_batch_normalization_stays_if_others_read_the_conv(build, prepared):
    model = build(
        [("Conv", "x w", "c"), ("BatchNormalization", "c g o m v", "y")],
        IMAGE, {"y": None, "c": None}, {"w": WEIGHT, **norm_constants(6)},
    )  # fmt: skip
    assert operators(prepared(model)) == ["Conv", "BatchNormalization"]


@pytest.mark.parametrize("group", [1, 2])
def test_channel_scaling_goes_into_transposed_conv(build, prepared, run, group):
    channels = 3 * group
    model = build(
        [("ConvTranspose", "x w", "t", {"group": group}), ("Mul", "t k", "s"), ("Add", "s o", "y")],
        IMAGE, {"y": None},
        {"w": array(4, 3, 3, 3), "k": array(channels, 1, 1), "o": array(1, channels, 1, 1)},
    )  # fmt: skip
    ready = prepared(model)
    assert operators(ready) == ["ConvTranspose"]
    same(run, model, ready, FEEDS)


@pytest.mark.parametrize("shape", [(6,), (1, 1, 6, 6), (2, 6, 1, 1)])
def test_constants_that_are_not_channel_wise_stay(build, prepared, run, shape):
    model = build(
        [("Conv", "x w", "c"), ("Add", "c k", "y")], IMAGE, {"y": None}, {"w": WEIGHT, "k": array(*shape)}
    )
    ready = prepared(model)
    assert operators(ready) == ["Conv", "Add"]
    same(run, model, ready, FEEDS)


@pytest.mark.parametrize("op", ["Sub", "Div"])
def test_order_of_operands_matters(build, prepared, run, op):
    constants = {"w": WEIGHT, "k": np.abs(array(6, 1, 1)) + 0.5}
    for inputs, left in (("c k", ["Conv"]), ("k c", ["Conv", op])):
        model = build([("Conv", "x w", "c"), (op, inputs, "y")], IMAGE, {"y": None}, constants)
        ready = prepared(model)
        assert operators(ready) == left
        same(run, model, ready, FEEDS, 1e-4)


def test_shared_conv_weight_is_copied_when_only_one_use_is_normalized(build, prepared, run):
    model = build(
        [("Conv", "x w", "a"), ("Conv", "x w", "c"), ("BatchNormalization", "c g o m v", "b")],
        IMAGE, {"a": None, "b": None}, {"w": WEIGHT, **norm_constants(6)},
    )  # fmt: skip
    ready = prepared(model)
    assert operators(ready) == ["Conv", "Conv"]
    same(run, model, ready, FEEDS)


def test_zero_padding_goes_into_conv(build, prepared, run):
    pads = np.int64([0, 0, 0, 1, 0, 0, 2, 1])
    model = build(
        [("Pad", "x p", "q"), ("Conv", "q w", "y", {"pads": [1, 1, 1, 1]})],
        IMAGE, {"y": None}, {"w": WEIGHT, "p": pads},
    )  # fmt: skip
    ready = prepared(model)
    assert operators(ready) == ["Conv"]
    same(run, model, ready, FEEDS)


@pytest.mark.parametrize(
    ("pads", "value"), [([0, 1, 0, 0, 0, 1, 0, 0], 0.0), ([0, 0, 1, 1, 0, 0, 1, 1], 2.0)]
)
def test_other_padding_stays(build, prepared, pads, value):
    channels = 4 + pads[1] + pads[5]
    model = build(
        [("Pad", "x p v", "q"), ("Conv", "q w", "y")],
        IMAGE, {"y": None}, {"w": array(6, channels, 3, 3), "p": np.int64(pads), "v": np.float32(value)},
    )  # fmt: skip
    assert operators(prepared(model)) == ["Pad", "Conv"]


def test_matmul_with_bias_becomes_gemm_only_for_matrices(build, prepared, run):
    for shape, left in ((["N", 5], ["Gemm"]), (["N", 3, 5], ["MatMul", "Add"])):
        model = build(
            [("MatMul", "x w", "m"), ("Add", "b m", "y")],
            {"x": shape},
            {"y": None},
            {"w": array(5, 4), "b": array(4)},
        )
        ready = prepared(model)
        assert operators(ready) == left
        same(run, model, ready, {"x": array(*[2 if size == "N" else size for size in shape])})


@pytest.mark.parametrize("bias", [array(7), array(1, 7), array(1), np.float32(0.7)])
def test_alpha_and_beta_go_into_the_constants(build, prepared, run, bias):
    model = build(
        [("Gemm", "x w c", "y", {"alpha": 0.5, "beta": 2.0, "transB": 1})],
        {"x": ["N", 5]}, {"y": None}, {"w": array(7, 5), "c": bias},
    )  # fmt: skip
    ready = prepared(model)
    assert {item.name for item in ready.graph.node[0].attribute} == {"transB"}
    same(run, model, ready, {"x": array(3, 5)})


@pytest.mark.parametrize(
    ("keeps", "left"), [(1, ["GlobalAveragePool"]), (0, ["GlobalAveragePool", "Flatten"])]
)
def test_mean_over_an_image_is_a_pool(build, prepared, run, keeps, left):
    model = build([("ReduceMean", "x", "y", {"axes": [-1, 2], "keepdims": keeps})], IMAGE, {"y": None})
    ready = prepared(model)
    assert operators(ready) == left
    same(run, model, ready, FEEDS)


def test_mean_over_other_axes_stays(build, prepared):
    model = build([("ReduceMean", "x", "y", {"axes": [1, 2]})], IMAGE, {"y": None})
    assert operators(prepared(model)) == ["ReduceMean"]


def test_identity_goes_unless_it_makes_an_output(build, prepared, run):
    model = build(
        [("Identity", "w", "w2"), ("Conv", "x w2", "c"), ("Dropout", "c", "d"), ("Identity", "d", "y")],
        IMAGE, {"y": None}, {"w": WEIGHT},
    )  # fmt: skip
    ready = prepared(model)
    assert operators(ready) == ["Conv", "Identity"]
    same(run, model, ready, FEEDS)


def test_constant_arithmetic_is_computed_but_a_tied_table_is_kept_once(build, prepared, run):
    table = array(300, 16)
    model = build(
        [
            ("Gather", "table ids", "rows"), ("Transpose", "table", "turned", {"perm": [1, 0]}),
            ("Concat", "a b", "shape", {"axis": 0}), ("Reshape", "rows shape", "flat"),
            ("MatMul", "flat turned", "y"),
        ],
        {"ids": (["N"], "int64")}, {"y": None}, {"table": table, "a": np.int64([-1]), "b": np.int64([16])},
    )  # fmt: skip
    ready = prepared(model)
    assert operators(ready) == ["Gather", "Transpose", "Reshape", "MatMul"]
    assert sum(int(np.prod(item.dims)) for item in ready.graph.initializer) < table.size + 10
    same(run, model, ready, {"ids": np.arange(5)})


GATES = [("Slice", f"w s{gate} s{gate + 1} zero", f"g{gate}") for gate in range(4)]
ORDER = {"zero": np.int64([0]), **{f"s{gate}": np.int64([gate * 64]) for gate in range(5)}}


def test_gates_in_another_order_are_one_constant(build, prepared, run):
    nodes = [*GATES, ("Concat", "g0 g3 g1 g2", "c", {"axis": 0}), ("Unsqueeze", "c zero", "u"),
             ("LSTM", "x u r", "y", {"hidden_size": 64})]  # fmt: skip
    model = build(
        nodes, {"x": [3, "N", 40]}, {"y": None}, {"w": array(256, 40), "r": array(1, 256, 64), **ORDER}
    )
    ready = prepared(model)
    assert operators(ready) == ["LSTM"]
    assert ready.ByteSize() < 1.02 * model.ByteSize()
    same(run, model, ready, {"x": array(3, 2, 40)})


def test_what_would_store_a_shared_weight_twice_is_left(build, prepared, run):
    nodes = [("Transpose", "w", "t"), ("Neg", "w", "n"), ("MatMul", "x t", "a"), ("MatMul", "a n", "y")]
    model = build(nodes, {"x": ["N", 40]}, {"y": None}, {"w": array(256, 40)})
    ready = prepared(model)
    assert operators(ready) == ["Transpose", "Neg", "MatMul", "MatMul"]
    same(run, model, ready, {"x": array(2, 40)})


def test_a_cut_weight_that_is_read_elsewhere_too_is_left(build, prepared, run):
    nodes = [*GATES, ("Concat", "g0 g3 g1 g2", "c", {"axis": 0}), ("MatMul", "x c", "a"),
             ("MatMul", "a w2", "b"), ("MatMul", "x w", "d"), ("Add", "b d", "y")]  # fmt: skip
    constants = {"w": array(256, 40), "w2": array(40, 40), **ORDER}
    model = build(nodes, {"x": ["N", 256]}, {"y": None}, constants)
    ready = prepared(model)
    assert operators(ready).count("Slice") == 4
    same(run, model, ready, {"x": array(2, 256)})


def test_a_table_that_the_graph_makes_from_little_is_not_stored(build, prepared, run):
    window = np.linspace(0, 1, 64, dtype=np.float32)[None]
    nodes = [("Expand", "window size", "table"), ("MatMul", "x table", "y")]
    constants = {"window": window, "size": np.int64([512, 64])}
    model = build(nodes, {"x": ["N", 512]}, {"y": None}, constants)
    ready = prepared(model)
    assert ready.ByteSize() < 10_000
    x = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
    assert np.allclose(run(ready, {"x": x})["y"], x @ np.broadcast_to(window, (512, 64)), atol=1e-3)


def test_names_that_a_subgraph_reads_survive(build, prepared, run):
    then = helper.make_graph(
        [helper.make_node("Add", ["same", "w0"], ["t"])], "then", [], [onnx.ValueInfoProto(name="t")]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["same"], ["e"])], "else", [], [onnx.ValueInfoProto(name="e")]
    )
    model = build(
        [("Identity", "x", "same"), ("If", "flag", "y", {"then_branch": then, "else_branch": other})],
        {"x": [3], "flag": ([], "bool")}, {"y": None}, {"w0": array(3)},
    )  # fmt: skip
    ready = prepared(model)
    for flag in (True, False):
        same(run, model, ready, {"x": array(3), "flag": np.asarray(flag)})


def test_half_precision_is_computed_in_float32_with_half_inputs_and_outputs(build, prepared, run):
    model = build(
        [
            ("Conv", "x w", "c"), ("Cast", "c", "f", {"to": 1}), ("Cast", "f", "h", {"to": 10}),
            ("Relu", "h", "y"),
        ],
        IMAGE, {"y": ["N", 6, 6, 6]}, {"w": WEIGHT.astype(np.float16)}, kind="float16",
    )  # fmt: skip
    ready = prepared(model)
    assert {item.data_type for item in ready.graph.initializer} == {onnx.TensorProto.FLOAT}
    same(run, model, ready, {"x": FEEDS["x"].astype(np.float16)}, 5e-3)


def test_nodes_without_a_name_get_one(build, prepared):
    model = build([("Relu", "x", "y")], IMAGE, {"y": None})
    model.graph.node[0].name = ""
    assert prepared(model).graph.node[0].name == "Relu_y"


@pytest.mark.parametrize(("bad", "word"), [(np.nan, "NaN"), (np.inf, "Inf")])
def test_weight_that_is_not_finite_is_refused_by_name(build, prepared, bad, word):
    weight = WEIGHT.copy()
    weight[0, 0, 0, 0] = bad
    with pytest.raises(ModelFileError, match=f"'w' holds {word}"):
        prepared(build([("Conv", "x w", "y")], IMAGE, {"y": None}, {"w": weight}))


def test_mask_with_infinity_is_taken(build, prepared):
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
    prepared(build([("Add", "x m", "y")], IMAGE, {"y": None}, {"m": mask}))


def test_missing_side_file_is_named(build, tmp_path):
    model = build([("Conv", "x w", "y")], IMAGE, {"y": None}, {"w": WEIGHT})
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert np.array_equal(
        numpy_helper.to_array(graph.prepare(tmp_path / "m.onnx").graph.initializer[0]), WEIGHT
    )
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelFileError, match=r"w\.bin"):
        graph.prepare(tmp_path / "m.onnx")


def test_quantized_graph_is_left_alone(build, prepared):
    model = build(
        [("QuantizeLinear", "x s z", "q"), ("DequantizeLinear", "q s z", "y")],
        IMAGE, {"y": None}, {"s": np.float32(0.1), "z": np.uint8(3)},
    )  # fmt: skip
    ready = prepared(model)
    assert graph.already_quantized(ready)
    assert ready.graph == model.graph


def test_large_weights_survive_conversion_of_the_opset(build, prepared, run):
    model = build([("MatMul", "x w", "y")], {"x": ["N", 64]}, {"y": None}, {"w": array(64, 64)}, opset=9)
    same(run, model, prepared(model), {"x": array(2, 64)})


@pytest.mark.parametrize("axes", [[2, 3], [-1], [3, 2]])
def test_pads_for_some_axes_become_those_for_all(build, prepared, run, axes):
    pads = np.arange(1, 2 * len(axes) + 1)
    model = build(
        [("Conv", "x w", "c"), ("Pad", "c p v a", "d"), ("Relu", "d", "y")],
        IMAGE, {"y": None},
        {"w": WEIGHT, "p": pads, "v": np.float32(0.5), "a": np.array(axes)}, opset=21, ir=10,
    )  # fmt: skip
    ready = prepared(model)
    assert [len(node.input) for node in ready.graph.node if node.op_type == "Pad"] == [3]
    same(run, model, ready, FEEDS)


def test_zero_pads_for_some_axes_go_into_the_conv(build, prepared, run):
    model = build(
        [("Pad", "x p  a", "d"), ("Conv", "d w", "y")],
        IMAGE, {"y": None}, {"w": WEIGHT, "p": np.array([1, 2, 0, 1]), "a": np.array([3, 2])},
        opset=21, ir=10,
    )  # fmt: skip
    ready = prepared(model)
    assert operators(ready) == ["Conv"]
    same(run, model, ready, FEEDS)


SIZES = {"sizes": (" r   s", np.array([9, 20])), "scales": (" r  s", np.float32([1.5, 2]))}


@pytest.mark.parametrize("batch", ["N", 2])
@pytest.mark.parametrize("axes", [[2, 3], [-1, -2]])
@pytest.mark.parametrize("given", SIZES)
def test_sizes_for_some_axes_become_those_for_all(build, prepared, quantize, run, given, axes, batch):
    """In between int8 convolutions onnxruntime takes them for sizes of all axes and refuses the file."""
    inputs, values = SIZES[given]
    model = build(
        [
            ("Conv", "x w", "c"),
            ("Relu", "c", "r"),
            ("Resize", inputs[1:], "d", {"axes": axes, "mode": "nearest"}),
            ("Conv", "d v", "y"),
        ],
        {"x": [batch, 4, 8, 8]}, {"y": None}, {"w": WEIGHT, "v": array(8, 6, 3, 3), "s": values},
        opset=21, ir=10,
    )  # fmt: skip
    ready = prepared(model)
    assert ("ScatterElements" in operators(ready)) == (batch == "N" and given == "sizes")
    assert not [item for node in ready.graph.node for item in node.attribute if item.name == "axes"]
    same(run, model, ready, FEEDS)
    integers = quantize(model, FEEDS)
    same(run, model, integers, FEEDS, tolerance=0.05)


def test_constants_that_nothing_reads_are_dropped(build, prepared, run):
    model = build(
        [("Mul", "w w", "dead"), ("Conv", "x w", "y")], IMAGE, {"y": None}, {"w": WEIGHT}
    )  # fmt: skip
    ready = prepared(model)
    assert operators(ready) == ["Conv"]
    same(run, model, ready, FEEDS)
