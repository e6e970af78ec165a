"""Mixed precision for speed: layers whose integer kernels are slower stay in float, at no cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor import pipeline
from compressor.options import Options

CHANNELS, GROUPS, SIDE = 64, 16, 28
LAYERS = {"stem": 1, "grouped1": GROUPS, "plain1": 1, "grouped2": GROUPS, "plain2": 1}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`net.onnx` and `data.npz`: dense convolutions, three times faster in int8, between grouped ones.

    onnxruntime's grouped convolutions take two to three times as long in int8 as in float on x86.
    """
    folder = tmp_path_factory.mktemp("grouped")
    rng = np.random.default_rng(0)
    weights, nodes = {}, []
    tensor, channels = "image", 3
    for name, groups in LAYERS.items():
        shape = (CHANNELS, channels // groups, 3, 3)
        weights[f"{name}.w"] = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        nodes.append(
            helper.make_node("Conv", [tensor, f"{name}.w"], [f"{name}.c"], name, pads=[1] * 4, group=groups)
        )
        nodes.append(helper.make_node("Relu", [f"{name}.c"], [f"{name}.r"], f"{name}.relu"))
        tensor, channels = f"{name}.r", CHANNELS
    weights["head.w"] = rng.normal(0, 0.3, (4, CHANNELS))
    nodes += [
        helper.make_node("GlobalAveragePool", [tensor], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "head.w"], ["logits"], "head", transB=1),
    ]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "grouped",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, SIDE, SIDE])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 4])],
            [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=10,
    )
    onnx.save(model, folder / "net.onnx")
    x = rng.normal(0, 1, (200, 3, SIDE, SIDE)) * rng.uniform(0.3, 1.5, (200, 3, 1, 1))
    x = x.astype(np.float32)
    session = onnxruntime.InferenceSession(folder / "net.onnx", providers=["CPUExecutionProvider"])
    np.savez(folder / "data.npz", x=x, y=session.run(None, {"image": x})[0].argmax(1))
    return folder


def test_layers_that_integers_slow_down_stay_float_though_the_budget_is_kept(
    grouped: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = Options(
        str(grouped / "net.onnx"), data=str(grouped / "data.npz"), out=str(out), calib=50, max_drop=30.0,
        bench=1.5, target=("int8:onnx:cpu",),
    )  # fmt: skip
    report = pipeline.run(asked)
    everything, mix = report.data["rungs"]
    assert everything["drop"]["verdict"] == "kept"
    assert mix["kept"]
    assert mix["speed"] > 1.1 * everything["speed"]
    assert mix["speed"] > 1.0
    recipe = json.loads((out / "engines/int8-onnx-cpu/recipe.json").read_text())
    left = set(recipe["steps"][-1]["exclude"])
    assert {"grouped1", "grouped2"} <= left
    assert not left & {"plain1", "plain2"}
