"""Where pairs stand: one small graph per rule, judged by what the runtime makes of the file."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.quantization import placement
from compressor.quantization.scheme import named
from compressor.quantization.view import View

RNG = np.random.default_rng(1)
SCHEME = named("ort-x86-avx2")


def array(*shape, scale=0.3):
    return (RNG.normal(0, 1, shape) * scale).astype(np.float32)


IMAGE = {"x": ["N", 8, 10, 10]}
FEEDS = {"x": array(4, 8, 10, 10, scale=1.0)}
WEIGHTS = {"w": array(8, 8, 3, 3), "w2": array(8, 8, 1, 1), "b": array(8)}
SAME = {"pads": [1, 1, 1, 1]}
CONV, LAST = ("Conv", "x w b", "c", SAME), ("Conv", "m w2", "y")


@pytest.fixture
def placed(prepared):
    def place(model, **options):
        return placement.place(View(prepared(model)), SCHEME, **options)

    return place


@pytest.fixture
def check(build, quantize, run, fused_operators):
    """Quantize; the fused graph must be near the float one, and nearer to its own simulation."""

    def judge(nodes, constants=None, inputs=IMAGE, outputs=("y",), feeds=FEEDS, least=20.0, opset=17):
        model = build(nodes, inputs, dict.fromkeys(outputs), {**WEIGHTS, **(constants or {})}, opset=opset)
        written = quantize(model, feeds)
        wanted, got, simulated = run(model, feeds), run(written, feeds), run(written, feeds, fused=False)
        assert list(got) == list(outputs)
        for name, value in wanted.items():
            noise = np.square(value - got[name]).sum()
            assert 10 * np.log10(np.square(value).sum() / noise) > least, name
            assert np.abs(got[name] - simulated[name]).max() < 0.05 * np.abs(value).max(), name
        return fused_operators(written)

    return judge


@pytest.mark.parametrize(
    ("middle", "constants", "expected"),
    [
        ([("Relu", "c", "m")], {}, {"QLinearConv": 2}),
        ([("Clip", "c lo hi", "m")], {"lo": np.float32(0), "hi": np.float32(1.5)}, {"QLinearConv": 2}),
        ([("Clip", "c lo hi", "m")], {"lo": np.float32(-0.7), "hi": np.float32(1.1)}, {"QLinearConv": 2}),
        ([("Add", "c x", "m")], {}, {"QLinearConv": 2, "QLinearAdd": 1}),
        ([("Add", "c x", "a"), ("Relu", "a", "m")], {}, {"QLinearConv": 2, "QLinearAdd": 1}),
        ([("Mul", "c k", "m")], {"k": array(1, 8, 10, 10)}, {"QLinearConv": 2, "QLinearMul": 1}),
        ([("Sigmoid", "c", "s"), ("Mul", "c s", "m")], {}, {"QLinearSigmoid": 1, "QLinearMul": 1}),
        ([("LeakyRelu", "c", "m", {"alpha": 0.2})], {}, {"QLinearLeakyRelu": 1, "QLinearConv": 2}),
        ([("MaxPool", "c", "m", {"kernel_shape": [2, 2]})], {}, {"NhwcMaxPool": 1, "QLinearConv": 2}),
        ([("AveragePool", "c", "m", {"kernel_shape": [2, 2]})], {},
         {"QLinearAveragePool": 1, "QLinearConv": 2}),
        ([("Split", "c n", "p q", {"axis": 1}), ("Concat", "q p", "m", {"axis": 1})],
         {"n": np.int64([4, 4])}, {"QLinearConcat": 1, "Split": 1, "QLinearConv": 2}),
        ([("Pad", "c n v", "m")],
         {"n": np.int64([0, 0, 1, 1, 0, 0, 1, 1]), "v": np.float32(0.5)}, {"Pad": 1, "QLinearConv": 2}),
        ([("Slice", "c i j k k", "m")],
         {"i": np.int64([1]), "j": np.int64([9]), "k": np.int64([2])}, {"Slice": 1, "QLinearConv": 2}),
        ([("Resize", "c  n", "m", {"mode": "nearest"})],
         {"n": np.float32([1, 1, 2, 2])}, {"Resize": 1, "QLinearConv": 2}),
        ([("Reshape", "c n", "m")], {"n": np.int64([0, 8, 20, 5])}, {"Reshape": 1, "QLinearConv": 2}),
        ([("Gather", "c n", "m", {"axis": 1})], {"n": np.arange(8)[::-1]}, {"Gather": 1, "QLinearConv": 2}),
    ],
    ids=lambda value: value[0][0] if isinstance(value, list) else "",
)  # fmt: skip
def test_integer_all_the_way_between_two_convs(check, middle, constants, expected):
    found = check([CONV, *middle, LAST], constants)
    assert {op: found[op] for op in expected} == expected
    assert found["QuantizeLinear"] == 1
    assert found["DequantizeLinear"] == 1


@pytest.mark.parametrize(
    ("middle", "constants", "floats"),
    [
        ([("HardSwish", "c", "m")], {}, "HardSigmoid"),
        ([("Tanh", "c", "m")], {}, "Tanh"),
        ([("PRelu", "c k", "m")], {"k": array(8, 1, 1)}, "PRelu"),
        ([("Sub", "c x", "m")], {}, "Sub"),
        ([("Resize", "c r n", "m", {"mode": "linear"})],
         {"r": np.zeros(0, np.float32), "n": np.float32([1, 1, 2, 2])}, "Resize"),
    ],
    ids=lambda value: value[0][0] if isinstance(value, list) else "",
)  # fmt: skip
def test_operator_without_an_integer_kernel_is_float_between_pairs(check, middle, constants, floats):
    found = check([CONV, *middle, LAST], constants)
    assert found["QLinearConv"] == 2
    assert found[floats] == 1


def test_logits_keep_float_output(check):
    nodes = [
        CONV,
        ("GlobalAveragePool", "c", "p"),
        ("Flatten", "p", "f"),
        ("Gemm", "f v u", "y", {"transB": 1}),
    ]
    found = check(nodes, {"v": array(5, 8), "u": array(5)})
    assert found["QGemm"] == found["QLinearGlobalAveragePool"] == 1
    assert found["DequantizeLinear"] == 0


def test_graph_output_keeps_its_name_behind_an_absorbed_relu(check):
    found = check([CONV, ("Relu", "c", "m"), LAST], outputs=("y", "m"))
    assert found["QLinearConv"] == 2
    assert found["Relu"] == 0


def test_relu_is_not_absorbed_where_others_read_the_conv(check):
    found = check([CONV, ("Relu", "c", "r"), ("Add", "r c", "m"), LAST])
    assert found["QLinearConv"] == 2
    assert found["QLinearAdd"] == 1


def test_clip_that_excludes_zero_is_not_absorbed(check):
    found = check([CONV, ("Clip", "c lo hi", "m"), LAST], {"lo": np.float32(0.25), "hi": np.float32(2)})
    assert found["QLinearConv"] == 2


def test_elementwise_at_the_end_stays_float(build, placed):
    model = build([CONV, ("Add", "c x", "y")], IMAGE, {"y": None}, WEIGHTS)
    found = placed(model)
    assert found.integer == {"c"}
    assert set(found.pairs) == {"x", "c"}


def test_scores_mask_and_softmax_have_no_pair(build, placed):
    nodes = [
        ("MatMul", "x wq", "q"), ("MatMul", "x wk", "k"), ("Transpose", "k", "t", {"perm": [0, 2, 1]}),
        ("MatMul", "q t", "s"), ("Add", "s mask", "a"), ("Softmax", "a", "p"), ("MatMul", "p x", "c"),
        ("MatMul", "c wo", "y"),
    ]  # fmt: skip
    weights = {"wq": array(8, 8), "wk": array(8, 8), "wo": array(8, 8)}
    found = placed(build(nodes, {"x": ["N", 5, 8], "mask": ["N", 1, 5]}, {"y": None}, weights))
    assert found.integer == {"q", "k", "y"}
    assert set(found.pairs) == {"x", "c"}
    assert {item.reason for item in found.float} == {"both operands are computed at run time"}


@pytest.mark.parametrize(("length", "integer"), [("T", set()), (6, {"y"})])
def test_sum_over_a_free_length_does_not_enter_a_kernel(build, placed, length, integer):
    nodes = [("ReduceSum", "x axis", "s", {"keepdims": 0}), ("MatMul", "s w", "y")]
    constants = {"axis": np.int64([1]), "w": array(8, 4)}
    found = placed(build(nodes, {"x": ["N", length, 8]}, {"y": None}, constants))
    assert found.integer == integer
    assert [item.op for item in found.float] == ["MatMul"][len(integer) :]


@pytest.mark.parametrize(
    ("node", "inputs", "constants", "reason"),
    [
        (("MatMul", "w x", "y"), {"x": ["N", 8, 5]}, {"w": array(7, 8)}, "left operand"),
        (("MatMul", "x w", "y"), {"x": ["N", 3, 4, 8]}, {"w": array(3, 8, 5)}, "3 dimensions"),
        (("ConvTranspose", "x w", "y"), IMAGE, {"w": array(8, 4, 3, 3)}, "no int8 kernel for ConvTranspose"),
        (("Gemm", "x w m", "y"), {"x": [4, 8]}, {"w": array(8, 5), "m": array(4, 5)}, "not a constant row"),
        (("Conv", "x w", "y"), {**IMAGE, "w": [4, 8, 3, 3]}, {}, "computed at run time"),
    ],
)
def test_layers_in_float_are_reported_with_the_reason(build, placed, node, inputs, constants, reason):
    (item,) = placed(build([node], inputs, {"y": None}, constants)).float
    assert (item.name, item.op) == (f"{node[0]}_0", node[0])
    assert reason in item.reason


def test_excluded_node_stays_float_and_its_neighbours_do_not(build, placed):
    model = build([CONV, ("Relu", "c", "m"), LAST], IMAGE, {"y": None}, WEIGHTS)
    found = placed(model, exclude=frozenset({"Conv_2"}))
    assert found.integer == {"c"}
    assert [(item.name, item.reason) for item in found.float] == [("Conv_2", "left in float on request")]
    assert found.stored == []


def test_tensor_without_a_range_keeps_what_touches_it_float(build, placed):
    model = build([CONV, ("Relu", "c", "m"), LAST], IMAGE, {"y": None}, WEIGHTS)
    found = placed(model, unusable={"m": "never observed"})
    assert not found.integer
    assert [item.reason for item in found.float] == ["never observed", "never observed"]
    assert placed(model, unusable={"x": "never observed"}).integer == {"y"}


def test_tensors_to_observe_are_the_roots_in_graph_order(build, prepared):
    pool = ("MaxPool", "c", "m", {"kernel_shape": [2, 2]})
    model = prepared(build([CONV, pool, LAST], IMAGE, {"y": None}, WEIGHTS))
    assert placement.tensors(model, SCHEME) == ["x", "c", "y"]


def test_integer_inputs_and_shape_arithmetic_are_left_alone(build, placed):
    nodes = [
        ("Gather", "table ids", "e"), ("Shape", "e", "s"), ("Gather", "s zero", "n"),
        ("Concat", "n k", "r", {"axis": 0}), ("Reshape", "e r", "f"), ("MatMul", "f w", "y"),
    ]  # fmt: skip
    constants = {"table": array(50, 8), "zero": np.int64([0]), "k": np.int64([-1, 8]), "w": array(8, 4)}
    found = placed(build(nodes, {"ids": (["N", "T"], "int64")}, {"y": None}, constants))
    assert found.integer == {"y"}
    assert set(found.pairs) == {"f"}
