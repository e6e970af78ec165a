"""Graphs with inputs and outputs left out, empty tensors and dead ends: every stage takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from compressor import onnx_files
from compressor.model import Model
from compressor.stages import cast, dynamic, quantize, weight_only

Json = dict[str, Any]
RNG = np.random.default_rng(0)
SCHEME = "ort-x86-avx2"


def weight(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / np.sqrt(max(np.prod(shape[1:]), 1))).astype(np.float32)


TABLE = {
    "w": weight(1, 24, 8), "r": weight(1, 24, 6), "gw": weight(1, 18, 8), "gr": weight(1, 18, 6),
    "w2": weight(2, 24, 8), "r2": weight(2, 24, 6), "p2": weight(2, 18), "head": weight(6, 4),
    "flat": np.array([-1, 40]), "wide": weight(40, 12), "deep": weight(12, 4), "none": np.zeros((0, 4), "f4"),
    "zero": np.array([0]), "one": np.array([1]), "parts": np.array([4, 4, 4]), "gain": weight(12),
    "six": np.array([6]), "two": np.array([2]), "narrow": weight(4, 4), "row": np.array([-1, 6]),
}  # fmt: skip
LINEAR = [("Reshape", "x flat", "f"), ("MatMul", "f wide", "h")]
STEPS = ("Transpose", "x", "t", {"perm": [1, 0, 2]})
GRAPHS: dict[str, list[tuple[Any, ...]]] = {
    "lstm that gives its last state": [
        STEPS, ("LSTM", "t w r", " h", {"hidden_size": 6}), ("Reshape", "h row", "q"), ("Gemm", "q head", "y")
    ],
    "gru with all optional inputs left out": [
        STEPS,
        ("GRU", "t gw gr   ", " h", {"hidden_size": 6}),
        ("Reshape", "h row", "q"),
        ("Gemm", "q head", "y"),
    ],
    "lstm in both directions that gives its cells": [
        STEPS,
        ("Shape", "x", "s"),
        ("Gather", "s zero", "n"),
        ("Concat", "two n six", "sizes", {"axis": 0}),
        ("ConstantOfShape", "sizes", "start"),
        ("LSTM", "t w2 r2   start  p2", "  c", {"hidden_size": 6, "direction": "bidirectional"}),
        ("Reshape", "c row", "q"),
        ("Gemm", "q head", "y"),
    ],
    "split with an output left out": [
        *LINEAR, ("Split", "h parts", " b c", {"axis": 1}), ("Add", "b c", "d"), ("Gemm", "d narrow ", "y")
    ],
    "normalization without bias that gives its statistics": [
        *LINEAR,
        ("LayerNormalization", "h gain ", "l mean inverse"),
        ("Mul", "l inverse", "k"),
        ("Gemm", "k deep", "y"),
    ],
    "a weight without elements": [
        *LINEAR,
        ("Slice", "h zero zero one", "e"),
        ("MatMul", "e none", "n"),
        ("Gemm", "h deep", "g"),
        ("Add", "g n", "y"),
    ],
    "a layer without rows": [
        *LINEAR, ("Slice", "h zero zero zero", "e"), ("MatMul", "e deep", "z"), ("Gemm", "h deep", "y")
    ],
    "a constant that nothing reads": [*LINEAR, ("Mul", "deep gain4", "d"), ("Gemm", "h deep", "y")],
}  # fmt: skip
TABLE["gain4"] = weight(4)


@pytest.fixture
def samples() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(16, 5, 8)).astype(np.float32)


@pytest.fixture(params=GRAPHS, ids=lambda name: str(name).replace(" ", "-"))
def odd(request: pytest.FixtureRequest, model_of: Callable[..., Json]) -> Json:
    nodes = GRAPHS[request.param]
    read = {name for _, ins, *_ in nodes for name in ins.split(" ")}
    made = {name for _, _, outs, *_ in nodes for name in outs.split(" ")}
    outputs = ["y", "z"] if "z" in made else ["y"]
    constants = {name: value for name, value in TABLE.items() if name in read}
    return _tidied(model_of(nodes, {"x": ["n", 5, 8]}, outputs, constants))


def _tidied(model: Json) -> Json:
    """As loaders write it."""
    proto = onnx.load(model["path"])
    onnx_files.tidy(proto)
    onnx.save(proto, model["path"])
    return model


@pytest.fixture
def check(
    odd: Json, samples: np.ndarray, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> Callable[[Json, Path], None]:
    """A stage's model runs and gives nearly what its source does."""

    def judge(made: Json, folder: Path) -> None:
        feeds = {"x": samples[:4]}
        assert sqnr(answer(odd["path"], feeds), answer(folder / made["path"], feeds)) > 25

    return judge


@pytest.mark.parametrize("options", [{}, {"rounding": "gptq", "weights": "mse", "bias_correction": "fast"}])
def test_static_int8(
    odd: Json, samples: np.ndarray, reference: Any, check: Any, tmp_path: Path, options: Json
) -> None:
    data = reference(samples, ["n", 5, 8])
    folders = {name: tmp_path / name for name in ("ranges", "moments", "made", "causes")}
    for folder in folders.values():
        folder.mkdir()
    quantize.calibrate(odd, data, SCHEME, str(folders["ranges"]))
    if options:
        quantize.moments(odd, data, SCHEME, str(folders["moments"]))
        options = {**options, "moments": str(folders["moments"])}
    made = quantize.run(odd, str(folders["made"]), str(folders["ranges"]), SCHEME, **options)
    check(made, folders["made"])
    made["path"] = str(folders["made"] / made["path"])
    layers = quantize.diagnose(odd, made, data, str(folders["causes"]))["layers"]
    assert all(layer["tensor"] for layer in layers)
    assert layers[-1]["sqnr_db"] > 25


def test_dynamic_int8(odd: Json, samples: np.ndarray, reference: Any, check: Any, tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    (tmp_path / "made").mkdir()
    dynamic.calibrate(odd, reference(samples, ["n", 5, 8]), str(tmp_path / "seen"))
    made = dynamic.run(odd, str(tmp_path / "made"), SCHEME, ranges=str(tmp_path / "seen"))
    assert made["facts"]["quantized"] > 0
    check(made, tmp_path / "made")


def test_weight_only(odd: Json, check: Any, tmp_path: Path) -> None:
    check(weight_only.run(odd, str(tmp_path), bits=8), tmp_path)


def test_half(odd: Json, check: Any, tmp_path: Path) -> None:
    made = cast.run(odd, str(tmp_path), to="float16", compute="float16")
    assert made["facts"]["compute"] == "float16"
    check(made, tmp_path)


def test_nothing_for_dynamic_int8_is_said_of_the_model(
    model_of: Callable[..., Json], samples: np.ndarray, reference: Any, tmp_path: Path
) -> None:
    model = model_of([("MatMul", "x t", "y"), ("Transpose", "x", "t", {"perm": [0, 2, 1]})][::-1],
                     {"x": ["n", 5, 8]}, ["y"], {})  # fmt: skip
    assert dynamic.calibrate(model, reference(samples, ["n", 5, 8]), str(tmp_path))["tensors"] == 0
    made = dynamic.run(model, str(tmp_path), "ort-x86-vnni", ranges=str(tmp_path))
    assert made["facts"]["reason"] == "nothing to quantize: MatMul (its weight is not a constant matrix)"


def branch(name: str, op: str) -> onnx.GraphProto:
    values = [helper.make_tensor_value_info(f"{name}{end}", 1, ["n", 8]) for end in "ab"]
    nodes = [helper.make_node(op, ["x"], [f"{name}a"]), helper.make_node("Neg", ["x"], [f"{name}b"])]
    return helper.make_graph(nodes, name, [], values)


def test_control_flow_may_leave_outputs_out(tmp_path: Path, answer: Callable[..., Any]) -> None:
    """onnxruntime crashes on such a file, or refuses it."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=onnx.TensorProto.BOOL),
        helper.make_node(
            "If", ["c"], ["", "b"], then_branch=branch("t", "Relu"), else_branch=branch("e", "Abs")
        ),
        helper.make_node("Gemm", ["b", "unused_9"], ["y"]),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", 1, ["n", 8])], [value("y", 1, ["n", 4])],
        [numpy_helper.from_array(weight(8, 4), "unused_9")],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx_files.tidy(proto)
    names = [name for node in proto.graph.node for name in node.output]
    assert all(names)
    assert len(set(names)) == len(names)
    assert "unused_9" not in names
    onnx.save(proto, tmp_path / "source.onnx")
    x = RNG.normal(size=(3, 8)).astype(np.float32)
    wanted = -x @ numpy_helper.to_array(proto.graph.initializer[0])
    np.testing.assert_allclose(answer(tmp_path / "source.onnx", {"x": x}), wanted, rtol=1e-5, atol=1e-6)


def test_half_leaves_alone_what_an_operator_of_the_runtime_hides(
    tmp_path: Path, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    """Shape inference does not know what SkipLayerNormalization gives."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node(
            "SkipLayerNormalization", ["h", "x", "g", "", ""], ["n", "", "", "sum"],
            domain="com.microsoft", name="norm",
        ),
        helper.make_node("MatMul", ["sum", "a"], ["y"], name="last"),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [value("x", 1, ["n", 5, 32])], [value("y", 1, ["n", 5, 32])],
        [numpy_helper.from_array(weight(32, 32), "a"), numpy_helper.from_array(weight(32), "g")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "source.onnx")
    specs = onnx_files.specs(onnx.load(tmp_path / "source.onnx"))
    model = Model("onnx", tmp_path / "source.onnx", *specs, "0" * 64, 1024, "onnx").json()
    (tmp_path / "made").mkdir()
    made = cast.run(model, str(tmp_path / "made"), to="float16", compute="float16")
    islands = {item["name"]: item["reason"] for item in made["facts"]["islands"]}
    assert islands == {
        "norm": "it is no standard operator",
        "last": "the type of 'sum' is not known",
    }
    feeds = {"x": RNG.normal(size=(2, 5, 32)).astype(np.float32)}
    found = answer(tmp_path / "made" / made["path"], feeds)
    assert sqnr(answer(tmp_path / "source.onnx", feeds), found) > 50
