"""Latency and memory of real engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor import events, worker
from compressor.errors import DataError, UnsupportedError, UsageError
from compressor.model import TensorSpec
from serving.bench import latency
from serving.bench.inputs import batches_of, fixed_batch
from serving.bench.interleave import Cluster, Measured
from serving.bench.rows import Bench
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
    assert fast["verdict"] in ("faster", "undecided")
    assert fast["value"] > 1.3 > itself["value"] > 1 / 1.3
    json.dumps(found, allow_nan=False)


def measured(clusters: int, passes: int, *lanes: float) -> Measured:
    """Blocks of 20 calls, in every lane about `lanes` ms each, of which a quarter is CPU time."""
    rng = np.random.default_rng(3)
    found = [Cluster() for _ in range(clusters)]
    for cluster in found:
        for _ in range(2 * passes):
            for lane, ms in enumerate(lanes):
                times = ms * 1e6 * (1 + 0.02 * rng.standard_normal(20))
                cluster.add(lane, [int(time) for time in times], int(times.sum() / 4))
    return Measured(found, control=True)


def test_figures_agree_with_each_other() -> None:
    """The figures of known blocks: float at 2 ms, an engine twice as fast, float once more."""
    bench = Bench([Path("float.onnx"), Path("int8.onnx")], data=made_up(64), seed=0, **HERE)
    base, fast = bench.summary(measured(8, 5, 2.0, 1.0, 2.0), 16, np.random.default_rng(0))
    for row, ms, calls in ((base, 2.0, 8 * 10 * 20 * 2), (fast, 1.0, 8 * 10 * 20)):
        assert (row["batch"], row["clusters"], row["n"], row["inputs"]) == (16, 8, calls, "made-up")
        assert row["p50_ms"] == pytest.approx(ms, rel=0.01)
        assert row["p50_ms"] < row["p90_ms"] < row["p99_ms"] < 1.1 * ms
        assert row["p50_interval_ms"][0] <= row["p50_ms"] <= row["p50_interval_ms"][1]
        assert row["throughput_per_s"] * row["mean_ms"] / 1000 == pytest.approx(16)
        assert row["cpu_ms"] == pytest.approx(row["mean_ms"] / 4, rel=1e-3)
        assert row["aa_noise"]["low"] < 1 < row["aa_noise"]["high"]
    speed = fast["ratio_to_baseline"]
    assert speed["verdict"] == "faster"
    assert 1.98 < speed["low"] <= speed["value"] <= speed["high"] < 2.02
    assert base["ratio_to_baseline"] is None


def test_figures_of_real_engines_are_whole(make_mlp: Any, tmp_path: Path) -> None:
    arguments = {"data": made_up(64), "seconds": 1, "batches": [1, 16], "folder": str(tmp_path), **HERE}
    row = latency([str(make_mlp("m.onnx", 4))], **arguments)["engines"][0]
    for entry, size in ((row, 1), (row["batches"][0], 16)):
        assert entry["batch"] == size
        assert entry["n"] >= 1
        assert entry["throughput_per_s"] * entry["mean_ms"] / 1000 == pytest.approx(size)
        assert entry["p50_ms"] > 0
        assert entry["cpu_ms"] > 0


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "bool", "uint8", "int64"])
def test_made_up_inputs_are_of_the_engines_type(dtype: str) -> None:
    data = {"source": None, "inputs": [{"name": "x", "dtype": dtype, "shape": ["N", 3]}]}
    assert batches_of(data, 2)[0]["x"].dtype.name == dtype


def test_inputs_of_different_fixed_sizes_have_no_batch() -> None:
    sizes = [TensorSpec("x", "float32", (4, 8)), TensorSpec("state", "float32", (2, 8))]
    assert fixed_batch(tuple(sizes)) == 1
    assert fixed_batch((replace(sizes[0], shape=("N", 8)), sizes[1])) is None


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


def test_an_input_may_be_a_single_number(scalar_engine: Any, tmp_path: Path) -> None:
    path, data = scalar_engine
    for given in (data, {**data, "source": None}):
        assert {batch["gain"].shape for batch in batches_of(given, 1)} == {()}
        folder = tmp_path / str(given["source"] is None)
        folder.mkdir()
        row = latency([str(path)], data=given, seconds=0.3, folder=str(folder), **HERE)["engines"][0]
        assert row["batch"] == 1
    assert [float(batch["gain"]) for batch in batches_of(data, 1)] == [0, 1, 2, 3, 4, 5]
    arguments = {"engine": str(path), "data": data, "folder": str(tmp_path), **HERE}
    assert worker.call("serving.bench:memory", arguments).value["peak_rss_bytes"] > 0
