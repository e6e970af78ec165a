"""Mixed precision on a small real network, one layer of which cannot be quantized."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor import pipeline
from compressor.options import Options
from compressor.quantization import mixed

LOUD = 2000.0  # how much larger the first channel is than the others


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`net.onnx` and `data.npz`: one channel of the image drowns the others in any 8-bit range.

    The first layer takes the loud channel back by small weights, so float answers from all channels.
    """
    folder = tmp_path_factory.mktemp("planted")
    rng = np.random.default_rng(1)
    weights = {
        "w0": rng.normal(0, 0.3, (16, 3, 3, 3)),
        "w1": rng.normal(0, 0.12, (16, 16, 3, 3)),
        "w2": rng.normal(0, 0.12, (16, 16, 3, 3)),
        "w3": rng.normal(0, 0.12, (16, 16, 3, 3)),
        "w4": rng.normal(0, 0.5, (4, 16)),
        "b4": np.zeros(4),
    }
    weights["w0"][:, 0] /= LOUD
    nodes = []
    tensor = "image"
    for layer in range(4):
        nodes.append(
            helper.make_node("Conv", [tensor, f"w{layer}"], [f"c{layer}"], f"conv{layer}", pads=[1] * 4)
        )
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"], f"relu{layer}"))
        tensor = f"r{layer}"
    nodes += [
        helper.make_node("GlobalAveragePool", [tensor], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["logits"], "head", transB=1),
    ]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "planted",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 10, 10])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 4])],
            [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=10,
    )
    x = rng.normal(0, 1, (1400, 3, 10, 10)) * rng.uniform(0.3, 1.5, (1400, 3, 1, 1))
    x[:, 0] *= LOUD
    x = x.astype(np.float32)

    def logits() -> np.ndarray:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, {"image": x})[0]

    even = -np.median(logits(), axis=0)
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(even, "b4"))
    onnx.save(model, folder / "net.onnx")
    np.savez(folder / "data.npz", x=x, y=logits().argmax(1))
    return folder


def options(planted: Path, out: Path, **more: object) -> Options:
    given = {"calib": 100, "max_drop": 4.0, "bench": 0.0, "target": ("int8:onnx:cpu",), **more}
    return Options(str(planted / "net.onnx"), data=str(planted / "data.npz"), out=str(out), **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def searched(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("searched") / "out"
    report = pipeline.run(options(planted, out))
    assert report.engines[1]["drop"]["verdict"] == "kept"
    return out


def ledger(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]


def left_in_float(out: Path) -> set[str]:
    recipe = json.loads((out / "engines/int8-onnx-cpu/recipe.json").read_text())
    return set(recipe["steps"][-1].get("exclude", []))


def test_the_layer_that_cannot_be_quantized_is_left_in_float(searched: Path) -> None:
    layers = left_in_float(searched)
    assert "conv0" in layers
    assert len(layers & {"conv1", "conv2", "conv3"}) <= 1  # times of microseconds decide about a second one
    report = json.loads((searched / "report.json").read_text())
    assert report["engines"][1]["precision"]["share_int8"] > 0.6


@pytest.mark.parametrize(
    ("share", "errors", "float_layers"),
    [
        (0.1, {"image": 0.5}, [["conv0"]]),  # conv0 has 432 of 7,408 multiply-accumulates a place, 6 %
        (0.01, {"image": 0.5}, []),
        (0.1, {"image": 0.5, "r2": 0.5}, []),  # conv0, conv2 and conv3 are too many
        (0.1, {"image": 0.001}, []),
    ],
)
def test_few_layers_are_found_without_a_profile_if_they_are_cheap(
    planted: Path, share: float, errors: dict[str, float], float_layers: list[list[str]]
) -> None:
    found = mixed.few(
        "",
        share,
        0.01,
        model={"path": str(planted / "net.onnx")},
        quantized={"facts": {}},
        scheme="ort-x86-vnni",
        sensitivity={"weights": {"conv1": 0.001, "conv3": 0.001}, "activations": errors},
    )
    assert [choice["exclude"] for choice in found["choices"]] == float_layers


def test_the_ledger_holds_every_candidate_with_its_cost(searched: Path) -> None:
    rows = ledger(searched)
    report = json.loads((searched / "report.json").read_text())
    assert [row["name"] for row in rows] == [rung["name"] for rung in report["rungs"]]
    assert sum(rung["kept"] for rung in report["rungs"]) == 1
    for row in rows:
        assert row["seconds"] > 0
        assert row["cpu_seconds"] > 0
        assert row["verdict"] == row["drop"]["verdict"]
    assert all(row["partial"] for row in rows if row["verdict"] == "broken")
    assert rows[0]["verdict"] == "broken"


def test_the_same_search_takes_everything_from_the_store(planted: Path, searched: Path) -> None:
    before = ledger(searched)
    report = pipeline.run(options(planted, searched))
    again = ledger(searched)
    assert [row["drop"] for row in again] == [row["drop"] for row in before]
    redone = {step["name"] for step in report.data["steps"] if not step["reused"]}
    assert not [name for name in redone if name.startswith(("run-", "export-"))]
    assert not redone & {"calibrate", "moments", "quantize", "sensitivity", "profile", "subset"}


def test_a_budget_of_time_cuts_the_search_and_is_said(planted: Path, tmp_path: Path) -> None:
    report = pipeline.run(options(planted, tmp_path / "out", budget=0.001))
    first, again = ledger(tmp_path / "out")
    assert first["name"] == again["name"]
    assert (first["partial"], again["partial"]) == (True, False)
    assert any("--budget" in note for note in report.data["notes"])
    assert (tmp_path / "out/engines/int8-onnx-cpu/model.onnx").is_file()


def test_layers_are_left_in_float_for_openvino_as_well(planted: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    out = tmp_path / "out"
    report = pipeline.run(options(planted, out, target=("int8:openvino:cpu",)))
    recipe = json.loads((out / "engines/int8-openvino-cpu/recipe.json").read_text())
    engine = report.engines[1]
    assert engine["drop"]["verdict"] == "kept"
    assert "conv0" in recipe["steps"][-1]["exclude"]
    assert {"conv1", "conv2", "conv3"} - set(recipe["steps"][-1]["exclude"])
    assert engine["precision"]["share_int8"] > 0.6


@pytest.mark.parametrize(
    ("number", "calib"),
    [
        (signal.SIGINT, 500),
        (signal.SIGINT, 100),  # so many are left that candidates are rejected on a subset
        (signal.SIGKILL, 500),
        pytest.param(signal.SIGTERM, 500, marks=pytest.mark.slow),
    ],
)
def test_interrupted_it_gives_the_best_so_far_and_goes_on(
    planted: Path, tmp_path: Path, number: signal.Signals, calib: int
) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "compressor.cli", planted / "net.onnx", "--data", planted / "data.npz",
        "--calib", calib, "--max-drop", "4", "--bench", "0", "--target", "int8:onnx:cpu", "--out", out,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (out / "ledger.jsonl").exists() or len(ledger_lines(out)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    said, _ = process.communicate(timeout=180)
    if number == signal.SIGKILL:
        assert not (out / "report.json").exists()
    else:
        assert process.returncode == 130
        assert "int8:onnx:cpu" in said
        report = json.loads((out / "report.json").read_text())
        assert any("interrupted" in note for note in report["notes"])
        assert (out / "engines/int8-onnx-cpu/model.onnx").is_file()
        assert report["engines"][1]["drop"]["verdict"] == "broken"
        assert not next(rung for rung in report["rungs"] if rung["kept"])["partial"]
    before = ledger(out)
    again = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "conv0" in left_in_float(out)
    after = ledger(out)
    assert any(row["partial"] for row in after) == (calib == 100)
    assert [row["drop"] for row in before[:2]] == [row["drop"] for row in after[:2]]
    steps = json.loads((out / "report.json").read_text())["steps"]
    made = [step for step in steps if step["name"] in ("calibrate", "export-int8-onnx-cpu")]
    assert all(step["reused"] for step in made[:2])


def ledger_lines(out: Path) -> list[str]:
    return (out / "ledger.jsonl").read_text().splitlines()
