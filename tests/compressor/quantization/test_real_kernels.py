"""Real models, kernel by kernel: the fused integer graph gives what the unfused one gives, within one step.

A float kernel's rounding moves a code now and then, and a network carries that on. So every kernel is held
against its own simulation: the graph is cut at its codes, which become inputs, and are fed with what the
unfused network has there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper

from compressor.quantization.scheme import SCHEMES
from compressor.quantization.view import tensor_types
from compressor.quantization.widen import widen

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(2)
ENGINE = """
import json, sys
import numpy as np, onnxruntime
levels = onnxruntime.GraphOptimizationLevel
feeds, found = dict(np.load(sys.argv[2])), []
for level in (levels.ORT_ENABLE_ALL, levels.ORT_DISABLE_ALL):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 2
    options.graph_optimization_level = level
    if level == levels.ORT_ENABLE_ALL:
        options.optimized_model_filepath = sys.argv[1] + ".optimized"
    session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    found.append(session.run(names, feeds))
result = {}
for name, fused, unfused in zip(names, *found):
    apart = np.abs(fused.astype(np.float64) - unfused.astype(np.float64))
    scale = 1.0 if fused.dtype.kind in "iu" else max(float(np.abs(unfused).max()), 1e-30)
    result[name] = [float(apart.max(initial=0)) / scale, fused.dtype.kind, float((apart > 0).mean())]
print(json.dumps(result))
"""


def image(*shape, scale=1.0):
    """Smooth noise, which uses the whole range of codes in all channels."""
    coarse = RNG.normal(0, 1, (*shape[:2], -(-shape[2] // 4), -(-shape[3] // 4)))
    fine = np.kron(coarse, np.ones((4, 4)))[:, :, : shape[2], : shape[3]] + RNG.normal(0, 0.5, shape)
    return (fine * scale).astype(np.float32)


def module(folder):
    spec = importlib.util.spec_from_file_location(f"asset_{folder.name}", folder / "model.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def exported(folder, place, inputs):
    """The asset's torch model as ONNX."""
    import torch

    try:
        net = module(folder).load()
    except (OSError, ImportError) as error:
        pytest.skip(f"{folder.name}: {error}")
    path = place / f"{folder.name}.onnx"
    torch.onnx.export(
        net.eval(), tuple(map(torch.from_numpy, inputs.values())), path, dynamo=False, opset_version=17,
        input_names=list(inputs), output_names=["y"],
    )  # fmt: skip
    return onnx.load(path)


def resnet20(assets, place):
    model = onnx.load(assets / "robust/onnx_opset21_resnet20_converted.onnx")
    return model, {model.graph.input[0].name: image(4, 3, 32, 32)}


def lite0(assets, place):
    feeds = {"x": image(2, 3, 224, 224)}
    return exported(assets / "imagenet_efficientnet_lite0", place, feeds), feeds


def yolox(assets, place):
    model = onnx.load(assets / "yolox_nano_onnx/yolox_nano.onnx")
    return model, {"images": image(1, 3, 416, 416, scale=60.0) + np.float32(110)}


def magika(assets, place):
    found = np.load(assets / "_data/magika_files.npz")["x"][::40][:4]
    return onnx.load(assets / "magika_onnx/model.onnx"), {"bytes": found.astype(np.int32)}


def mnist(assets, place):
    feeds = {"x": image(4, 1, 28, 28)}
    return exported(assets / "mnist_cnn", place, feeds), feeds


def lstm(assets, place):
    feeds = {"x": np.load(assets / "_data/speaker_fsdd.npz")["mel"][:4].astype(np.float32)}
    return exported(assets / "speaker_lstm_resemblyzer", place, feeds), feeds


def minilm(assets, place):
    ids = RNG.integers(1000, 20000, (4, 16))
    feeds = {"ids": ids, "mask": np.ones_like(ids)}
    return exported(assets / "sts_minilm_l6", place, feeds), feeds


MODELS = {make.__name__: make for make in (resnet20, lite0, yolox, magika, mnist, lstm, minilm)}


@pytest.fixture(scope="module", params=["native", "avx2"])
def environment(request):
    """Of a process with the machine's own kernels, or with those of AVX2."""
    return dict(os.environ) if request.param == "native" else request.getfixturevalue("without_vnni")


def cut(model):
    """A copy that reads every activation's codes from inputs `CODES__in` and gives all codes."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    types = tensor_types(model)
    codes = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    for node in model.graph.node:
        node.input[:] = [f"{name}__in" if name in codes else name for name in node.input]
    for name in codes:
        kind, shape = types[name]
        model.graph.input.append(helper.make_tensor_value_info(f"{name}__in", kind, shape))
        model.graph.output.append(helper.make_tensor_value_info(name, kind, shape))
    del model.graph.value_info[:]
    return model, codes


def watched(model, codes):
    model = onnx.ModelProto.FromString(model.SerializeToString())
    types = tensor_types(model)
    model.graph.output.extend(helper.make_tensor_value_info(name, *types[name]) for name in codes)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_gives_what_its_simulation_gives(name, shared, tmp_path, quantize, run, environment):
    model, feeds = MODELS[name](shared / "assets", tmp_path)
    made = quantize(model, feeds, "ort-x86-avx2")
    widen(made, SCHEMES["ort-x86-avx2"])
    blocks, codes = cut(made)
    values = run(watched(made, codes), feeds, fused=False)
    onnx.save(blocks, tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", **feeds, **{f"{name}__in": values[name] for name in codes})
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "m.onnx"), str(tmp_path / "feeds.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    fused = [node.op_type for node in onnx.load(tmp_path / "m.onnx.optimized").graph.node]
    integer = [op for op in fused if op.startswith("QLinear") or op in ("QGemm", "MatMulIntegerToFloat")]
    worst = max(found, key=lambda key: found[key][0] if found[key][1] in "iu" else 0)
    print(
        name, len(integer), sorted(set(fused)) if not integer else "", "integer kernels,", worst, found[worst]
    )
    assert integer or not codes, sorted(set(fused))
    for key, (difference, kind, _) in found.items():
        assert difference <= (1 if kind in "iu" else 1e-4), key
