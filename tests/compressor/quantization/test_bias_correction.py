"""Biases that make good for mean errors, fast and full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compressor.errors import DataError
from compressor.quantization import bias_correction, full_bias_correction, moments, placement, qdq
from compressor.quantization.corrections import Corrections
from compressor.quantization.layers import weight_uses
from compressor.quantization.scheme import named
from compressor.quantization.segments import write_segments
from compressor.quantization.view import View

RNG = np.random.default_rng(10)
SCHEME = named("ort-x86-avx2")
X = np.abs(RNG.normal(size=(48, 4, 8, 8))).astype(np.float32)


def test_the_shift_by_hand() -> None:
    # Group 0: (1.2 - 1) x 10 + (0.9 - 1) x 5 = 1.5; group 1: (0.5 - 0) x 2 = 1.
    rows, rounded = np.array([[1.2, 0.9], [0.5, 3.0]]), np.array([[1.0, 1.0], [0.0, 3.0]])
    found = bias_correction.shift(rows, rounded, np.array([[10.0, 5.0], [2.0, 7.0]]))
    np.testing.assert_allclose(found, [1.5, 1.0])


def test_layers_without_a_bias_get_one(
    build: Callable[..., onnx.ModelProto], prepared: Callable[..., Any], run: Callable[..., dict[str, Any]]
) -> None:
    model = prepared(net(build))
    wanted = run(model, {"x": X})["y"]
    bias_correction.add_biases(model)
    assert [len(node.input) for node in model.graph.node if node.op_type in ("Conv", "Gemm")] == [3] * 4
    np.testing.assert_allclose(run(model, {"x": X})["y"], wanted, rtol=1e-5, atol=1e-6)


def net(build: Callable[..., onnx.ModelProto]) -> onnx.ModelProto:
    """Depthwise layers, whose few weights round badly, behind one another."""
    nodes = [
        ("Conv", "x a", "c1", {"group": 4, "pads": [1, 1, 1, 1]}), ("Relu", "c1", "r1"),
        ("Conv", "r1 b", "c2"), ("Relu", "c2", "r2"),
        ("Conv", "r2 d", "c3", {"group": 16, "pads": [1, 1, 1, 1]}), ("Relu", "c3", "r3"),
        ("GlobalAveragePool", "r3", "p"), ("Flatten", "p", "f"), ("Gemm", "f v", "y"),
    ]  # fmt: skip
    shapes = {"a": (4, 1, 3, 3), "b": (16, 4, 1, 1), "d": (16, 1, 3, 3), "v": (16, 5)}
    values = {name: RNG.standard_t(2, size=shape).astype(np.float32) for name, shape in shapes.items()}
    return build(nodes, {"x": ["n", 4, 8, 8]}, {"y": ["n", 5]}, values)


def quantized(model: onnx.ModelProto, folder: Path, x: np.ndarray = X, **choices: Any) -> onnx.ModelProto:
    from compressor.quantization.activations import Activations, Sample

    found = moments.gather(model, list(weight_uses(View(model), SCHEME)), batches(x), folder)
    names = placement.tensors(model, SCHEME)
    activations = Activations(write_segments(model, names, folder, "ranges"), names)
    ranges = {
        name: (float(value.min()), float(value.max())) for name, value in activations.run(Sample(0, {"x": x}))
    }
    view = View(model)
    return qdq.write(
        view, placement.place(view, SCHEME), ranges, SCHEME, Corrections(moments=found, **choices)
    )


def batches(x: np.ndarray = X) -> list[Any]:
    return [(range(len(x)), {"x": x})]


def bias_errors(model: onnx.ModelProto, wanted: np.ndarray, run: Callable[..., dict[str, Any]]) -> np.ndarray:
    return np.abs((run(model, {"x": X}, fused=False)["y"] - wanted).mean(axis=0))


@pytest.fixture
def case(
    build: Callable[..., onnx.ModelProto], prepared: Callable[..., Any], run: Callable[..., dict[str, Any]]
) -> tuple[Callable[[], onnx.ModelProto], np.ndarray]:
    source = net(build)

    def fresh() -> onnx.ModelProto:
        model = prepared(source)
        bias_correction.add_biases(model)
        return model

    return fresh, run(source, {"x": X})["y"]


def test_each_correction_brings_the_mean_closer(
    case: Any, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    fresh, wanted = case
    plain = bias_errors(quantized(fresh(), tmp_path), wanted, run)
    fast = bias_errors(quantized(fresh(), tmp_path, bias=True), wanted, run)
    model = quantized(fresh(), tmp_path)
    assert full_bias_correction.correct(fresh(), model, batches, tmp_path) == 4
    onnx.checker.check_model(model)
    full = bias_errors(model, wanted, run)
    assert fast.sum() < 0.7 * plain.sum()
    assert full.sum() < 0.3 * plain.sum()
    assert not list(tmp_path.glob("corrected-*")) + list(tmp_path.glob("reference-*"))


def test_full_correction_sees_the_layers_before_corrected(case: Any, tmp_path: Path) -> None:
    fresh, _ = case
    model = quantized(fresh(), tmp_path)
    full_bias_correction.correct(fresh(), model, batches, tmp_path)
    again = full_bias_correction.shifts(fresh(), model, batches, tmp_path)
    first = full_bias_correction.shifts(fresh(), quantized(fresh(), tmp_path), batches, tmp_path)
    for name, shift in again.items():
        assert np.abs(shift).max() < 0.15 * np.abs(first[name]).max() + 1e-4


def test_chance_is_not_corrected() -> None:
    errors = np.stack([np.tile([1.0, -1.0], 8), np.full(16, 0.5), np.r_[np.zeros(15), 1.6]], axis=1)
    # mean 0 of +-1; a certain 0.5; 0.1 whose chance (0.16 / 16 = 0.01) is as large as its square
    np.testing.assert_allclose(full_bias_correction._certain(errors), [0, 0.5, 0], atol=1e-12)


def test_full_correction_wants_a_usable_sample(case: Any, tmp_path: Path) -> None:
    fresh, _ = case
    bad = [([0], {"x": np.full((1, 4, 8, 8), np.nan, np.float32)})]
    with pytest.raises(DataError, match="no sample is free"):
        full_bias_correction.correct(fresh(), quantized(fresh(), tmp_path), lambda: bad, tmp_path)


def test_every_correction_helps_a_small_net(
    build: Callable[..., onnx.ModelProto],
    prepared: Callable[..., Any],
    run: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Inputs that go together, and weights of one sign in many pairs."""
    nodes = [("Conv", "x a", "c1"), ("Relu", "c1", "r1"), ("Conv", "r1 b", "y")]
    values = {name: RNG.normal(0.3, 1, (4, 4, 3, 3)).astype(np.float32) for name in "ab"}
    x = np.repeat(np.repeat(X, 3, axis=2), 3, axis=3) + 1
    source = build(nodes, {"x": ["n", 4, 24, 24]}, {"y": ["n", 4, 20, 20]}, values)
    wanted = run(source, {"x": x})["y"]

    def sqnr(**choices: Any) -> float:
        model = prepared(source)
        bias_correction.add_biases(model)
        noise = run(quantized(model, tmp_path, x, **choices), {"x": x}, fused=False)["y"] - wanted
        return float(10 * np.log10(np.square(wanted).sum() / np.square(noise).sum()))

    plain, fast, gptq = sqnr(), sqnr(bias=True), sqnr(rounding="gptq")
    both = sqnr(rounding="gptq", bias=True)
    assert fast > plain + 1
    assert gptq > plain + 1
    assert both > max(fast, gptq) - 0.1
