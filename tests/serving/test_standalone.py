"""`compress bench`: engines timed outside of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.cli import main
from compressor.errors import UsageError
from serving import bench


def chain(path: Path, layers: int, batch: str | int = "N") -> Path:
    nodes, name = [], "x"
    for layer in range(layers):
        nodes.append(helper.make_node("MatMul", [name, "w"], [f"y{layer}"]))
        name = f"y{layer}"
    values = np.random.default_rng(0).normal(0, 0.05, (256, 256)).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 256])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 256])],
        [numpy_helper.from_array(values, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def added(path: Path, inputs: dict[str, list[str | int]], kind: int = TensorProto.FLOAT) -> Path:
    """An engine that gives the sum of its inputs; of strings, which have none, their shape."""
    op, out = ("Shape", TensorProto.INT64) if kind == TensorProto.STRING else ("Sum", kind)
    graph = helper.make_graph(
        [helper.make_node(op, list(inputs), ["y"])],
        "added",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", out, None)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    chain(folder / "short.onnx", 4)
    chain(folder / "long.onnx", 32)
    chain(folder / "four.onnx", 4, batch=4)
    chain(folder / "three.onnx", 4, batch=3)
    added(folder / "double.onnx", {"x": ["N", 256]}, TensorProto.DOUBLE)
    added(folder / "other.onnx", {"z": ["N", 256]})
    added(folder / "flat.onnx", {"x": ["N", 16, 16]})
    added(folder / "state.onnx", {"x": ["N", 2, 3], "state": [2, 3]})
    added(folder / "text.onnx", {"x": ["N", 4]}, TensorProto.STRING)
    np.savez(folder / "data.npz", x=np.ones((20, 256), np.float32))
    return folder


def figures(place: Path, *arguments: str) -> dict[str, Any]:
    assert (
        main(["bench", *arguments, "--data", str(place / "data.npz"), "--json", str(place / "out.json")]) == 0
    )
    answer: dict[str, Any] = json.loads((place / "out.json").read_text())
    return answer


def test_requests_are_counted_and_their_figures_agree(place: Path) -> None:
    answer = figures(place, str(place / "short.onnx"), "--requests", "40")
    (row,) = answer["engines"]
    assert row["requests"] == 40
    assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert row["throughput_per_s"] * row["mean_ms"] == pytest.approx(1000)
    assert answer["inputs"].endswith("data.npz")


def test_one_request_is_all_its_percentiles(place: Path) -> None:
    (row,) = figures(place, str(place / "short.onnx"), "--requests", "1")["engines"]
    assert len({row[name] for name in ("p50_ms", "p90_ms", "p99_ms", "mean_ms", "min_ms", "max_ms")}) == 1


def test_throughput_counts_samples_of_a_batch(place: Path) -> None:
    answer = figures(place, str(place / "short.onnx"), "--requests", "5", "--batch", "4")
    (row,) = answer["engines"]
    assert answer["batch"] == 4
    assert row["throughput_per_s"] * row["mean_ms"] == pytest.approx(4000)


def test_an_engine_bound_to_a_batch_is_timed_at_it(place: Path) -> None:
    assert figures(place, str(place / "four.onnx"), "--requests", "2")["batch"] == 4


def test_several_engines_are_compared_with_the_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = figures(place, str(place / "long.onnx"), str(place / "short.onnx"), "--seconds", "3")
    first, second = answer["engines"]
    assert first["ratio_to_baseline"] is None
    assert second["ratio_to_baseline"]["value"] > 2  # an eighth of the work
    assert second["ratio_to_baseline"]["verdict"] == "faster"
    assert "short.onnx: faster against" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["short.onnx"], "--data SRC"),
        (["short.onnx", "--data", "data.npz", "--requests", "0"], "0 requests"),
        (["short.onnx", "--data", "data.npz", "--requests", "3", "--seconds", "1"], "exclude each other"),
        (["short.onnx", "long.onnx", "--data", "data.npz", "--requests", "3"], "--seconds"),
        (["missing.onnx", "--data", "data.npz"], "missing.onnx"),
        (["short.onnx", "--data", "missing.npz"], "missing.npz"),
        (["short.onnx", "--data", "data.npz", "--seconds", "0"], "--seconds 0: must be above 0"),
        (["short.onnx", "--data", "data.npz", "--seconds", "inf"], "--seconds inf"),
        (["short.onnx", "--data", "data.npz", "--seconds", "nan"], "--seconds nan"),
        (["short.onnx", "--data", "data.npz", "--requests", "99999999999999"], "99999999999999 requests"),
        (["short.onnx", "--data", "data.npz", "--batch", "0"], "--batch 0"),
        (["short.onnx", "--data", "data.npz", "--seed", "-1"], "--seed -1"),
        (["short.onnx", "--data", "data.npz", "--threads", "0"], "threads must be from 1"),
        (["four.onnx", "--data", "data.npz", "--batch", "2"], "takes 4 samples at a time"),
        (["text.onnx", "--made-up", "--requests", "1"], "'x' is of type string"),
        (["short.onnx", "--made-up", "--preprocess", "resize=8"], "--preprocess is for pictures"),
        (["short.onnx", "four.onnx", "--made-up", "--batch", "2"], "four.onnx takes 4 samples"),
        (
            ["three.onnx", "short.onnx", "four.onnx", "--made-up"],
            "three.onnx and four.onnx cannot be timed on the same inputs: the first takes 'x' as float32 "
            "3x256, the other float32 4x256; time them one at a time",
        ),
        (["short.onnx", "double.onnx", "--made-up"], "'x' as float32 ?x256, the other float64 ?x256"),
        (["short.onnx", "flat.onnx", "--made-up"], "'x' as float32 ?x256, the other float32 ?x16x16"),
        (["short.onnx", "other.onnx", "--made-up"], "the inputs x, the other z"),
        (["short.onnx", "--data", "data.npz", "--json", "."], "--json .: is a folder"),
        (["short.onnx", "--data", "data.npz", "--json", "no/x.json"], "there is no folder no"),
    ],
)
def test_what_cannot_be_measured_gives_one_line_and_no_file(
    place: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    (place / "none.json").unlink(missing_ok=True)
    assert main(["bench", "--json", "none.json", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (place / "none.json").exists()


def test_engines_are_timed_at_the_batch_to_which_any_of_them_is_bound(place: Path) -> None:
    answer = figures(place, str(place / "short.onnx"), str(place / "four.onnx"), "--seconds", "0.5")
    assert answer["batch"] == 4


@pytest.mark.parametrize("batch", [1, 3])
def test_an_input_whose_first_size_is_fixed_keeps_it(place: Path, batch: int) -> None:
    arguments = ["--made-up", "--requests", "2", "--batch", str(batch), "--json", str(place / "state.json")]
    assert main(["bench", str(place / "state.onnx"), *arguments]) == 0
    assert json.loads((place / "state.json").read_text())["batch"] == batch


def test_preprocessing_that_the_data_do_not_take_is_said(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures(place, str(place / "short.onnx"), "--requests", "1", "--preprocess", "resize=8")
    assert "--preprocess is for pictures" in capsys.readouterr().err


def test_made_up_inputs_are_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(place / "short.onnx"), "--made-up", "--requests", "2"]) == 0
    assert "inputs: made-up" in capsys.readouterr().out


def test_an_engine_whose_calls_fail_has_no_figures(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["x", "i"], ["y"], axis=1)],
        "fails",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "M"])],
        [numpy_helper.from_array(np.array([3, 9], np.int64), "i")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "fails.onnx")
    np.savez(tmp_path / "data.npz", x=np.ones((2, 4), np.float32))
    out = tmp_path / "out.json"
    arguments = [str(tmp_path / "fails.onnx"), "--data", str(tmp_path / "data.npz"), "--json", str(out)]
    assert main(["bench", *arguments, "--requests", "5"]) == 1
    assert main(["bench", *arguments, "--seconds", "0.5"]) == 1
    assert not out.exists()


def test_engines_of_two_runtimes_are_refused(place: Path, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    openvino.save_model(openvino.Core().read_model(str(place / "short.onnx")), str(tmp_path / "short.xml"))
    with pytest.raises(UsageError, match="different runtimes"):
        bench.standalone(
            [str(place / "short.onnx"), str(tmp_path / "short.xml")],
            str(place / "data.npz"),
            None,
            requests=None,
            seconds=1.0,
            threads=1,
            batch=1,
            seed=0,
            folder=str(tmp_path),
        )
