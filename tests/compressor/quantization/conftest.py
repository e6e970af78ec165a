"""Small hand-built ONNX graphs, and the runtime to judge them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from compressor.quantization import graph, placement, qdq
from compressor.quantization.scheme import named
from compressor.quantization.view import View

Node = tuple[Any, ...]


def _build(
    nodes: list[Node],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    constants: dict[str, Any] | None = None,
    opset: int = 17,
    ir: int = 8,
    kind: str = "float32",
) -> onnx.ModelProto:
    """nodes: (op, inputs, outputs, attributes); inputs and outputs: name -> shape, or (shape, dtype);
    an output's shape may be None."""

    def value(name: str, shape: Any) -> onnx.ValueInfoProto:
        size, dtype = shape if isinstance(shape, tuple) else (shape, kind)
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), size)

    made = [
        helper.make_node(
            op, ins.split(" "), outs.split(" "), name=f"{op}_{place}", **(rest[0] if rest else {})
        )
        for place, (op, ins, outs, *rest) in enumerate(nodes)
    ]
    body = helper.make_graph(
        made,
        "graph",
        [value(*item) for item in inputs.items()],
        [value(*item) for item in outputs.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    return model if all(outputs.values()) or opset < 7 else onnx.shape_inference.infer_shapes(model)


@pytest.fixture(scope="session")
def build() -> Callable[..., onnx.ModelProto]:
    return _build


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """A model written to a file and prepared."""

    def prepare(model: onnx.ModelProto) -> onnx.ModelProto:
        onnx.save(model, tmp_path / "source.onnx")
        return graph.prepare(tmp_path / "source.onnx")

    return prepare


@pytest.fixture(scope="session")
def run() -> Callable[..., dict[str, Any]]:
    """Outputs by name of a model in onnxruntime; fused=False opens it without any optimization."""

    def call(model: onnx.ModelProto, feeds: dict[str, Any], fused: bool = True) -> dict[str, Any]:
        session = _session(model, fused)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))

    return call


@pytest.fixture
def fused_operators(tmp_path: Path) -> Callable[[onnx.ModelProto], Counter[str]]:
    """The operators that onnxruntime makes of a model."""

    def count(model: onnx.ModelProto) -> Counter[str]:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 4
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)

    return count


@pytest.fixture
def quantize(prepared: Callable[..., onnx.ModelProto]) -> Callable[..., onnx.ModelProto]:
    """A model quantized with the ranges that it has on `feeds`."""

    def call(
        model: onnx.ModelProto,
        feeds: dict[str, Any],
        scheme: str = "ort-x86-avx2",
        exclude: tuple[str, ...] = (),
    ) -> onnx.ModelProto:
        ready, chosen = prepared(model), named(scheme)
        ranges = _ranges(ready, placement.tensors(ready, chosen), feeds)
        view = View(ready)
        placed = placement.place(view, chosen, frozenset(exclude))
        written = qdq.write(view, placed, ranges, chosen)
        onnx.checker.check_model(written, full_check=True)
        return written

    return call


def _ranges(model: onnx.ModelProto, names: list[str], feeds: dict[str, Any]) -> dict[str, Any]:
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    made = {output for node in model.graph.node for output in node.output}
    known = {output.name for output in model.graph.output}
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name in made - known)
    session = _session(watched, fused=False)
    inside = [name for name in names if name in made]
    values = {**feeds, **(dict(zip(inside, session.run(inside, feeds), strict=True)) if inside else {})}
    return {name: (float(values[name].min()), float(values[name].max())) for name in names}


def _session(model: onnx.ModelProto, fused: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not fused:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
