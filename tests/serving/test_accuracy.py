"""Engines over a data set: outputs that outlive a kill, metric, drop, agreement, gap to the simulation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor import events
from compressor.errors import DataError, UnsupportedError
from serving.accuracy import compare_task, precision, run_engine, simulation_gap
from serving.comparison import compare
from serving.outputs import read_outputs
from serving.runtimes import onnx as runtime

RNG = np.random.default_rng(1)
HERE = {"runtime": "onnx", "device": "cpu", "threads": 1}


def classes(path: Path, x: np.ndarray) -> np.ndarray:
    return runtime.open_session(path, device="cpu").run({"x": x})["y"].argmax(1)


def disturbed(path: Path, amount: float) -> Path:
    """The same network with noise in its weights."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        noisy = values + amount * np.random.default_rng(0).normal(size=values.shape).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(noisy, tensor.name))
    onnx.save(model, path.with_name("disturbed.onnx"))
    return path.with_name("disturbed.onnx")


def folder(tmp_path: Path, name: str) -> str:
    (tmp_path / name).mkdir(exist_ok=True)
    return str(tmp_path / name)


@pytest.fixture
def mlp_data(
    make_mlp: Callable[..., Path], reference: Callable[..., dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    path = make_mlp("mlp.onnx", 2, 8)
    x = RNG.normal(size=(50, 8)).astype(np.float32)
    return path, reference(x=x, label=classes(path, x))


def test_all_outputs_are_kept_in_order(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    found = run_engine(str(path), data=data, folder=folder(tmp_path, "out"), **HERE)
    assert (found["n"], found["outputs"], found["nan"]) == (50, ["y"], 0)
    assert found["seconds"] > 0
    assert found["cpu_ms_per_sample"] > 0
    stored = list(read_outputs(tmp_path / "out"))
    assert np.concatenate([batch.indices for batch in stored]).tolist() == list(range(50))
    x = np.load(data["source"])["x"]
    wanted = runtime.open_session(path, device="cpu").run({"x": x})["y"]
    np.testing.assert_allclose(np.concatenate([batch.outputs["y"] for batch in stored]), wanted, rtol=1e-5)


def test_limit_stops_early(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    assert (
        run_engine(str(path), data=data, folder=folder(tmp_path, "o"), limit=10, **HERE)["n"] == 12
    )  # whole batches


def test_a_killed_run_goes_on(mlp_data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = mlp_data
    monkeypatch.setattr("serving.outputs._MOST_BYTES", 1)  # a chunk for every batch
    out = folder(tmp_path, "o")
    run_engine(str(path), data=data, folder=out, limit=20, **HERE)
    kept = {chunk: chunk.stat().st_mtime_ns for chunk in Path(out).glob("chunk-*.npz")}
    (Path(out) / "chunk-000099.partial").write_bytes(b"cut")
    assert len(kept) == 5
    assert run_engine(str(path), data=data, folder=out, **HERE)["n"] == 50
    assert all(chunk.stat().st_mtime_ns == when for chunk, when in kept.items())
    indices = np.concatenate([batch.indices for batch in read_outputs(Path(out))])
    assert indices.tolist() == list(range(50))


def test_kill_dash_nine_leaves_whole_chunks(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    out = folder(tmp_path, "o")
    arguments = json.dumps({"engine": str(path), "data": {**data, "batch": 1}, "folder": out, **HERE})
    code = (
        "import json, sys, time, serving.outputs, serving.accuracy; serving.outputs._MOST_BYTES = 1\n"
        "from serving.runtimes import onnx\n"
        "run = onnx.OnnxSession.run\n"
        "onnx.OnnxSession.run = lambda *given: (time.sleep(0.02), run(*given))[1]\n"
        "serving.accuracy.run_engine(**json.loads(sys.argv[1]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, arguments])
    deadline = time.monotonic() + 30
    while len(list(Path(out).glob("chunk-*.npz"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = len(list(Path(out).glob("chunk-*.npz")))
    assert 5 <= before < 50
    assert run_engine(**json.loads(arguments))["n"] == 50
    indices = np.concatenate([batch.indices for batch in read_outputs(Path(out))])
    assert indices.tolist() == list(range(50))


def test_another_engine_does_not_go_on_from_these_chunks(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    out = folder(tmp_path, "o")
    run_engine(str(path), data=data, folder=out, limit=20, **HERE)
    other = disturbed(path, 1.0)
    run_engine(str(other), data=data, folder=out, **HERE)
    x = np.load(data["source"])["x"]
    stored = np.concatenate([batch.outputs["y"] for batch in read_outputs(Path(out))])
    np.testing.assert_array_equal(stored.argmax(1), classes(other, x))


def test_nan_outputs_are_counted_and_said(graph: Any, reference: Any, tmp_path: Path) -> None:
    graph.node("Log", ["x"], "y")
    path = graph.save(tmp_path / "log.onnx", {"x": ["N", 2]}, {"y": ["N", 2]})
    x = np.array([[1, 1], [-1, 1], [1, 0], [2, 2], [3, 3]], np.float32)
    heard: list[dict[str, Any]] = []
    events.listen(heard.append)
    try:
        found = run_engine(str(path), data=reference(x=x), folder=folder(tmp_path, "o"), **HERE)
    finally:
        events.listen(events._default)
    assert found["nan"] == 2
    assert any("2 of 5 samples" in event.get("warning", "") for event in heard)


def test_outputs_without_an_entry_per_sample(graph: Any, reference: Any, tmp_path: Path) -> None:
    graph.node("ReduceSum", ["x"], "y", keepdims=0)
    path = graph.save(tmp_path / "sum.onnx", {"x": ["N", 2]}, {"y": []})
    data = reference(x=np.ones((3, 2), np.float32))
    with pytest.raises(DataError, match="pass --batch 1"):
        run_engine(str(path), data=data, folder=folder(tmp_path, "o"), **HERE)
    found = run_engine(str(path), data={**data, "batch": 1}, folder=folder(tmp_path, "p"), **HERE)
    assert found["n"] == 3


def test_a_failing_engine_gives_no_numbers(graph: Any, reference: Any, tmp_path: Path) -> None:
    graph.node("Gather", ["x", graph.constant("i", np.array([9]))], "y", axis=1)
    path = graph.save(tmp_path / "fails.onnx", {"x": ["N", 2]}, {"y": ["N", 1]})
    with pytest.raises(UnsupportedError, match="fails on this input"):
        run_engine(
            str(path), data=reference(x=np.ones((3, 2), np.float32)), folder=folder(tmp_path, "o"), **HERE
        )


def test_metric_drop_and_agreement(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    other = disturbed(path, 0.1)
    run_engine(str(path), data=data, folder=folder(tmp_path, "a"), **HERE)
    run_engine(str(other), data=data, folder=folder(tmp_path, "b"), **HERE)
    found = compare_task(
        str(tmp_path / "a"), str(tmp_path / "b"), None, 0.5, data=data, labelled=True, folder=str(tmp_path)
    )
    arrays = np.load(data["source"])
    right = (classes(other, arrays["x"]) == arrays["label"]).mean()
    assert 0 < right < 1
    assert found["metric"]["name"] == "top1"
    assert found["metric"]["value"] == pytest.approx(100 * right)
    assert found["baseline_metric"]["value"] == 100
    assert found["drop"]["value"] == pytest.approx(100 - 100 * right)
    assert found["drop"]["verdict"] == "broken"
    assert found["agreement"]["top1"] == pytest.approx(right)
    json.dumps(found, allow_nan=False)


def test_a_baseline_against_itself(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    run_engine(str(path), data=data, folder=folder(tmp_path, "a"), **HERE)
    found = compare(tmp_path / "a", tmp_path / "a")
    assert found["metric"]["value"] == found["baseline_metric"]["value"] == 100
    assert found["drop"] is None
    assert found["agreement"] is None


def test_without_labels_there_is_agreement_only(make_mlp: Any, reference: Any, tmp_path: Path) -> None:
    path = make_mlp("m.onnx", 1, 8)
    data = reference(x=RNG.normal(size=(9, 8)).astype(np.float32))
    run_engine(str(path), data=data, folder=folder(tmp_path, "a"), **HERE)
    run_engine(str(path), data=data, folder=folder(tmp_path, "b"), **HERE)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found["metric"] is None
    assert "no labels" in found["metric_reason"]
    assert found["agreement"]["sqnr_db"] == 200


def test_labels_can_be_left_unjudged(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    run_engine(str(path), data=data, folder=folder(tmp_path, "a"), **HERE)
    assert compare(tmp_path / "a", tmp_path / "a", labelled=False)["metric"] is None


def test_a_metric_of_the_whole_set(mlp_data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = mlp_data
    (tmp_path / "mine.py").write_text(
        "def largest(outputs, labels):\n    return float(outputs.max()) + 0 * labels.sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run_engine(str(path), data=data, folder=folder(tmp_path, "a"), **HERE)
    found = compare(tmp_path / "a", tmp_path / "a", "mine:largest")
    stored = np.concatenate([batch.outputs["y"] for batch in read_outputs(tmp_path / "a")])
    assert found["metric"]["value"] == pytest.approx(float(stored.max()))


def test_other_samples_are_not_compared(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    run_engine(str(path), data=data, folder=folder(tmp_path, "a"), **HERE)
    run_engine(str(path), data=data, folder=folder(tmp_path, "b"), limit=20, **HERE)
    with pytest.raises(DataError, match="different samples"):
        compare(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("batch", [4, 7])
def test_a_candidate_that_ran_on_some_samples_is_compared_on_these(
    mlp_data: Any, reference: Any, tmp_path: Path, batch: int
) -> None:
    """As if the baseline had been run on the same part, though its batches are others."""
    path, data = mlp_data
    places = [0, 1, 5, 6, 7, 8, 20, 23, 41, 42, 43, 49]
    np.save(tmp_path / "some.npy", np.array(places))
    some = {**data, "indices": str(tmp_path / "some.npy"), "n": len(places), "batch": batch}
    other = disturbed(path, 1.0)
    run_engine(str(path), data=data, folder=folder(tmp_path, "all"), **HERE)
    run_engine(str(path), data=some, folder=folder(tmp_path, "same"), **HERE)
    run_engine(str(other), data=some, folder=folder(tmp_path, "part"), **HERE)
    found = compare(tmp_path / "all", tmp_path / "part", "top1", part=True)
    wanted = compare(tmp_path / "same", tmp_path / "part", "top1")
    assert found["metric"] == wanted["metric"]
    assert found["drop"] == wanted["drop"]
    assert found["drop"]["value"] > 0
    assert found["baseline_metric"]["n"] == 12
    assert found["agreement"]["sqnr_db"] == pytest.approx(wanted["agreement"]["sqnr_db"], abs=1e-4)
    with pytest.raises(DataError, match="different samples"):
        compare(tmp_path / "all", tmp_path / "part", "top1")
    with pytest.raises(DataError, match="samples that the baseline was not"):
        compare(tmp_path / "part", tmp_path / "all", "top1", part=True)


def test_damaged_outputs_are_named(mlp_data: Any, tmp_path: Path) -> None:
    path, data = mlp_data
    run_engine(str(path), data=data, folder=folder(tmp_path, "a"), **HERE)
    chunk = next((tmp_path / "a").glob("chunk-*.npz"))
    chunk.write_bytes(chunk.read_bytes()[:-100])
    with pytest.raises(DataError, match="damaged"):
        compare(tmp_path / "a", tmp_path / "a")
    with pytest.raises(DataError, match="holds no outputs"):
        compare(tmp_path, tmp_path)


def test_precision_takes_a_data_reference(mixed_engine: Path, reference: Any, tmp_path: Path) -> None:
    data = reference(x=RNG.normal(size=(5, 3, 16, 16)).astype(np.float32))
    found = precision(str(mixed_engine), data=data, folder=str(tmp_path), **HERE)
    assert 0.8 < found["share_int8"] < 0.9
    json.dumps(found, allow_nan=False)


def test_simulation_gap_is_small_where_kernels_are_right(
    mixed_engine: Path, reference: Any, tmp_path: Path
) -> None:
    data = reference(x=RNG.normal(size=(10, 3, 16, 16)).astype(np.float32))
    found = simulation_gap(str(mixed_engine), data=data, folder=str(tmp_path), samples=8, **HERE)
    assert found["n"] == 8
    assert found["sqnr_db"] > 25
    assert found["lost_db"] is None
    itself = {"baseline": str(mixed_engine), "samples": 8, **HERE}
    found = simulation_gap(str(mixed_engine), data=data, folder=str(tmp_path), **itself)
    assert found["lost_db"] < -100  # the engine is its own baseline, its simulation is not


def test_an_input_may_be_a_single_number(scalar_engine: Any, tmp_path: Path) -> None:
    path, data = scalar_engine
    arguments = {"engine": str(path), "runtime": "onnx", "device": "cpu", "threads": 1, "data": data}
    assert run_engine(**arguments, folder=str(tmp_path))["n"] == 6
    assert precision(**arguments, folder=str(tmp_path))["share_by_type"] == {"float32": 1.0}
