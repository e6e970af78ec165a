"""Layers with one planted cause of error, and the emulated kernel against the real one."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compressor.quantization.causes import CAUSES, LayerCauses, layer_causes
from compressor.quantization.diagnose import compare
from compressor.quantization.scheme import SCHEMES

RNG = np.random.default_rng(8)
AVX2 = SCHEMES["ort-x86-avx2"]
XS, WS = 2.0**-6, 2.0**-7  # powers of two: multiples of them are exact
N, K, M = 32, 24, 8
WEIGHT = (RNG.integers(-60, 61, (M, K)) * WS).astype(np.float32)
BIAS = (RNG.integers(-900, 900, M) * XS * WS).astype(np.float32)
CODES = RNG.integers(0, 256, (N, K)).astype(np.float32)
X = ((CODES - 128) * XS).astype(np.float32)
Pair = tuple[float, int]


def build(
    node: dict[str, Any],
    weight: NDArray,
    bias: NDArray,
    shape: tuple[int, ...],
    before: Pair | None = None,
    codes: NDArray | None = None,
    bias_codes: NDArray | None = None,
    after: Pair | None = None,
    relu: bool = False,
) -> onnx.ModelProto:
    """One layer; with `codes` in integers, with pairs (scale, zero point) before and after it."""
    inits: dict[str, Any] = {"w": weight, "b": bias}
    nodes, data, operands = [], "x", ["w", "b"]
    for name, pair in (("before", before), ("after", after)):
        if pair:
            inits |= {f"{name}_s": np.float32(pair[0]), f"{name}_z": np.uint8(pair[1])}
    if before:
        nodes += _pair("x", "before", "xd")
        data = "xd"
    if codes is not None:
        scale = np.full(len(codes), WS, np.float32)
        inits |= {"wq": codes.astype(np.int8), "ws": scale, "wz": np.zeros(len(codes), np.int8)}
        inits |= {"bq": bias_codes.astype(np.int32), "bs": np.float32(XS) * scale}
        nodes.append(helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["wd"], axis=0))
        nodes.append(helper.make_node("DequantizeLinear", ["bq", "bs"], ["bd"], axis=0))
        operands = ["wd", "bd"]
    nodes.append(helper.make_node(node["op"], [data, *operands], ["y"], "layer", **node["attributes"]))
    out = "y"
    if relu:
        nodes.append(helper.make_node("Relu", ["y"], ["r"], name="relu"))
        out = "r"
    if after:
        nodes += _pair(out, "after", "yd")
        out = "yd"
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [onnx.ValueInfoProto(name=out)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in inits.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _pair(source: str, name: str, output: str) -> list[onnx.NodeProto]:
    parameters = [f"{name}_s", f"{name}_z"]
    return [
        helper.make_node("QuantizeLinear", [source, *parameters], [f"{output}_q"]),
        helper.make_node("DequantizeLinear", [f"{output}_q", *parameters], [output]),
    ]


GEMM = {"op": "Gemm", "attributes": {"transB": 1}}


def gemm(
    weight: NDArray = WEIGHT, x: NDArray = X, before: Pair = (XS, 128), bias_codes: NDArray | None = None,
    after: Pair | None = None, relu: bool = False,
) -> tuple[LayerCauses, NDArray]:  # fmt: skip
    """The causes of a Gemm that has seen `x`."""
    codes = np.clip(np.rint(weight / WS), -127, 127)
    bias_codes = np.rint(BIAS / (XS * WS)) if bias_codes is None else bias_codes
    models = (
        build(GEMM, weight, BIAS, x.shape, relu=relu),
        build(GEMM, weight, BIAS, x.shape, before, codes, bias_codes, after, relu),
    )
    causes = layer_causes(*models, AVX2)["y"]
    causes.add(x, 0)
    return causes, x


LOUD = np.where(RNG.random((M, K)) < 0.5, 0, 110 * WS).astype(np.float32)
LOUD[:, :4] = 120 * WS
PLANTED = {
    "clipping": lambda: gemm(x=np.where(RNG.random(X.shape) < 0.1, np.sign(X) * 4, X).astype(np.float32)),
    "activation_rounding": lambda: gemm(x=RNG.uniform(-1.9, 1.9, X.shape).astype(np.float32)),
    "weight_rounding": lambda: gemm(weight=RNG.uniform(-0.5, 0.5, WEIGHT.shape).astype(np.float32)),
    "saturation": lambda: gemm(weight=LOUD),
    "bias": lambda: gemm(bias_codes=np.rint(BIAS / (XS * WS)) + 500),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_the_one_that_is_named(cause: str) -> None:
    causes, _ = PLANTED[cause]()
    split = causes.split()
    powers = causes.powers()
    if cause.endswith("rounding"):  # what it shifts on average counts as bias
        assert split[cause] + split["bias"] == pytest.approx(1, abs=1e-6)
        assert split[cause] > 0.9
    else:
        assert split[cause] == pytest.approx(1, abs=1e-6)
    assert sum(split.values()) == pytest.approx(1)
    assert sum(powers.values()) == pytest.approx(causes.noise, rel=1e-5)


def test_a_layer_without_error_has_no_cause() -> None:
    causes, _ = gemm()
    assert causes.noise == 0
    assert causes.split() == dict.fromkeys(CAUSES, 0.0)


def test_the_steps_add_up_to_the_layer_s_own_error() -> None:
    weight = RNG.uniform(-0.5, 0.5, WEIGHT.shape).astype(np.float32)
    x = RNG.normal(0, 1, X.shape).astype(np.float32)
    causes, x = gemm(weight, x, after=(0.05, 0), relu=True)
    outputs = causes.outputs(x[None])
    steps = sum(later - sooner for sooner, later in pairwise(outputs))
    np.testing.assert_allclose(steps, outputs[-1] - outputs[0], atol=1e-5)
    assert causes.noise == pytest.approx(float(np.square(outputs[-1] - outputs[0], dtype=np.float64).sum()))
    powers, split = causes.powers(), causes.split()
    assert sum(powers.values()) == pytest.approx(causes.noise, rel=0.15)  # the steps are nearly uncorrelated
    assert split == pytest.approx({key: value / sum(powers.values()) for key, value in powers.items()})


def simulated(model: onnx.ModelProto, x: NDArray) -> NDArray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize(
    "attributes",
    [{}, {"group": 2}, {"strides": [2, 2], "pads": [1] * 4}, {"dilations": [2, 2]}, {"group": 4}],
)
def test_the_last_step_is_what_the_runtime_gives(attributes: dict) -> None:
    weight = RNG.uniform(-0.5, 0.5, (8, 4 // attributes.get("group", 1), 3, 3)).astype(np.float32)
    node = {"op": "Conv", "attributes": attributes}
    x = RNG.normal(0, 1, (1, 4, 7, 7)).astype(np.float32)
    x = x[..., :5, :5] if not attributes.get("dilations") else x
    codes, bias_codes = np.rint(weight / WS), np.rint(BIAS / (XS * WS))
    quantized = build(node, weight, BIAS, x.shape, (XS, 100), codes, bias_codes, (0.03, 0), relu=True)
    reference = build(node, weight, BIAS, x.shape, relu=True)
    causes = layer_causes(reference, quantized, SCHEMES["ort-x86-vnni"])["y"]
    seen: list[NDArray] = []
    outputs, causes.outputs = causes.outputs, lambda rows: seen.extend(outputs(rows)) or seen
    causes.add(x, 0)
    wanted = [np.moveaxis(simulated(model, x), 1, -1).reshape(-1, 8) for model in (reference, quantized)]
    np.testing.assert_allclose(seen[0], wanted[0], atol=1e-5)
    assert np.abs(seen[-1] - wanted[1]).max() <= 0.03 * 1.01  # a code, where the order of sums decides
    assert np.abs(seen[-1] - wanted[1]).mean() < 0.003


def test_diagnosis_tells_causes_and_passes_over_other_operators(tmp_path: Path) -> None:
    codes, bias_codes = np.rint(WEIGHT / WS), np.rint(BIAS / (XS * WS))
    reference = build(GEMM, WEIGHT, BIAS, (1, K))
    quantized = build(GEMM, WEIGHT, BIAS, (1, K), (XS, 128), codes, bias_codes)
    x = np.clip(RNG.normal(0, 0.6, (20, K)), -1.9, 1.9).astype(np.float32)
    batches = [(range(len(x)), {"x": x})]
    (layer,) = compare(reference, quantized, batches, tmp_path, scheme=AVX2)["layers"]
    assert layer["split"]["activation_rounding"] > 0.8
    assert layer["own_sqnr_db"] == pytest.approx(layer["sqnr_db"], abs=0.5)  # the first layer: nothing before
    loop = build({"op": "MatMul", "attributes": {}}, WEIGHT, BIAS, (1, M))
    del loop.graph.node[0].input[2:]
    loop.graph.node[0].input[1] = "x"
    assert layer_causes(loop, loop, AVX2) == {}


ENGINE = """
import sys
import numpy as np, onnxruntime
folder = sys.argv[1]
options = onnxruntime.SessionOptions()
options.log_severity_level, options.intra_op_num_threads = 4, 1
session = onnxruntime.InferenceSession(f"{folder}/m.onnx", options, providers=["CPUExecutionProvider"])
np.save(f"{folder}/y.npy", session.run(None, {"x": np.load(f"{folder}/x.npy")})[0])
"""


@pytest.mark.parametrize("op", ["Gemm", "Conv"])
def test_emulated_saturation_is_that_of_the_kernel(tmp_path: Path, without_vnni: dict, op: str) -> None:
    shape = (N, K) if op == "Gemm" else (1, K, 7, 6)
    node = GEMM if op == "Gemm" else {"op": "Conv", "attributes": {}}
    codes = RNG.integers(60, 127, (M, K, 1, 1) if op == "Gemm" else (M, K, 3, 3))
    codes *= RNG.choice([-1, 1, 1], K)[:, None, None]
    codes = codes[..., 0, 0] if op == "Gemm" else codes
    weight, bias_codes = (codes * WS).astype(np.float32), np.rint(BIAS / (XS * WS))
    x = ((RNG.integers(120, 256, shape) - 128) * XS).astype(np.float32)
    quantized = build(node, weight, BIAS, shape, (XS, 128), codes, bias_codes, (0.25, 128))
    causes = layer_causes(build(node, weight, BIAS, shape), quantized, AVX2)["y"]
    seen: list[NDArray] = []
    outputs, causes.outputs = causes.outputs, lambda rows: seen.extend(outputs(rows)) or seen
    causes.add(x, 0)
    onnx.save(quantized, tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", x)
    subprocess.run([sys.executable, "-c", ENGINE, str(tmp_path)], env=without_vnni, check=True)
    real = np.load(tmp_path / "y.npy")
    real = real if op == "Gemm" else np.moveaxis(real, 1, -1).reshape(-1, M)
    assert np.abs(seen[-3] - seen[-4]).max() > 5  # it saturates by far more than a code
    assert np.abs(seen[-1] - real).max() <= 0.25 * 1.01
