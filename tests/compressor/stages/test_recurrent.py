"""Static int8 of networks with recurrent layers, whose weights are only stored, as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor.stages import quantize

Json = dict[str, Any]
SCHEME = "ort-x86-avx2"
STEPS, INPUTS, HIDDEN = 20, 16, 32
CORRECTED = {"rounding": "gptq", "bias_correction": "fast"}


@pytest.fixture
def network(model_of: Callable[..., Json]) -> Callable[..., Json]:
    """An LSTM behind a product that changes nothing, and a layer of 10 outputs on its last step."""

    def make(w: np.ndarray, r: np.ndarray) -> Json:
        rng = np.random.default_rng(0)
        v = rng.normal(0, 0.3, (HIDDEN, 10)).astype("f4")
        constants = {"w": w.astype("f4"), "r": r.astype("f4"), "v": v, "one": np.float32(1)}
        constants |= {"axis": np.int64([0])}
        nodes = [
            ("Mul", "x one", "m"), ("Transpose", "m", "t", {"perm": [1, 0, 2]}),
            ("LSTM", "t w r", "states last", {"hidden_size": HIDDEN}), ("Squeeze", "last axis", "s"),
            ("MatMul", "s v", "y"),
        ]  # fmt: skip
        return model_of(nodes, {"x": ["n", STEPS, INPUTS]}, ["y"], constants)

    return make


def stored(
    model: Json, x: np.ndarray, folder: Path, scheme: str = SCHEME, **parameters: Any
) -> tuple[Json, Path]:
    """The facts and the file of a model through all tasks of the stage; x has the samples to learn from."""
    from compressor import data as sources

    for name in ("ranges", "moments"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    np.savez(folder / "x.npz", x=x)
    given = {"source": str(folder / "x.npz"), "preprocess": None, "inputs": model["inputs"]}
    described = sources.describe_task(**given, folder=str(folder))
    rest = {"binding": described["binding"], "sha256": described["sha256"]}
    data = {**given, **rest, "indices": None, "batch": 16, "n": len(x)}
    quantize.calibrate(model, data, scheme, f"{folder}/ranges")
    if quantize.needs(parameters):
        quantize.moments(model, data, scheme, f"{folder}/moments")
        parameters["moments"] = f"{folder}/moments"
    found = quantize.run(model, str(folder), f"{folder}/ranges", scheme, **parameters)
    return found["facts"], folder / found["path"]


def with_weights_of(model: Json, path: Path, made: Path) -> Path:
    """The float model with the LSTM's weights that the engine file at `path` gives it."""
    proto, engine = onnx.load(model["path"]), onnx.load(path)
    values = {item.name: numpy_helper.to_array(item) for item in engine.graph.initializer}
    for item in proto.graph.initializer:
        if item.name in ("w", "r"):
            half = values.get(f"{item.name}_float16")
            codes = values.get(f"{item.name}_quantized")
            value = half if codes is None else codes * values[f"{item.name}_factor"]
            item.CopyFrom(numpy_helper.from_array(np.asarray(value, "f4"), item.name))
    onnx.save(proto, made)
    return made


def kinds(path: Path) -> dict[str, int]:
    return {item.name: item.data_type for item in onnx.load(path).graph.initializer}


def test_channels_of_very_different_size(
    network: Callable[..., Json], answer: Any, sqnr: Any, tmp_path: Path
) -> None:
    """Inputs from 0.01 to 100 whose weights are as large as they are small, as mel power and its features.

    One scale for a row of W is 100 / 127 or so: weights of loud channels, 0.01, become 0.
    """
    rng = np.random.default_rng(1)
    size = np.geomspace(0.01, 100, INPUTS)
    model = network(
        rng.normal(0, 0.5, (1, 4 * HIDDEN, INPUTS)) / size, rng.normal(0, 0.2, (1, 4 * HIDDEN, HIDDEN))
    )
    x = (rng.normal(size=(64, STEPS, INPUTS)) * size).astype("f4")
    facts, path = stored(model, x[:32], tmp_path / "corrected", **CORRECTED)
    feeds = {"x": x[32:]}
    wanted = answer(model["path"], feeds)
    assert sqnr(wanted, answer(with_weights_of(model, path, tmp_path / "float.onnx"), feeds)) > 40
    assert sqnr(wanted, answer(path, feeds)) > 30  # the last layer is in int8
    assert kinds(path)["w_float16"] == onnx.TensorProto.FLOAT16
    (layer,) = facts["float"]
    assert layer["op"] == "LSTM"
    assert "it stores W as float16 and R as int8: int8 would change its output by" in layer["reason"]
    assert (facts["quantized"], facts["stored"]) == (1, 2)
    _, plain = stored(model, x[:32], tmp_path / "plain")
    assert kinds(plain)["w_quantized"] == onnx.TensorProto.INT8  # nothing was seen of its input
    assert sqnr(wanted, answer(plain, feeds)) < 15


def test_weights_are_rounded_by_what_they_meet(
    network: Callable[..., Json], answer: Any, sqnr: Any, tmp_path: Path
) -> None:
    """16 inputs that are mixed of 3: what one weight's rounding does, others make good."""
    rng = np.random.default_rng(2)
    model = network(rng.normal(0, 0.3, (1, 4 * HIDDEN, INPUTS)), rng.normal(0, 0.1, (1, 4 * HIDDEN, HIDDEN)))
    x = (rng.normal(size=(64, STEPS, 3)) @ rng.normal(size=(3, INPUTS))).astype("f4")
    found = {}
    wanted = answer(model["path"], {"x": x[32:]})
    for name, parameters in (("nearest", {}), ("gptq", CORRECTED)):
        facts, path = stored(model, x[:32], tmp_path / name, **parameters)
        assert kinds(path)["w_quantized"] == kinds(path)["r_quantized"] == onnx.TensorProto.INT8
        assert facts["float"][0]["reason"].endswith("its weight is stored as int8")
        made = with_weights_of(model, path, tmp_path / f"{name}.onnx")
        found[name] = sqnr(wanted, answer(made, {"x": x[32:]}))
    assert found["gptq"] > found["nearest"] + 4


def test_a_layer_left_in_float_on_request_is_not_touched(
    network: Callable[..., Json], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    size = np.geomspace(0.01, 100, INPUTS)
    model = network(
        rng.normal(0, 0.5, (1, 4 * HIDDEN, INPUTS)) / size, rng.normal(0, 0.2, (1, 4 * HIDDEN, HIDDEN))
    )
    x = (rng.normal(size=(8, STEPS, INPUTS)) * size).astype("f4")
    facts, path = stored(model, x, tmp_path / "out", exclude=["states"], **CORRECTED)
    assert kinds(path)["w"] == kinds(path)["r"] == onnx.TensorProto.FLOAT
    assert facts["float"][0]["reason"] == "left in float on request"


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_openvino_takes_recurrent_layers_beside_integer_ones(
    model_of: Callable[..., Json], answer: Any, sqnr: Any, tmp_path: Path, op: str
) -> None:
    """Its kernels want constant weights: codes that become floats as it loads are none to it."""
    from exporters import openvino as exporter
    from serving.runtimes import openvino as runtime

    rng = np.random.default_rng(4)
    rows = {"LSTM": 4, "GRU": 3, "RNN": 1}[op] * HIDDEN
    constants = {
        "w": rng.normal(0, 0.3, (1, rows, INPUTS)).astype("f4"),
        "r": rng.normal(0, 0.1, (1, rows, HIDDEN)).astype("f4"),
        "v": rng.normal(0, 0.3, (HIDDEN, 40)).astype("f4"), "axis": np.int64([0]),
    }  # fmt: skip
    nodes = [
        ("Transpose", "x", "t", {"perm": [1, 0, 2]}),
        (op, "t w r", "states last", {"hidden_size": HIDDEN}),
        ("Squeeze", "last axis", "s"),
        ("MatMul", "s v", "y"),
    ]
    model = model_of(nodes, {"x": ["n", STEPS, INPUTS]}, ["y"], constants)
    x = rng.normal(size=(48, STEPS, INPUTS)).astype("f4")
    facts, path = stored(model, x[:32], tmp_path / "made", "openvino-x86-avx2", **CORRECTED)
    assert (facts["quantized"], facts["stored"]) == (1, 0)
    assert kinds(path)["w"] == onnx.TensorProto.FLOAT
    (tmp_path / "engine").mkdir()
    made = exporter.export({**model, "path": str(path)}, "int8:openvino:cpu", str(tmp_path / "engine"))
    found = runtime.open_session(tmp_path / "engine" / made["file"], device="cpu").run({"x": x[32:]})["y"]
    assert sqnr(answer(model["path"], {"x": x[32:]}), found) > 30
