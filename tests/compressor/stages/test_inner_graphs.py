"""Layers inside of If and Loop are left as they are, and said to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from compressor.stages import cast, dynamic, quantize, weight_only

Json = dict[str, Any]
SCHEME = "ort-x86-vnni"
X = np.random.default_rng(2).normal(size=(16, 32)).astype(np.float32)
NAMES = ["inner_no", "inner_yes"]


def branch(name: str, weight: str, source: str) -> onnx.GraphProto:
    node = helper.make_node("MatMul", [source, weight], [name], name=name)
    return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, 1, None)])


@pytest.fixture(params=["inside", "both"])
def model(request: pytest.FixtureRequest, model_of: Callable[..., Json]) -> tuple[str, Json]:
    """All layers inside of an If, or one of three before it."""
    rng = np.random.default_rng(0)
    source = "x" if request.param == "inside" else "h"
    constants = {name: rng.normal(size=(32, 32)).astype(np.float32) for name in ("w0", "w1", "w2")}
    branches = {
        "then_branch": branch("inner_yes", "w1", source),
        "else_branch": branch("inner_no", "w2", source),
    }
    nodes: list[tuple[Any, ...]] = [
        ("ReduceSum", "x", "s", {"keepdims": 0}),
        ("Greater", "s zero", "positive"),
        ("If", "positive", "y", branches),
    ]
    if request.param == "both":
        nodes = [("MatMul", "x w0", "h"), *nodes]
    else:
        del constants["w0"]
    return request.param, model_of(nodes, {"x": ["n", 32]}, ["y"], {**constants, "zero": np.float32(0)})


def made(stage: str, model: Json, data: Json, folder: Path) -> Json:
    ranges = folder / "ranges"
    ranges.mkdir()
    if stage == "quantize":
        quantize.calibrate(model, data, SCHEME, str(ranges))
        return quantize.run(model, str(folder), str(ranges), SCHEME)
    if stage == "dynamic":
        return dynamic.run(model, str(folder), SCHEME, exclude=None)
    return weight_only.run(model, str(folder), bits=4, rounding="nearest")


@pytest.mark.parametrize("stage", ["quantize", "dynamic", "weight_only"])
def test_layers_of_inner_graphs_are_in_the_facts(
    stage: str,
    model: tuple[str, Json],
    reference: Callable[..., Json],
    tmp_path: Path,
    answer: Callable[..., Any],
    sqnr: Callable[..., float],
) -> None:
    kind, source = model
    (tmp_path / "out").mkdir()
    found = made(stage, source, reference(X, ["n", 32]), tmp_path / "out")
    facts = found["facts"]
    inner = [layer for layer in facts["float"] if layer["name"] in NAMES]
    assert [layer["name"] for layer in inner] == NAMES
    assert {layer["reason"] for layer in inner} == {
        "it lies inside of If, and inner graphs are not quantized"
    }
    assert facts["quantized"] == (kind == "both")
    if kind == "inside" and stage != "weight_only":
        assert facts["reason"] == (
            "nothing to quantize: MatMul (it lies inside of If, and inner graphs are not quantized)"
        )
    want, got = answer(source["path"], {"x": X}), answer(tmp_path / "out" / found["path"], {"x": X})
    assert sqnr(want, got) > 10


def test_a_cast_says_so_where_it_finds_nothing_else(model_of: Callable[..., Json], tmp_path: Path) -> None:
    """Weights inside of an inner graph are not those of the model's own."""
    rng = np.random.default_rng(0)
    branches = {}
    for name in ("then_branch", "else_branch"):
        graph = branch(f"inner_{name}", "w", "x")
        graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(32, 32)).astype("f4"), "w"))
        branches[name] = graph
    nodes = [("If", "flag", "y", branches)]
    source = model_of(nodes, {"x": ["n", 32]}, ["y"], {"flag": np.bool_(True)})
    facts = cast.run(source, str(tmp_path), compute="float32")["facts"]
    assert facts["halved"] == 0
    assert facts["reason"].startswith("nothing to cast: MatMul (it lies inside of If")
