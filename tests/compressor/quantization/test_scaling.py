"""Factors that move between layers: where, what they are by hand, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compressor.errors import DataError
from compressor.quantization import equalize, scaling, smooth

RNG = np.random.default_rng(9)
Build = Callable[..., onnx.ModelProto]


def constants(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Weights whose channels differ in range by up to e^4."""
    return {
        name: (
            RNG.normal(size=shape) * np.exp(RNG.uniform(-2, 2, (shape[0], *[1] * (len(shape) - 1))))
        ).astype("f4")
        for name, shape in shapes.items()
    }


def stack(build: Build) -> onnx.ModelProto:
    """Dense, depthwise, grouped and matrix layers in a row, Relu, pools and a bounded Clip between."""
    nodes = [
        ("Conv", "x a a0", "c1"), ("Relu", "c1", "r1"), ("Conv", "r1 d d0", "c2", {"group": 8}),
        ("LeakyRelu", "c2", "r2"), ("MaxPool", "r2", "m2", {"kernel_shape": [2, 2]}),
        ("Conv", "m2 g g0", "c3", {"group": 2}), ("Relu", "c3", "r3"), ("Conv", "r3 e", "c4"),
        ("Clip", "c4 low high", "r4"), ("Conv", "r4 h", "c5"), ("Relu", "c5", "r5"),
        ("GlobalAveragePool", "r5", "p"), ("Flatten", "p", "f"), ("Gemm", "f v v0", "g1", {"transB": 1}),
        ("Relu", "g1", "r6"), ("MatMul", "r6 o", "y"),
    ]  # fmt: skip
    return build(
        nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]},
        {**constants(a=(8, 3, 3, 3), a0=(8,), d=(8, 1, 3, 3), d0=(8,), g=(12, 4, 1, 1), g0=(12,),
                     e=(6, 12, 1, 1),
                     h=(4, 6, 1, 1), v=(10, 4), v0=(10,), o=(10, 5)),
         "low": np.float32(0), "high": np.float32(6)},
    )  # fmt: skip


def test_links_are_found(build: Build, prepared: Callable[..., onnx.ModelProto]) -> None:
    found = {link.producer: link for link in scaling.links(prepared(stack(build)))}
    assert {key: link.tensor for key, link in found.items()} == {
        "c1": "r1",
        "c2": "m2",
        "c3": "r3",
        "g1": "r6",
    }
    assert [consumer.free for consumer in found["c1"].consumers] == [True]
    assert [consumer.free for consumer in found["c2"].consumers] == [False]


def test_a_tensor_read_by_anything_else_is_no_link(build: Build, prepared: Callable[..., Any]) -> None:
    nodes = [("Conv", "x a", "c"), ("Relu", "c", "r"), ("Conv", "r b", "d"), ("Add", "r d", "y")]
    sizes = constants(a=(4, 3, 1, 1), b=(4, 4, 1, 1))
    assert scaling.links(prepared(build(nodes, {"x": [1, 3, 4, 4]}, {"y": None}, sizes))) == []
    nodes = [("Conv", "x a", "c"), ("Relu", "c", "r"), ("Conv", "r a", "y")]  # the weight is used twice
    model = build(nodes, {"x": [1, 3, 4, 4]}, {"y": None}, constants(a=(3, 3, 1, 1)))
    assert scaling.links(prepared(model)) == []


def test_smoothing_and_equalizing_change_nothing(
    build: Build, prepared: Callable[..., Any], run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    x = RNG.normal(size=(6, 3, 8, 8)).astype("f4")
    wanted = run(stack_model := stack(build), {"x": x})["y"]
    model = prepared(stack_model)
    seen = smooth.observe(model, scaling.links(model), [(range(4), {"x": x[:4]})], tmp_path)
    assert smooth.smooth(model, seen, 0.5) == 4
    np.testing.assert_allclose(run(model, {"x": x})["y"], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    model = prepared(stack_model)
    assert equalize.equalize(model) == 4
    np.testing.assert_allclose(run(model, {"x": x})["y"], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_layer_norm_gives_its_factors_away(
    build: Build, prepared: Callable[..., Any], run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    nodes = [("LayerNormalization", "x s b", "l"), ("MatMul", "l q", "y"), ("MatMul", "l k", "z")]
    values = constants(s=(8,), b=(8,), q=(8, 8), k=(8, 4))
    source = build(nodes, {"x": ["n", 5, 8]}, {"y": None, "z": None}, values)
    x = RNG.normal(size=(3, 5, 8)).astype("f4")
    model = prepared(source)
    (link,) = scaling.links(model)
    seen = smooth.observe(model, [link], [(range(3), {"x": x})], tmp_path)
    before = np.abs(run(build(nodes[:1], {"x": ["n", 5, 8]}, {"l": None}, values), {"x": x})["l"])
    np.testing.assert_allclose(seen["l"], before.reshape(-1, 8).max(axis=0), rtol=1e-6)
    smooth.smooth(model, seen, 0.8)
    for name, value in run(source, {"x": x}).items():
        np.testing.assert_allclose(run(model, {"x": x})[name], value, rtol=1e-4, atol=1e-4)
    after = smooth.observe(model, scaling.links(model), [(range(3), {"x": x})], tmp_path)["l"]
    assert after.max() / after.min() < 0.5 * seen["l"].max() / seen["l"].min()


def test_factors_of_equalization_by_hand() -> None:
    # r1 = 4, r2 = 1: s = sqrt(4 x 1) / 1 = 2, and both ranges become 2; a dead channel stays.
    assert equalize.factors(np.array([4.0, 1.0, 0.0]), np.array([1.0, 4.0, 3.0])).tolist() == [2.0, 0.5, 1.0]


def test_equalized_layers_have_one_range(build: Build, prepared: Callable[..., Any]) -> None:
    nodes = [("Conv", "x a", "c"), ("Relu", "c", "r"), ("Conv", "r b", "y")]
    values = {"a": np.float32([4, 1]).reshape(2, 1, 1, 1), "b": np.float32([[1, 4]]).reshape(1, 2, 1, 1)}
    model = prepared(build(nodes, {"x": [1, 1, 2, 2]}, {"y": None}, values))
    equalize.equalize(model)
    weights = [onnx.numpy_helper.to_array(item).reshape(-1).tolist() for item in model.graph.initializer]
    assert weights == [[2, 2], [2, 2]]


def test_factors_of_smoothing_by_hand() -> None:
    # alpha 0.5: s = sqrt(16 / 1), sqrt(4 / 4) = 4, 1, relative to the largest 1 and 1/4.
    seen, read = np.array([16.0, 4.0, 0.0]), np.array([1.0, 4.0, 1.0])
    assert smooth.factors(seen, read, 0.5).tolist() == [1.0, 0.25, 1.0]
    assert smooth.factors(seen, read, 1.0).tolist() == [1.0, 0.25, 1.0]
    assert smooth.factors(np.array([1.0, 1e-9]), np.ones(2), 1.0).tolist() == [1.0, 1 / 64]


def test_smoothing_wants_a_usable_sample(build: Build, prepared: Callable[..., Any], tmp_path: Path) -> None:
    model = prepared(stack(build))
    bad = [([0], {"x": np.full((1, 3, 8, 8), np.nan, np.float32)})]
    with pytest.raises(DataError, match="no sample is free"):
        smooth.observe(model, scaling.links(model), bad, tmp_path)
