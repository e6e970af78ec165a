"""The graph of switches against graphs that were really quantized, and layers that must stay float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from compressor.quantization import calibrate, graph, mixed, placement, qdq, sensitivity
from compressor.quantization.scheme import named
from compressor.quantization.switched import merge
from compressor.quantization.view import View

SCHEME = named("ort-x86-avx2")


def run(model: onnx.ModelProto, x: np.ndarray, *, simulate: bool = True) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if simulate:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.fixture(scope="module")
def made(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(float graph, its Q/DQ form without some nodes, samples)."""
    folder = tmp_path_factory.mktemp("ranges")
    data = {
        "source": str(net / "data.npz"), "preprocess": None, "binding": {"image": "x"}, "indices": None,
        "batch": 32, "n": 120, "sha256": "0",
        "inputs": [{"name": "image", "dtype": "float32", "shape": ["N", 3, 12, 12]}],
    }  # fmt: skip
    model = {"path": str(net / "net.onnx"), "sha256": "0"}
    calibrate.calibrate(model, data, SCHEME.name, str(folder))

    def quantized(exclude: tuple[str, ...] = ()) -> onnx.ModelProto:
        view = View(graph.prepare(net / "net.onnx"))
        roots = placement.place(view, SCHEME).pairs
        ranges = calibrate.ranges(folder, "minmax")
        placed = placement.place(view, SCHEME, frozenset(exclude))
        return qdq.write(view, placed, {name: ranges[root] for name, root in roots.items()}, SCHEME)

    return (lambda: graph.prepare(net / "net.onnx")), quantized, np.load(net / "data.npz")["x"]


LAYERS = ("first", "second", "head")


def test_all_switches_give_the_quantized_graph_and_none_the_float_one(made: Any) -> None:
    prepared, quantized, x = made
    merged, edges = merge(prepared(), quantized())
    onnx.checker.check_model(merged, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        merged.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for on, expected in ((False, prepared()), (True, quantized())):
        feeds = {"image": x, "layer_switches": np.full(len(edges), on)}
        np.testing.assert_array_equal(session.run(None, feeds)[0], run(expected, x))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_alone_is_what_a_graph_with_that_layer_alone_gives(made: Any, layer: str) -> None:
    prepared, quantized, x = made
    simulator = sensitivity.Simulator(prepared(), quantized())
    simulator.batches = [{"image": x}]
    others = tuple(name for name in (*LAYERS, "residual", "pool") if name != layer)
    wanted, got = run(prepared(), x), run(quantized(others), x)
    behind = {"first": {"c0", "r0"}, "second": {"c1"}, "head": set()}[layer]
    edges = [
        place
        for place, edge in enumerate(simulator.edges)
        if edge.reader == layer or edge.tensor in behind
    ]  # fmt: skip
    error = np.square(got - wanted, dtype=np.float64).sum() / np.square(wanted, dtype=np.float64).sum()
    assert error > 0
    assert simulator.error(edges) == pytest.approx(error, rel=1e-3)


def test_the_task_finds_every_tensor_and_goes_on_where_it_was_killed(
    made: Any, net: Path, tmp_path: Path
) -> None:
    _, quantized, _ = made
    onnx.save(quantized(), tmp_path / "quantized.onnx")
    data = {
        "source": str(net / "data.npz"), "preprocess": None, "binding": {"image": "x"}, "indices": None,
        "batch": 32, "n": 120, "sha256": "0",
        "inputs": [{"name": "image", "dtype": "float32", "shape": ["N", 3, 12, 12]}],
    }  # fmt: skip
    arguments = (
        {"path": str(net / "net.onnx"), "sha256": "1"},
        {"path": str(tmp_path / "quantized.onnx"), "sha256": "2"},
        data,
        str(tmp_path),
    )
    found = sensitivity.sensitivity(*arguments)
    assert set(found["weights"]) == set(LAYERS)
    assert {"image", "r0", "r1"} <= set(found["activations"])
    assert all(error >= 0 for error in (*found["weights"].values(), *found["activations"].values()))
    parts = sum(found["weights"].values()) + sum(found["activations"].values())
    assert found["together"] == pytest.approx(parts, rel=0.7)
    from compressor.store import digest, write_json

    key = digest("1", "2", found["samples"])
    write_json(tmp_path / "sensitivity.json", {"key": key, "errors": [["weight", "first", 0.5]]})
    again = sensitivity.sensitivity(*arguments)
    assert again["weights"] == {**found["weights"], "first": 0.5}
    write_json(tmp_path / "sensitivity.json", {"key": "other", "errors": [["weight", "first", 0.5]]})
    assert sensitivity.sensitivity(*arguments)["weights"] == found["weights"]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_left_in_float_is_not_quantized_again_by_the_runtime(made: Any, layer: str) -> None:
    """Without `keep_float` onnxruntime rounds the weights of "second" to int8, one scale for all channels."""
    _, quantized, x = made
    model = quantized((layer,))
    onnx.checker.check_model(model)
    np.testing.assert_allclose(run(model, x, simulate=False), run(model, x), atol=0.05)
    nodes = _optimized(model)
    integers = [node.op_type for node in nodes if node.op_type in ("QLinearConv", "QGemm")]
    assert len(integers) == 2
    assert sum(node.op_type in ("Conv", "FusedConv", "Gemm", "FusedGemm") for node in nodes) == 1


def _optimized(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    import tempfile

    options = onnxruntime.SessionOptions()
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        options.log_severity_level = 4
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(onnx.load(options.optimized_model_filepath).graph.node)


def test_kernels_are_found_by_the_names_that_runtimes_give_them(made: Any) -> None:
    prepared, _, _ = made
    kernels = [
        {"name": "image_quantized", "op": "QuantizeLinear", "ms": 9.0},
        {"name": "Transpose_token_3", "op": "Transpose", "ms": 0.5},
        {"name": "first_token_1", "op": "QLinearConv", "ms": 1.0},
        {"name": "r0_nchwc", "op": "Conv", "ms": 2.0},
        {"name": "c1_nchwc", "op": "Conv", "ms": 3.0},
        {"name": "residual", "op": "QLinearAdd", "ms": 4.0},
        {"name": "head_quant", "op": "QGemm", "ms": 5.0},
    ]
    assert mixed.attribute(prepared(), kernels) == {
        "first": 3.5,
        "second": 3.0,
        "residual": 4.0,
        "head": 5.0,
    }
