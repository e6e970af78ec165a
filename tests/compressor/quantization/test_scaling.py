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
from compressor.quantization.scheme import named
from compressor.quantization.view import View

SCHEME = named("ort-x86-vnni")
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


def smoothed(model: onnx.ModelProto, seen: dict[str, smooth.Channels], alpha: float) -> list[str]:
    """Every link of `seen` smoothed by one alpha; the tensors that are read now."""
    found = [link for link in every(model) if link.tensor in seen]
    factors = {link.tensor: smooth.of_alpha(View(model), link, seen[link.tensor], alpha) for link in found}
    return smooth.smooth(model, found, factors)


def every(model: onnx.ModelProto) -> list[scaling.Link]:
    return [*scaling.links(model), *scaling.multiplied(model, SCHEME)]


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
    assert len(smoothed(model, seen, 0.5)) == 4
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
    np.testing.assert_allclose(seen["l"].largest, before.reshape(-1, 8).max(axis=0), rtol=1e-6)
    assert smoothed(model, seen, 0.8) == ["l"]
    for name, value in run(source, {"x": x}).items():
        np.testing.assert_allclose(run(model, {"x": x})[name], value, rtol=1e-4, atol=1e-4)
    after = smooth.observe(model, scaling.links(model), [(range(3), {"x": x})], tmp_path)["l"].largest
    largest = seen["l"].largest
    assert after.max() / after.min() < 0.5 * largest.max() / largest.min()


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


def test_smoothing_of_layer_norm_and_matmul_by_hand(
    build: Build, prepared: Callable[..., Any], run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    # The normalized rows are (1, -1) and (-1, 1), so channels reach 8 + 0 and 2 + 0; weights reach 2 and 0.5.
    # alpha 0.5: sqrt(8 / 2) = 2 and sqrt(2 / 0.5) = 2, nothing moves. alpha 1: s = 8, 2, relative 1 and 1/4:
    # the second channel of scale and bias is divided by 1/4, its row of the weight multiplied by it.
    values = {"s": np.float32([8, 2]), "b": np.float32([0, 0]), "w": np.float32([[2, 1], [0.5, 0.25]])}
    nodes = [("LayerNormalization", "x s b", "l", {"epsilon": 0.0}), ("MatMul", "l w", "y")]
    source = build(nodes, {"x": [1, 2, 2]}, {"y": None}, values)
    x = np.float32([[[3, 1], [0, 4]]])
    for alpha, scale, weight in (
        (0.5, [8, 2], [[2, 1], [0.5, 0.25]]),
        (1.0, [8, 8], [[2, 1], [0.125, 0.0625]]),
    ):
        model = prepared(source)
        seen = smooth.observe(model, scaling.links(model), [([0], {"x": x})], tmp_path)
        np.testing.assert_allclose(seen["l"].largest, [8, 2], rtol=1e-5)
        smoothed(model, seen, alpha)
        found = {item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer}
        np.testing.assert_allclose(found["s"], scale, rtol=1e-5)
        np.testing.assert_allclose(found["w"], weight, rtol=1e-5)
        np.testing.assert_allclose(run(model, {"x": x})["y"], run(source, {"x": x})["y"], rtol=1e-6)


LAYER_NORM = [("LayerNormalization", "x s b", "l")]
DECOMPOSED = [
    ("ReduceMean", "x", "mean", {"axes": [-1]}), ("Sub", "x mean", "d"), ("Mul", "d d", "dd"),
    ("ReduceMean", "dd", "var", {"axes": [-1]}), ("Add", "var eps", "ve"), ("Sqrt", "ve", "dev"),
    ("Div", "d dev", "n"), ("Mul", "n s", "ns"), ("Add", "b ns", "l"),
]  # fmt: skip
ROOT_MEAN_SQUARE = [
    ("Mul", "x x", "dd"), ("ReduceMean", "dd", "var", {"axes": [-1]}), ("Sqrt", "var", "dev"),
    ("Div", "x dev", "n"), ("Mul", "s n", "l"),
]  # fmt: skip


@pytest.mark.parametrize("form", [LAYER_NORM, DECOMPOSED, ROOT_MEAN_SQUARE])
@pytest.mark.parametrize("residual", [False, True])
def test_every_form_of_normalization_is_smoothed_exactly(
    build: Build,
    prepared: Callable[..., Any],
    run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    form: list[Any],
    residual: bool,
) -> None:
    """The scale takes the factors, or a Mul does where the residual stream reads the normalization too."""
    nodes = [*form, ("MatMul", "l q", "y"), ("MatMul", "l k", "z"), *[("Add", "l x", "r")] * residual]
    values = constants(s=(8,), b=(8,), q=(8, 8), k=(8, 4)) | {"eps": np.float32(1e-5)}
    used = {name: value for name, value in values.items() if any(name in node[1].split() for node in nodes)}
    outputs = {"y": None, "z": None} | ({"r": None} if residual else {})
    source = build(nodes, {"x": ["n", 5, 8]}, outputs, used)
    x = RNG.normal(size=(4, 5, 8)).astype("f4")
    model = prepared(source)
    (link,) = every(model)
    assert (link.tensor, len(link.consumers), bool(link.constants)) == ("l", 2, not residual)
    seen = smooth.observe(model, [link], [(range(4), {"x": x})], tmp_path)
    assert smoothed(model, seen, 0.8) == (["l_smoothed"] if residual else ["l"])
    got = run(model, {"x": x})
    for name, value in run(source, {"x": x}).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max())
    (read,) = {node.input[0] for node in model.graph.node if node.op_type == "MatMul"}
    after = smooth.observe(model, [link], [(range(4), {"x": x})], tmp_path)["l"] if not residual else None
    assert read == ("l_smoothed" if residual else "l")
    assert after is None or np.ptp(np.log(after.largest)) < 0.5 * np.ptp(np.log(seen["l"].largest))


def attention(build: Build, heads: list[int] | None = None) -> onnx.ModelProto:
    """Values of 2 heads of 4, weighted by what the input says, and projected."""
    nodes = [
        ("MatMul", "x v", "v1"), ("Add", "v1 v0", "v2"), ("Reshape", "v2 split", "v3"),
        ("Transpose", "v3", "v4", {"perm": [0, 2, 1, 3]}),
        ("Softmax", "p", "w"), ("MatMul", "w v4", "c1"), ("Transpose", "c1", "c2", {"perm": [0, 2, 1, 3]}),
        ("Reshape", "c2 join", "c3"), ("MatMul", "c3 o", "y"),
    ]  # fmt: skip
    values = constants(v=(8, 8), v0=(8,), o=(8, 6))
    values |= {"split": np.array(heads or [0, 0, 2, 4]), "join": np.array([0, 0, 8])}
    return build(nodes, {"x": [1, 5, 8], "p": [1, 2, 5, 5]}, {"y": None}, values)


def test_values_of_attention_reach_the_projection(
    build: Build, prepared: Callable[..., Any], run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    source = attention(build)
    feeds = {"x": RNG.normal(size=(1, 5, 8)).astype("f4"), "p": RNG.normal(size=(1, 2, 5, 5)).astype("f4")}
    model = prepared(source)
    (link,) = scaling.links(model)
    assert (link.producer, link.tensor, link.constants) == ("v2", "c3", (("v", 1), ("v0", 0)))
    seen = smooth.observe(model, [link], [([0], feeds)], tmp_path)
    smoothed(model, seen, 0.8)
    wanted = run(source, feeds)["y"]
    np.testing.assert_allclose(run(model, feeds)["y"], wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert np.ptp(np.log(smooth.observe(model, [link], [([0], feeds)], tmp_path)["c3"].largest)) < np.ptp(
        np.log(seen["c3"].largest)
    )


def test_a_tensor_that_a_kernel_writes_as_integers_gets_no_mul(
    build: Build, prepared: Callable[..., Any]
) -> None:
    nodes = [("Conv", "x a a0", "c"), ("GlobalAveragePool", "c", "p"), ("Flatten", "p", "f"),
             ("Gemm", "f v v0", "y", {"transB": 1}), ("MatMul", "f w", "z")]  # fmt: skip
    values = constants(a=(4, 3, 3, 3), a0=(4,), v=(6, 4), v0=(6,), w=(4, 5))
    model = prepared(build(nodes, {"x": ["n", 3, 8, 8]}, {"y": None, "z": None}, values))
    assert scaling.multiplied(model, SCHEME) == []


def test_a_factor_is_kept_only_if_it_helps_on_other_samples(
    build: Build, prepared: Callable[..., Any], tmp_path: Path
) -> None:
    """Outliers in one channel ask for smoothing; a channel that is large in unseen samples only does not."""
    values = {"w": RNG.normal(size=(16, 12)).astype("f4")}
    model = prepared(build([("Tanh", "x", "t"), ("Sinh", "t", "s"), ("MatMul", "s w", "y")],
                           {"x": ["n", 8, 16]}, {"y": None}, values))  # fmt: skip
    (link,) = every(model)
    rows = RNG.normal(size=(512, 16)).astype("f4") * np.where(np.arange(16) == 3, 60, 1).astype("f4")
    known = smooth.Channels(np.stack([rows.min(0)] * 2), np.stack([rows.max(0)] * 2), rows)
    found = smooth.search(View(model), link, known, None)
    assert found is not None
    assert 0.5 <= found[0] <= 0.9
    assert found[1][3] == 1
    assert found[1][[0, 1, 2, *range(4, 16)]].max() < 0.3
    even = RNG.uniform(-1, 1, size=(512, 16)).astype("f4")
    same = smooth.Channels(np.stack([even.min(0)] * 2), np.stack([even.max(0)] * 2), even)
    assert smooth.search(View(model), link, same, None) is None
    small, late = known.low.copy(), known.high.copy()
    small[0, :3], late[0, :3] = -1e-3, 1e-3  # the first half hardly saw these
    held = smooth.search(View(model), link, smooth.Channels(small, late, rows), None)
    assert held is None or held[0] <= found[0]
