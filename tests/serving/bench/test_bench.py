"""Latency and memory of real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor import events, worker
from compressor.errors import DataError, UnsupportedError, UsageError
from serving.bench import latency
from serving.bench.inputs import batches_of, fixed_batch
from serving.runtimes import onnx as runtime

HERE = {"runtime": "onnx", "device": "cpu", "threads": 1}


def made_up(*shape: Any, name: str = "x") -> dict[str, Any]:
    return {"source": None, "inputs": [{"name": name, "dtype": "float32", "shape": ["N", *shape]}]}


def test_a_planted_ratio_is_found_and_an_engine_is_as_fast_as_itself(make_mlp: Any, tmp_path: Path) -> None:
    long, short = make_mlp("long.onnx", 24), make_mlp("short.onnx", 12)
    engines = [str(long), str(short), str(long)]
    found = latency(engines, data=made_up(64), seconds=4, batches=[64], folder=str(tmp_path), **HERE)[
        "engines"
    ]
    assert [row["ratio_to_baseline"] is None for row in found] == [True, False, False]
    fast, itself = found[1]["ratio_to_baseline"], found[2]["ratio_to_baseline"]
    assert fast["verdict"] == "faster"
    assert fast["low"] < 2.05
    assert fast["high"] > 1.8
    assert fast["value"] == pytest.approx(1.95, abs=0.25)
    assert itself["verdict"] in ("same", "undecided")
    assert itself["value"] == pytest.approx(1, abs=0.1)
    assert found[0]["aa_noise"]["low"] < 1.1
    json.dumps(found, allow_nan=False)


def test_figures_agree_with_each_other(make_mlp: Any, tmp_path: Path) -> None:
    arguments = {"data": made_up(64), "seconds": 4, "batches": [1, 16], "folder": str(tmp_path), **HERE}
    row = latency([str(make_mlp("m.onnx", 4))], **arguments)["engines"][0]
    for entry, size in ((row, 1), (row["batches"][0], 16)):
        assert entry["batch"] == size
        assert entry["n"] > 662
        assert 0 < entry["p50_ms"] <= entry["p90_ms"] <= entry["p99_ms"]
        assert entry["p50_interval_ms"][0] <= entry["p50_ms"] <= entry["p50_interval_ms"][1]
        assert entry["throughput_per_s"] * entry["mean_ms"] / 1000 == pytest.approx(size)
        assert 0 < entry["cpu_ms"] < 1.2 * entry["mean_ms"]
        assert entry["inputs"] == "made-up"


def test_what_was_measured_is_not_measured_again(make_mlp: Any, tmp_path: Path) -> None:
    arguments = {
        "engines": [str(make_mlp("m.onnx", 1))],
        "data": made_up(64),
        "folder": str(tmp_path),
        **HERE,
    }
    first = latency(seconds=0.5, **arguments)
    assert latency(seconds=0.5, **arguments) == first


def test_real_samples_are_used_where_there_are_some(make_mlp: Any, reference: Any, tmp_path: Path) -> None:
    data = reference(x=np.ones((5, 64), np.float32))
    row = latency([str(make_mlp("m.onnx", 1))], data=data, seconds=0.5, folder=str(tmp_path), **HERE)[
        "engines"
    ][0]
    assert row["inputs"] == "data"


def test_an_engine_that_is_bound_to_a_batch_size_is_timed_at_it(make_mlp: Any, tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    events.listen(heard.append)
    try:
        path = make_mlp("m.onnx", 1, 64, batch=8)
        row = latency([str(path)], data=made_up(64), seconds=0.5, folder=str(tmp_path), **HERE)["engines"][0]
    finally:
        events.listen(events._default)
    assert row["batch"] == 8
    assert any("bound to batch 8" in event.get("warning", "") for event in heard)


def test_a_failing_engine_gives_no_numbers(graph: Any, tmp_path: Path) -> None:
    graph.node("Gather", ["x", graph.constant("i", np.array([9]))], "y", axis=1)
    path = graph.save(tmp_path / "fails.onnx", {"x": ["N", 4]}, {"y": ["N", 1]})
    with pytest.raises(UnsupportedError, match="fails on this input"):
        latency([str(path)], data=made_up(4), seconds=0.5, folder=str(tmp_path), **HERE)
    assert list(tmp_path.glob("latency*")) == []


@pytest.mark.parametrize("change", [{"engines": []}, {"seconds": 0}, {"batches": [0]}, {"threads": 0}])
def test_requests_that_make_no_sense(tmp_path: Path, change: dict[str, Any]) -> None:
    arguments = {"engines": ["m.onnx"], "data": made_up(4), "seconds": 1, "folder": str(tmp_path), **HERE}
    with pytest.raises(UsageError):
        latency(**{**arguments, **change})


def test_batches_hold_real_samples_in_turn(reference: Any) -> None:
    x = np.arange(10, dtype=np.float32)[:, None]
    data = reference(x=x)
    four = batches_of(data, 4)
    assert [batch["x"].ravel().tolist() for batch in four] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches_of(data, 16)[0]["x"].ravel().tolist() == [*range(10), *range(6)]
    assert len(batches_of(data, 1)) == 8


def test_samples_of_another_length_are_left_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lengths.py").write_text(
        "import numpy as np\n"
        "def batches():\n"
        "    for length in (4, 4, 7):\n"
        "        yield {'x': np.ones((2, length), np.float32)}\n"
    )
    monkeypatch.chdir(tmp_path)
    data = {"source": "lengths:batches", "inputs": [{"name": "x", "dtype": "float32", "shape": ["N", "L"]}]}
    found = batches_of(data, 2)
    assert {batch["x"].shape for batch in found} == {(2, 4)}


def test_made_up_inputs_need_sizes() -> None:
    first, second = batches_of(made_up(3), 2, seed=1), batches_of(made_up(3), 2, seed=1)
    assert first[0]["x"].shape == (2, 3)
    np.testing.assert_array_equal(first[0]["x"], second[0]["x"])
    with pytest.raises(UnsupportedError, match="free dimension 'L'"):
        batches_of(made_up("L"), 2)


def test_no_samples_is_an_error(reference: Any) -> None:
    with pytest.raises(DataError):
        batches_of(reference(x=np.ones((0, 4), np.float32)), 1)


def test_fixed_batch(make_mlp: Any) -> None:
    assert fixed_batch(runtime.open_session(make_mlp("a.onnx", 1, 8, batch=4), device="cpu").inputs) == 4
    assert fixed_batch(runtime.open_session(make_mlp("b.onnx", 1, 8), device="cpu").inputs) is None


def test_memory_grows_with_the_engine(make_mlp: Any, tmp_path: Path) -> None:
    def engine_bytes(width: int) -> int:
        path = make_mlp(f"m{width}.onnx", 4, width)
        arguments = {"engine": str(path), "data": made_up(width), "folder": str(tmp_path), **HERE}
        found = worker.call("serving.bench:memory", arguments).value
        assert found["peak_rss_bytes"] > found["engine_rss_bytes"] > 0
        assert found["batch"] == 1
        return int(found["engine_rss_bytes"])

    weights = 4 * 4 * 2048 * 2048
    assert engine_bytes(2048) - engine_bytes(64) > 0.8 * weights
