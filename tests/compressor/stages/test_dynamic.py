"""Dynamic int8: what becomes an integer layer, what stays float and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor.errors import UnsupportedError, UsageError
from compressor.quantization.pairs import worst_pair
from compressor.quantization.spread import relative_error
from compressor.stages import dynamic

Json = dict[str, Any]


def measured(folder: Path, **errors: float) -> str:
    """A folder as `calibrate` leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / "spread.json").write_text(json.dumps(errors))
    return str(folder)


def run(model: Json, folder: Path, **options: Any) -> tuple[Json, onnx.ModelProto]:
    folder.mkdir(exist_ok=True)
    found = dynamic.run(model, str(folder), **{"scheme": "ort-x86-avx2", **options})
    return found["facts"], onnx.load(folder / found["path"])


def test_all_layers_run_in_integers(
    mlp: Json, sequences: Any, tmp_path: Path, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    facts, _ = run(mlp, tmp_path / "out", ranges=measured(tmp_path / "seen", x=0.001))
    assert facts["quantized"] == 3
    assert not facts["float"]
    want, got = answer(mlp["path"], sequences), answer(tmp_path / "out/model.onnx", sequences)
    assert sqnr(want, got) > 30
    assert (tmp_path / "out/model.onnx").stat().st_size < Path(mlp["path"]).stat().st_size / 2.5


def test_runtime_fuses_the_layers(mlp: Json, tmp_path: Path) -> None:
    import onnxruntime

    run(mlp, tmp_path / "out", ranges=measured(tmp_path / "seen"))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(
        str(tmp_path / "out/model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    ops = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert ops.count("DynamicQuantizeMatMul") == 3
    assert "MatMulInteger" not in ops


def test_without_data_layers_on_the_models_input_stay_float(mlp: Json, tmp_path: Path) -> None:
    facts, graph = run(mlp, tmp_path / "out")
    assert facts["quantized"] == 2
    assert [(item["name"], item["op"]) for item in facts["float"]] == [("m0", "MatMul")]
    assert "pass data" in facts["float"][0]["reason"]
    types = {item.name: item.data_type for item in graph.graph.initializer}
    assert types["w0_float16"] == onnx.TensorProto.FLOAT16


def test_inputs_that_lose_much_in_8_bits_stay_float(mlp: Json, tmp_path: Path) -> None:
    facts, _ = run(mlp, tmp_path / "out", ranges=measured(tmp_path / "seen", x=0.001, r0=0.3))
    assert [item["name"] for item in facts["float"]] == ["m1"]
    assert "30%" in facts["float"][0]["reason"]


def test_power_spectra_lose_much_and_normal_values_little() -> None:
    rng = np.random.default_rng(0)
    assert relative_error(rng.normal(size=(1, 50, 40))) < 1e-3
    loud = rng.normal(size=(1, 50, 40)) ** 2 * np.logspace(-6, 0, 50)[:, None]
    assert relative_error(loud) > 0.1
    assert relative_error(np.zeros((1, 4))) == 0


def test_weights_are_safe_where_products_are_added_in_pairs(mlp: Json, tmp_path: Path) -> None:
    _, graph = run(mlp, tmp_path / "out", scheme="ort-x86-avx2", ranges=measured(tmp_path / "seen"))
    codes = [numpy_helper.to_array(item) for item in graph.graph.initializer if item.data_type == 3]
    matrices = [item for item in codes if item.ndim == 2]
    assert len(matrices) == 3
    assert all(worst_pair(matrix.T.astype(np.float64)).max() <= 128 for matrix in matrices)


def test_lstm_has_a_kernel_and_gru_has_none(
    model_of: Callable[..., Json], tmp_path: Path, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.normal(0, 0.2, (1, 128, 32)).astype("f4"),
        "r": rng.normal(0, 0.2, (1, 128, 32)).astype("f4"),
        "b": rng.normal(0, 0.2, (1, 256)).astype("f4"),
        "gw": rng.normal(0, 0.2, (1, 96, 32)).astype("f4"),
        "gr": rng.normal(0, 0.2, (1, 96, 32)).astype("f4"),
        "axis": np.array([1]),
    }
    nodes = [
        ("LSTM", "x w r b", "h", {"hidden_size": 32}),
        ("Squeeze", "h axis", "s"),
        ("GRU", "s gw gr", "y", {"hidden_size": 32}),
    ]
    model = model_of(nodes, {"x": ["t", "n", 32]}, ["y"], constants)
    facts, graph = run(model, tmp_path / "out", ranges=measured(tmp_path / "seen"))
    assert [node.op_type for node in graph.graph.node if node.name == "h"] == ["DynamicQuantizeLSTM"]
    assert [(item["op"], facts["quantized"]) for item in facts["float"]] == [("GRU", 1)]
    feeds = {"x": rng.normal(size=(7, 2, 32)).astype("f4")}
    assert sqnr(answer(model["path"], feeds), answer(tmp_path / "out/model.onnx", feeds)) > 25


def test_convolutional_nets_are_refused(net: Path, model_of: Callable[..., Json], tmp_path: Path) -> None:
    from compressor import onnx_files
    from compressor.model import Model

    specs = onnx_files.specs(onnx_files.read(net / "net.onnx"))
    model = Model("onnx", net / "net.onnx", *specs, "0" * 64, 0, "onnx").json()
    with pytest.raises(UnsupportedError, match=r"of its compute is convolution.*8x slower.*use int8"):
        run(model, tmp_path / "out")


def test_nothing_to_quantize_is_said(model_of: Callable[..., Json], tmp_path: Path) -> None:
    model = model_of([("Relu", "x", "y")], {"x": ["n", 4]}, ["y"], {})
    facts, _ = run(model, tmp_path / "out")
    assert facts["quantized"] == 0
    assert "no MatMul, Gemm or LSTM" in facts["reason"]


def test_excluded_nodes_stay_as_they_are(mlp: Json, tmp_path: Path) -> None:
    facts, graph = run(mlp, tmp_path / "out", ranges=measured(tmp_path / "seen"), exclude=["m1"])
    assert facts["float"][0]["reason"] == "left in float on request"
    assert "w1" in {item.name for item in graph.graph.initializer}
    with pytest.raises(UsageError, match="no node 'nowhere'"):
        run(mlp, tmp_path / "again", exclude=["nowhere"])


def test_calibrate_measures_the_inputs_of_layers(
    mlp: Json, tmp_path: Path, reference: Callable[..., Json]
) -> None:
    x = np.random.default_rng(0).normal(size=(20, 10, 64)).astype("f4")
    (tmp_path / "seen").mkdir()
    found = dynamic.calibrate(mlp, reference(x, ["n", "t", 64]), str(tmp_path / "seen"))
    assert found["tensors"] == 3
    assert 0 < found["worst"] < 0.01
    assert run(mlp, tmp_path / "out", ranges=str(tmp_path / "seen"))[0]["quantized"] == 3
