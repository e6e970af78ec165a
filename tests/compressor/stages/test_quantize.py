"""The task: from an ONNX model and calibrated ranges to a quantized model, or the words why not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from compressor import events, onnx_files
from compressor.errors import UnsupportedError, UsageError
from compressor.model import Model
from compressor.quantization import calibrate, graph, placement
from compressor.quantization.scheme import named
from compressor.quantization.segments import write_segments
from compressor.stages import quantize

RNG = np.random.default_rng(4)
SCHEME = "ort-x86-avx2"
X = RNG.normal(0, 1, (6, 3, 12, 12)).astype(np.float32)


def array(*shape):
    return RNG.normal(0, 0.3, shape).astype(np.float32)


NODES = [("Conv", "x w b", "c"), ("Relu", "c", "r"), ("GlobalAveragePool", "r", "p"), ("Flatten", "p", "f"),
         ("Gemm", "f v u", "y")]  # fmt: skip
CONSTANTS = {"w": array(8, 3, 3, 3), "b": array(8), "v": array(8, 5), "u": array(5)}


def save(folder, nodes, constants, output=("N", 5)):
    """A `Model` on disk, in its JSON form."""
    made = [helper.make_node(op, ins.split(), [out], name=f"{op}_{out}") for op, ins, out in nodes]
    body = helper.make_graph(
        made, "g",
        [helper.make_tensor_value_info("x", 1, ["N", 3, 12, 12])],
        [helper.make_tensor_value_info("y", 1, list(output))],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    path = folder / "float.onnx"
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    inputs, outputs = onnx_files.specs(model)
    return Model("onnx", path, inputs, outputs, "0" * 64, 100, "onnx").json()


@pytest.fixture
def source(tmp_path):
    return save(tmp_path, NODES, CONSTANTS)


@pytest.fixture
def observe(tmp_path):
    """Calibrate on X; gives the folder of ranges."""

    def call(model, only=None):
        folder = tmp_path / "ranges"
        folder.mkdir(exist_ok=True)
        prepared = graph.prepare(Path(model["path"]))
        tensors = only or placement.tensors(prepared, named(SCHEME))
        segments = write_segments(prepared, tensors, folder, "observed")
        calibrate.observe(segments, tensors, lambda start: [(range(start, len(X)), {"x": X[start:]})], folder)
        return str(folder)

    return call


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(events, "warn", found.append)
    return found


def outputs(path):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


def test_quantized_model_and_its_facts(source, observe, tmp_path, warnings):
    found = quantize.run(source, str(tmp_path), observe(source), SCHEME)
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, allow_nan=False))
    model = Model.of(found, tmp_path)
    assert found["path"] == "model.onnx"
    assert (model.inputs, model.outputs) == (Model.of(source).inputs, Model.of(source).outputs)
    facts = model.facts
    assert (facts["scheme"], facts["observer"], facts["quantized"], facts["float"]) == (
        SCHEME,
        "minmax",
        3,
        [],
    )
    assert facts["tensors"] == 4
    assert facts["operators"]["Conv"] == 1
    wanted, got = outputs(source["path"]), outputs(model.path)
    assert 10 * np.log10(np.square(wanted).sum() / np.square(wanted - got).sum()) > 25
    assert not warnings


def test_same_request_gives_the_same_file(source, observe, tmp_path):
    ranges = observe(source)
    digests = {quantize.run(source, str(tmp_path), ranges, SCHEME)["sha256"] for _ in range(2)}
    assert len(digests) == 1


def test_excluded_nodes_are_float_and_said(source, observe, tmp_path):
    facts = quantize.run(source, str(tmp_path), observe(source), SCHEME, exclude=["Conv_c"])["facts"]
    assert facts["float"] == [{"name": "Conv_c", "op": "Conv", "reason": "left in float on request"}]
    with pytest.raises(UsageError, match="Conv_d"):
        quantize.run(source, str(tmp_path), observe(source), SCHEME, exclude=["Conv_d"])


def test_tensor_that_was_never_observed_stays_float(source, observe, tmp_path):
    facts = quantize.run(source, str(tmp_path), observe(source, only=["x", "r"]), SCHEME)["facts"]
    assert facts["float"][0]["reason"] == "tensor 'p' was never observed"
    assert facts["quantized"] == 1


@pytest.mark.parametrize(
    ("nodes", "output", "words"),
    [
        (
            [("Relu", "x", "y")],
            ("N", 3, 12, 12),
            "nothing to quantize: the model has no operator with weights",
        ),
        ([("MatMul", "x x", "y")], ("N", 3, 12, 12), "nothing to quantize: MatMul"),
        (
            [("QuantizeLinear", "x s z", "q"), ("DequantizeLinear", "q s z", "y")],
            ("N", 3, 12, 12),
            "already quantized",
        ),
    ],
)
def test_nothing_to_do_gives_the_model_back_and_says_why(tmp_path, warnings, observe, nodes, output, words):
    source = save(tmp_path, nodes, {"s": np.float32(0.1), "z": np.uint8(128)}, output)
    ranges = observe(save(tmp_path, NODES, CONSTANTS))
    source = save(tmp_path, nodes, {"s": np.float32(0.1), "z": np.uint8(128)}, output)
    found = quantize.run(source, str(tmp_path), ranges, SCHEME)
    assert found["facts"]["quantized"] == 0
    assert found["facts"]["reason"].startswith(words)
    assert warnings == [found["facts"]["reason"]]
    np.testing.assert_array_equal(outputs(source["path"]), outputs(tmp_path / found["path"]))


def test_only_stored_weights_are_said_to_be_so(tmp_path, warnings, observe):
    source = save(tmp_path, [("ConvTranspose", "x w", "y")], {"w": array(3, 64, 3, 3)}, ("N", 64, 14, 14))
    facts = quantize.run(source, str(tmp_path), observe(source, only=["x"]), SCHEME)["facts"]
    assert (facts["quantized"], facts["stored"]) == (0, 1)
    assert "no int8 kernel for ConvTranspose" in warnings[0]


def test_unknown_scheme_is_refused_with_those_that_exist(source, tmp_path):
    with pytest.raises(UnsupportedError, match="ort-x86-avx2, ort-x86-vnni, ort-arm"):
        quantize.run(source, str(tmp_path), str(tmp_path), "abacus")
