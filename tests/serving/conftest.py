"""Small engines, built node by node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


class Graph:
    """Collects nodes and constants of a graph whose inputs and outputs are float."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def quantized(self, name: str, scale: float = 0.05, zero: int = 128) -> str:
        """A Q/DQ pair on an activation (uint8)."""
        scales = [
            self.constant(f"{name}_s", np.float32(scale)),
            self.constant(f"{name}_z", np.uint8(zero)),
        ]
        self.node("QuantizeLinear", [name, *scales], f"{name}_q")
        return self.node("DequantizeLinear", [f"{name}_q", *scales], f"{name}_dq")

    def weight(self, name: str, shape: tuple[int, ...], value: int | None = None) -> str:
        """An int8 weight with a scale per output channel, dequantized; no pair saturates."""
        stored = self.rng.integers(-63, 64, shape) if value is None else np.full(shape, value)
        self.constant(f"{name}_i", stored.astype(np.int8))
        self.constant(f"{name}_s", np.full(shape[0], 0.01, np.float32))
        self.constant(f"{name}_z", np.zeros(shape[0], np.int8))
        return self.node("DequantizeLinear", [f"{name}_i", f"{name}_s", f"{name}_z"], f"{name}_dq", axis=0)

    def floats(self, name: str, *shape: int) -> str:
        return self.constant(name, self.rng.normal(0, 0.1, shape).astype(np.float32))

    def save(
        self, path: Path, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], opset: int = 17
    ) -> Path:
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
            self.constants,
        )
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
        return path


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def mixed_engine(tmp_path: Path) -> Path:
    """Two integer convolutions, an integer addition and Gemm, and one Conv and one MatMul that stay float."""
    g = Graph()
    x = g.quantized("x")
    g.node("Relu", [g.node("Conv", [x, g.weight("w1", (8, 3, 3, 3))], "conv1", pads=[1, 1, 1, 1])], "relu")
    first = g.quantized("relu", zero=0)
    g.node("Conv", [first, g.weight("w2", (8, 8, 3, 3))], "conv2", pads=[1, 1, 1, 1])
    g.node("Add", [first, g.quantized("conv2")], "add")
    g.node("Conv", [g.quantized("add"), g.weight("w3", (16, 8, 1, 1))], "conv3")
    g.node("Erf", ["conv3"], "erf")
    g.node("Flatten", [g.node("GlobalAveragePool", ["erf"], "pool")], "flat")
    g.node("Gemm", [g.quantized("flat"), g.weight("w4", (10, 16))], "fc", transB=1)
    g.node("MatMul", [g.quantized("fc"), g.floats("w5", 10, 10)], "y")
    return g.save(tmp_path / "mixed.onnx", {"x": ["N", 3, 16, 16]}, {"y": ["N", 10]})


@pytest.fixture
def make_mlp(tmp_path: Path) -> Callable[..., Path]:
    """Writes a stack of MatMul and Tanh of a given depth and width."""

    def write(name: str, depth: int, width: int = 64, batch: Any = "N") -> Path:
        g = Graph()
        x = "x"
        for layer in range(depth):
            g.node("MatMul", [x, g.floats(f"w{layer}", width, width)], f"m{layer}")
            x = g.node("Tanh", [f"m{layer}"], "y" if layer == depth - 1 else f"t{layer}")
        return g.save(tmp_path / name, {"x": [batch, width]}, {"y": [batch, width]})

    return write


@pytest.fixture
def reference(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A data reference to arrays, written as an .npz."""

    def write(batch: int = 4, **arrays: Any) -> dict[str, Any]:
        from compressor.data import describe
        from compressor.model import TensorSpec

        path = tmp_path / "data.npz"
        np.savez(path, **arrays)
        inputs = [
            asdict(TensorSpec(name, array.dtype.name, ("batch", *array.shape[1:])))
            for name, array in arrays.items()
            if name != "label"
        ]
        facts = describe(str(path), None, inputs)
        return {
            "source": str(path),
            "preprocess": None,
            "binding": facts["binding"],
            "indices": None,
            "batch": batch,
            "inputs": inputs,
            "sha256": facts["sha256"],
            "n": facts["n"],
        }

    return write


@pytest.fixture
def scalar_engine(graph: Graph, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """An engine with an input that is a single number, and six samples for it."""
    from compressor.data import describe

    graph.node("MatMul", ["x", graph.floats("w", 4, 3)], "scores")
    graph.node("Mul", ["scores", "gain"], "y")
    path = graph.save(tmp_path / "scalar.onnx", {"x": [1, 4], "gain": []}, {"y": [1, 3]})
    source = tmp_path / "samples.npz"
    np.savez(source, x=np.ones((6, 4), np.float32), gain=np.arange(6, dtype=np.float32))
    inputs = [
        {"name": "x", "dtype": "float32", "shape": [1, 4]},
        {"name": "gain", "dtype": "float32", "shape": []},
    ]
    facts = describe(str(source), None, inputs)
    shared = {"preprocess": None, "indices": None, "batch": 1, "inputs": inputs}
    return path, {"source": str(source), **shared, **{key: facts[key] for key in ("binding", "sha256", "n")}}
