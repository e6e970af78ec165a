"""The lint on whole files: our own, those of another tool, and from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from compressor.errors import ModelFileError
from compressor.quantization import graph, placement, qdq
from compressor.quantization.lint import fix, lint, lint_task
from compressor.quantization.lint.base import TARGETS
from compressor.quantization.scheme import SCHEMES
from compressor.quantization.view import View
from compressor.quantization.widen import widen

FLOAT = {"QDQ008", "QDQ024", "QDQ025", "QDQ028", "CPU001", "ORT002", "ORT003", "ORT007", "ORT008", "ORT011"}
SETTINGS: dict[str, dict[str, Any]] = {
    "uint8": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True},
    "int8": {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8, "per_channel": True},
    "symmetric": {
        "activation_type": QuantType.QInt8,
        "weight_type": QuantType.QInt8,
        "extra_options": {
            "ActivationSymmetric": True,
            "QuantizeBias": False,
            "DedicatedQDQPair": True,
            "AddQDQPairToWeight": True,
            "OpTypesToExcludeOutputQuantization": ["Conv", "Gemm"],
        },
    },
}


class Samples(CalibrationDataReader):
    def __init__(self, folder: Path) -> None:
        x = np.load(folder / "data.npz")["x"][:20]
        self.feeds: Iterator[dict] = iter([{"image": sample[None]} for sample in x])

    def get_next(self) -> dict | None:
        return next(self.feeds, None)


@pytest.fixture(scope="module", params=SETTINGS)
def foreign(request: pytest.FixtureRequest, net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small network, quantized by onnxruntime's own tool."""
    path = tmp_path_factory.mktemp("foreign") / f"{request.param}.onnx"
    quantize_static(
        net / "net.onnx", path, Samples(net), quant_format=QuantFormat.QDQ, **SETTINGS[request.param]
    )
    return path


def outputs(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"image": x})[0])


def float_layers(path: Path, folder: Path) -> set[str]:
    """Layers that onnxruntime runs in float, by its optimized graph."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimized.onnx"), 4
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(folder / "optimized.onnx").graph.node
    return {
        node.name for node in nodes if node.op_type in ("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul")
    }


def test_layers_said_to_stay_in_float_are_those_that_the_runtime_keeps_there(
    foreign: Path, tmp_path: Path
) -> None:
    found = {item.node for item in lint(onnx.load(foreign), "ort") if item.rule in FLOAT}
    assert found == float_layers(foreign, tmp_path)


def test_a_mended_file_of_another_tool_gives_what_it_gave(foreign: Path, net: Path) -> None:
    model, x = onnx.load(foreign), np.load(net / "data.npz")["x"][:20]
    before = outputs(model, x)
    for target, least in (("ort", 60), ("tensorrt", 20)):
        mended, fixed = fix(model, lint(model, target))
        assert fixed or target == "ort"
        onnx.checker.check_model(mended)
        assert [item for item in lint(mended, target) if item.severity == "error"] == []
        noise = np.square(before - outputs(mended, x)).sum()
        assert 10 * np.log10(np.square(before).sum() / max(noise, 1e-30)) > least


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name in TARGETS])
def test_our_own_files_are_clean(scheme: str, net: Path) -> None:
    runtime = scheme.split("-")[0]
    for excluded in (frozenset[str](), frozenset({"second"})):
        view = View(graph.prepare(net / "net.onnx"))
        placed = placement.place(view, SCHEMES[scheme], excluded)
        ranges = dict.fromkeys(placed.pairs, (-3.0, 3.0))
        model = qdq.write(view, placed, ranges, SCHEMES[scheme])
        widen(model, SCHEMES[scheme])
        assert [item for item in lint(model, scheme) if item.severity != "info"] == []
        unsafe = [item for item in lint(model, runtime) if item.rule in ("ORT009", "OV001")]
        assert bool(unsafe) == (SCHEMES[scheme].pair_limit is None and runtime != "tensorrt")


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[4])
    return subprocess.run(
        [sys.executable, "-m", "compressor.cli", "lint", *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, timeout=300, check=False,
    )  # fmt: skip


def save(folder: Path, cases: dict[str, tuple[Callable, Callable]], rule: str, place: int) -> Path:
    path = folder / f"{rule}-{place}.onnx"
    onnx.save(cases[rule][place](), path)
    return path


def test_the_command_says_what_is_wrong_and_mends_it(tmp_path: Path, cases: dict) -> None:
    path, out = save(tmp_path, cases, "TRT004", 0), tmp_path / "mended.onnx"
    before = path.read_bytes()
    found = command(path, "--for", "tensorrt")
    assert found.returncode == 1
    assert "error TRT004  quantized bias  (1 place)" in found.stdout
    assert "NVIDIA/TensorRT#4542" in found.stdout
    mended = command(path, "--for", "tensorrt", "--fix", "--out", out, "--json")
    assert mended.returncode == 0, mended.stderr
    answer = json.loads(mended.stdout)
    assert {"TRT003", "TRT004"} <= {item["rule"] for item in answer["fixed"]}
    assert path.read_bytes() == before
    assert command(out, "--for", "tensorrt").returncode == 0


def test_the_command_refuses_in_words(tmp_path: Path, cases: dict) -> None:
    path = save(tmp_path, cases, "QDQ001", 1)
    for arguments, said in (
        ((path, "--for", "tvm"), "tensorrt, ort"),
        ((path, "--for", "ort", "--fix"), "--out"),
        ((path,), "--for"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert said in done.stderr
    (tmp_path / "text.onnx").write_text("no model\n")
    with pytest.raises(ModelFileError, match="text file"):
        lint_task(str(tmp_path / "text.onnx"), "ort")


def test_a_float_file_is_said_to_be_one(net: Path) -> None:
    done = command(net / "net.onnx", "--for", "ort")
    assert done.returncode == 0
    assert "no quantization operators" in done.stdout
