"""Small ONNX models for the stages, and the runtime to judge what they make of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from compressor import onnx_files
from compressor.model import Model


def _graph(
    nodes: list[tuple[Any, ...]], inputs: dict[str, Any], outputs: list[str], constants: dict[str, Any]
) -> onnx.ModelProto:
    """nodes: (op, inputs, outputs, attributes); inputs: name -> shape, of float32 or (shape, dtype)."""

    def value(name: str, shape: Any) -> onnx.ValueInfoProto:
        sizes, kind = shape if isinstance(shape, tuple) else (shape, "float32")
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), sizes)

    body = helper.make_graph(
        [
            helper.make_node(
                op, ins.split(" "), outs.split(" "), name=outs.split(" ")[0], **(rest or [{}])[0]
            )
            for op, ins, outs, *rest in nodes
        ],
        "graph",
        [value(*item) for item in inputs.items()],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A graph (see `_graph`) as a file, in the form in which stages take it."""

    def make(*graph: Any) -> dict[str, Any]:
        path = tmp_path / "source.onnx"
        onnx.save(_graph(*graph), path)
        proto = onnx_files.read(path)
        specs = onnx_files.specs(proto)
        return Model("onnx", path, *specs, "0" * 64, onnx_files.parameters(proto), "onnx").json()

    return make


@pytest.fixture
def answer() -> Callable[..., np.ndarray]:
    """The first output of a file."""

    def run(path: Path | str, feeds: dict[str, Any]) -> np.ndarray:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)[0]

    return run


@pytest.fixture
def sqnr() -> Callable[[np.ndarray, np.ndarray], float]:
    """Signal to noise in dB."""
    return lambda want, got: float(10 * np.log10((want**2).sum() / max(((got - want) ** 2).sum(), 1e-30)))


@pytest.fixture
def mlp(model_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Two layers on sequences and one on their mean: MatMul + bias, MatMul, Gemm with a transposed weight."""
    rng = np.random.default_rng(0)
    constants = {
        "w0": rng.normal(0, 0.2, (64, 96)).astype("f4"),
        "b0": rng.normal(0, 0.2, 96).astype("f4"),
        "w1": rng.normal(0, 0.2, (96, 64)).astype("f4"),
        "w2": rng.normal(0, 0.2, (32, 64)).astype("f4"),
        "b2": rng.normal(0, 0.2, 32).astype("f4"),
        "axis": np.array([1]),
    }
    nodes = [
        ("MatMul", "x w0", "m0"),
        ("Add", "m0 b0", "a0"),
        ("Relu", "a0", "r0"),
        ("MatMul", "r0 w1", "m1"),
        ("Tanh", "m1", "t1"),
        ("ReduceMean", "t1 axis", "mean", {"keepdims": 0}),
        ("Gemm", "mean w2 b2", "y", {"transB": 1}),
    ]
    return model_of(nodes, {"x": ["n", "t", 64]}, ["y"], constants)


@pytest.fixture
def sequences() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(3, 10, 64)).astype("f4")}


@pytest.fixture
def reference(tmp_path: Path) -> Callable[[np.ndarray, list[Any]], dict[str, Any]]:
    """A data reference to samples of the one input `x` of a model, whose shape is given."""
    from compressor import data

    def refer(x: np.ndarray, shape: list[Any]) -> dict[str, Any]:
        source = str(tmp_path / "x.npz")
        np.savez(source, x=x)
        common = {
            "source": source,
            "preprocess": None,
            "inputs": [{"name": "x", "dtype": "float32", "shape": shape}],
        }
        facts = data.describe_task(**common, folder=str(tmp_path))
        rest = {"binding": facts["binding"], "sha256": facts["sha256"]}
        return {**common, **rest, "indices": None, "batch": 8, "n": len(x)}

    return refer
