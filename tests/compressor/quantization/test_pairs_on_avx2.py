"""On kernels that add in saturating int16, a pair-safe file gives what its float simulation gives.

Where the processor has VNNI, AVX2 kernels are forced by hiding it from the process that runs the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor.quantization.scheme import SCHEMES
from compressor.quantization.widen import widen

RNG = np.random.default_rng(3)
ENGINE = """
import json, sys
import numpy as np
def on_ort(path, x, fused):
    import onnxruntime
    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if fused else levels.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]
def on_openvino(path, x, fused):
    import openvino
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "LP_TRANSFORMS_MODE": fused}
    return openvino.Core().compile_model(path, "CPU", options)([x])[0]
run, result = {"ort": on_ort, "openvino": on_openvino}[sys.argv[2]], {}
for name in sys.argv[3:]:
    x = np.load(f"{sys.argv[1]}/{name}.npy")
    outputs = [run(f"{sys.argv[1]}/{name}.onnx", x, fused) for fused in (True, False)]
    result[name] = [float(np.abs(outputs[0] - outputs[1]).max()), float(np.abs(outputs[1]).max())]
print(json.dumps(result))
"""
NO_OPENVINO = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")
RUNTIMES = ["ort", pytest.param("openvino", marks=NO_OPENVINO)]
LAYERS = {
    "conv": (("Conv", "x w b", "y"), (1, 8, 9, 9), (16, 8, 3, 3)),
    "conv of three channels": (("Conv", "x w b", "y", {"strides": [2, 2]}), (1, 3, 9, 9), (16, 3, 3, 3)),
    "pointwise conv": (("Conv", "x w b", "y"), (1, 40, 6, 6), (16, 40, 1, 1)),
    "grouped conv": (("Conv", "x w b", "y", {"group": 2}), (1, 10, 9, 9), (16, 5, 3, 3)),
    "depthwise conv": (("Conv", "x w b", "y", {"group": 16}), (1, 16, 9, 9), (16, 1, 3, 3)),
    "depthwise conv, two filters": (("Conv", "x w b", "y", {"group": 8}), (1, 8, 9, 9), (16, 1, 3, 3)),
    "conv 1d": (("Conv", "x w b", "y"), (1, 5, 30), (16, 5, 5)),
    "conv 3d": (("Conv", "x w b", "y"), (1, 3, 6, 6, 6), (16, 3, 3, 3, 3)),
    "gemm": (("Gemm", "x w b", "y", {"transB": 1}), (7, 65), (16, 65)),
    "gemm of one row": (("Gemm", "x w b", "y", {"transB": 1}), (1, 130), (16, 130)),
    "matmul": (("MatMul", "x w", "y"), (2, 9, 64), (64, 16)),
    "matmul of one row": (("MatMul", "x w", "y"), (1, 1, 51), (51, 16)),
}


@pytest.fixture(scope="module")
def engine(without_vnni):
    """Runs files with AVX2 kernels; gives the largest difference from the simulation and value."""

    def call(folder, runtime, names):
        command = [sys.executable, "-c", ENGINE, str(folder), runtime, *names]
        done = subprocess.run(command, env=without_vnni, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    return call


def write(folder, build, quantize, scheme):
    """All layers, with weights and inputs that overflow an int16 wherever a pair is not held back."""
    steps = {}
    for name, (node, inputs, shape) in LAYERS.items():
        weight = RNG.uniform(0.5, 1, shape).astype(np.float32) * RNG.choice([-1, 1], shape, p=[0.2, 0.8])
        bias = RNG.normal(0, 1, 16).astype(np.float32)
        x = RNG.uniform(0.6, 1, inputs).astype(np.float32)
        model = build([node], {"x": list(inputs)}, {"y": None}, {"w": weight.astype(np.float32), "b": bias})
        written = quantize(model, {"x": x}, scheme)
        widen(written, SCHEMES[scheme])
        onnx.save(written, folder / f"{name}.onnx")
        np.save(folder / f"{name}.npy", x)
        scales = {item.name: item for item in written.graph.initializer}
        steps[name] = float(numpy_helper.to_array(scales["y_scale"])) if "y_scale" in scales else None
    return steps


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_fused_kernels_give_what_the_simulation_gives(tmp_path, build, quantize, engine, runtime):
    steps = write(tmp_path, build, quantize, f"{runtime}-x86-avx2")
    for name, (difference, largest) in engine(tmp_path, runtime, LAYERS).items():
        assert difference <= (1.01 * steps[name] if steps[name] else 1e-5 * largest), name


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_weights_without_the_limit_saturate_there(tmp_path, build, quantize, engine, runtime):
    """The control: the same layers with plain int8 weights are wrong, except the depthwise one."""
    steps = write(tmp_path, build, quantize, f"{runtime}-x86-vnni")
    found = engine(tmp_path, runtime, LAYERS)
    exact = {
        name
        for name, (difference, largest) in found.items()
        if difference <= (1.01 * steps[name] if steps[name] else 1e-5 * largest)
    }
    assert exact == {"depthwise conv"}
