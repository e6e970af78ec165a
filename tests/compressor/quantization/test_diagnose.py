"""Per-layer signal-to-noise of graphs whose noise is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import DataError
from compressor.quantization.diagnose import compare, sqnr

RNG = np.random.default_rng(4)
W0 = RNG.normal(0, 0.5, (6, 8)).astype(np.float32)
W1 = RNG.normal(0, 0.5, (8, 3)).astype(np.float32)
X = RNG.normal(0, 1, (40, 6)).astype(np.float32)


def model(quantized: str | None = None, scale: float = 0.1, batch: int | str = "N") -> onnx.ModelProto:
    """MatMul, Relu, MatMul; the tensor `quantized` goes through an int8 Q/DQ pair."""
    tensors = {"w0": W0, "w1": W1, "scale": np.float32(scale), "zero": np.int8(0)}
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w1"], ["y"], name="second"),
    ]
    if quantized:
        for node in nodes:
            node.input[:] = [f"{name}_dq" if name == quantized else name for name in node.input]
        place = next((i for i, node in enumerate(nodes) if quantized in node.output), -1) + 1
        nodes[place:place] = [
            helper.make_node("QuantizeLinear", [quantized, "scale", "zero"], [f"{quantized}_q"]),
            helper.make_node("DequantizeLinear", [f"{quantized}_q", "scale", "zero"], [f"{quantized}_dq"]),
        ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def batches(x: NDArray = X, size: int = 7) -> list:
    return [(range(i, min(i + size, len(x))), {"x": x[i : i + size]}) for i in range(0, len(x), size)]


def fake_quantized(values: NDArray, scale: float) -> NDArray:
    return np.clip(np.rint(values / scale), -128, 127) * scale


def test_layers_have_the_noise_that_numpy_finds(tmp_path: Path) -> None:
    found = compare(model(), model("r"), batches(), tmp_path, limit=32)
    assert found["samples"] == 32
    first, second = found["layers"]
    assert {key: first[key] for key in ("name", "op", "tensor", "sqnr_db")} == {
        "name": "first", "op": "MatMul", "tensor": "a", "sqnr_db": 200.0,
    }  # fmt: skip
    r = np.maximum(X[:32] @ W0, 0)
    wanted, got = r @ W1, fake_quantized(r, 0.1) @ W1
    expected = 10 * np.log10((wanted**2).sum() / ((wanted - got) ** 2).sum())
    assert (second["name"], second["op"], second["tensor"]) == ("second", "MatMul", "y")
    assert second["sqnr_db"] == pytest.approx(expected, abs=0.1)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_bad_sample_is_passed_over(tmp_path: Path) -> None:
    x = X.copy()
    x[3, 0] = np.nan
    got = compare(model(), model("r"), batches(x), tmp_path)
    assert got == compare(model(), model("r"), batches(np.delete(x, 3, 0)), tmp_path)
    with pytest.raises(DataError, match="NaN"):
        compare(model(), model("r"), batches(np.full_like(x, np.nan)), tmp_path)


def test_a_dead_layer_and_an_overflow_stay_finite(tmp_path: Path) -> None:
    dead = compare(model(), model("r", scale=1e30), batches(), tmp_path)
    assert dead["layers"][1]["sqnr_db"] == pytest.approx(0, abs=1e-6)
    huge = compare(model(), model("x", scale=1e19), batches(X * np.float32(1e19)), tmp_path)
    assert 0 < huge["layers"][0]["sqnr_db"] < 20


def test_a_fixed_batch(tmp_path: Path) -> None:
    free = compare(model(), model("x"), batches(X[:32]), tmp_path)
    fixed = compare(model(batch=8), model("x", batch=8), batches(X[:32]), tmp_path)
    for one, other in zip(free["layers"], fixed["layers"], strict=True):
        assert one["sqnr_db"] == pytest.approx(other["sqnr_db"], abs=0.01)


def test_nothing_stays_behind_in_the_folder(tmp_path: Path) -> None:
    compare(model(), model("x"), batches(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sqnr_is_capped() -> None:
    assert sqnr(100, 1) == pytest.approx(20)
    assert sqnr(1, 0) == sqnr(0, 0) == 200
    assert sqnr(0, 1) == -200
    assert sqnr(1e300, 1e-300) == 200
