import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

COMPRESS = [sys.executable, "-m", "compressor.cli"]


def compress(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [*COMPRESS, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root},
        timeout=300,
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """It ended with one line that holds the words, and without a traceback."""
    assert result.returncode == status, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("compress: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture(scope="module")
def done(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a budget and a short benchmark."""
    out = tmp_path_factory.mktemp("cli") / "out"
    result = compress(
        net / "net.onnx", "--target", "int8:onnx", "--data", net / "data.npz", "--calib", "40",
        "--max-drop", "10", "--bench", "2", "--out", out,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "int8:onnx:cpu" in result.stdout
    assert str(out / "report.html") in result.stdout
    return out


def test_everything_is_where_the_documentation_says(done: Path) -> None:
    found = {str(path.relative_to(done)) for path in done.rglob("*") if path.is_file()}
    for name in ("report.html", "report.json", "measurements.jsonl"):
        assert name in found
    for target in ("int8-onnx-cpu", "fp32-onnx-cpu"):
        assert {f"engines/{target}/{name}" for name in ("model.onnx", "engine.json", "recipe.json")} <= found


def test_the_report_holds_what_was_measured(done: Path) -> None:
    report = json.loads((done / "report.json").read_text())
    float_engine, int8 = report["engines"]
    assert float_engine["metric"]["value"] == 100.0
    assert float_engine["metric"]["n"] == report["data"]["evaluation"]["n"] == 80
    assert report["data"]["calibration"]["n"] == 40
    assert 80 < int8["metric"]["value"] <= 100
    assert int8["drop"]["value"] == pytest.approx(100 - int8["metric"]["value"])
    assert int8["drop"]["verdict"] in ("kept", "undecided")
    assert int8["agreement"]["sqnr_db"] > 20
    assert int8["precision"]["share_int8"] > 0.99
    assert int8["precision"]["float_islands"] == []
    assert int8["simulation_gap"]["sqnr_db"] > 30
    assert int8["latency"]["ratio_to_baseline"]["low"] <= int8["latency"]["ratio_to_baseline"]["value"]
    assert int8["size_bytes"] < float_engine["size_bytes"]
    assert int8["peak_rss_bytes"] > 2**20
    assert [rung["kept"] for rung in report["rungs"]][-1] is True


def test_the_same_command_reuses_what_is_stored(net: Path, done: Path) -> None:
    result = compress(
        net / "net.onnx", "--target", "int8:onnx", "--data", net / "data.npz", "--calib", "40",
        "--max-drop", "10", "--bench", "0", "--out", done.parent / "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    reused = {
        step["name"]: step["reused"] for step in json.loads((done / "report.json").read_text())["steps"]
    }
    assert reused["calibrate"]
    assert reused["quantize"]
    assert reused["run-int8-onnx-cpu"]
    assert "latency was not measured" in result.stderr


def test_a_plan_writes_nothing(net: Path, tmp_path: Path) -> None:
    arguments = (net / "net.onnx", "--data", net / "data.npz", "--out", tmp_path / "out", "--plan")
    result = compress(*arguments)
    assert result.returncode == 0, result.stderr
    for step in ("calibrate", "quantize", "export-int8-onnx-cpu", "run-fp32-onnx-cpu"):
        assert step in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert "bisection" not in result.stdout
    assert "mixes by bisection" in compress(*arguments, "--max-drop", "1").stdout


def test_one_engine_goes_where_out_says(net: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.onnx"
    result = compress(
        net / "net.onnx", "--target", "int8:onnx:cpu", "--calib-data", net / "data.npz", "--out", out,
        "--work", tmp_path / "work", "--bench", "0",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "small.onnx.json").read_text())["file"] == "small.onnx"
    assert (tmp_path / "work" / "report.json").is_file()
    from serving import load_engine

    session = load_engine(out)
    assert session.run({"image": np.zeros((2, 3, 12, 12), np.float32)})["logits"].shape == (2, 4)


def test_a_broken_budget_ends_with_3_and_a_report(net: Path, tmp_path: Path) -> None:
    x = np.load(net / "data.npz")["x"]
    y = np.load(net / "data.npz")["y"]
    np.savez(tmp_path / "calibration.npz", x=x[:8] * 1e-3)  # ranges far too small: accuracy is lost
    np.savez(tmp_path / "evaluation.npz", x=x, y=y)
    result = compress(
        net / "net.onnx", "--target", "int8:onnx", "--calib-data", tmp_path / "calibration.npz",
        "--eval-data", tmp_path / "evaluation.npz", "--max-drop", "1", "--bench", "0",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["engines"][1]["drop"]["verdict"] == "broken"
    assert len(report["rungs"]) > 1
    assert not report["engines"][1]["recommended"]


def test_static_int8_without_data_says_what_to_pass(net: Path, tmp_path: Path) -> None:
    refused(compress(net / "net.onnx", "--out", tmp_path / "o"), 2, "--data", "int8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--target", "int7"], 2, ["int7", "int8"]),
        (["--target", "int8:abacus"], 2, ["abacus", "onnx"]),
        (["--target", "int8:onnx:tpu"], 1, ["tpu", "cpu"]),
        (["--metric", "beauty"], 2, ["beauty", "top1"]),
        (["--calib", "none"], 2, ["--calib"]),
        (["--colour"], 2, ["--colour"]),
        (["--max-drop", "-1"], 2, ["--max-drop"]),
        (["--scheme", "abacus"], 2, ["abacus", "ort-x86-avx2"]),
        (["--input", "image=3xbx3"], 2, ["--input"]),
        (["--eval-data", "nowhere.npz"], 1, ["nowhere.npz"]),
        (["--recipe", "nowhere.json"], 2, ["nowhere.json"]),
        (["--bench", "nan"], 2, ["--bench"]),
        (["--threads", "99999999999"], 2, ["--threads"]),
    ],
)
def test_a_wrong_request_is_one_line(
    net: Path, tmp_path: Path, arguments: list[str], status: int, words: list[str]
) -> None:
    result = compress(net / "net.onnx", "--data", net / "data.npz", "--out", tmp_path / "o", *arguments)
    refused(result, status, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    refused(compress("nowhere.onnx", "--data", "x.npz", cwd=tmp_path), 1, "nowhere.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_is_a_file(net: Path, tmp_path: Path) -> None:
    (tmp_path / "o").write_text("mine")
    refused(compress(net / "net.onnx", "--data", net / "data.npz", "--out", tmp_path / "o"), 1, "--out")
    assert (tmp_path / "o").read_text() == "mine"


def test_nan_in_the_weights_is_refused(net: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(net / "net.onnx")
    array = np.array(onnx.numpy_helper.to_array(model.graph.initializer[0]))
    array[0, 0, 0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, "w0"))
    onnx.save(model, tmp_path / "nan.onnx")
    result = compress(tmp_path / "nan.onnx", "--data", net / "data.npz", "--out", tmp_path / "o")
    refused(result, 1, "w0", "NaN")


def test_help_is_cheap_and_imports_nothing_heavy() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = compress("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.25
    code = (
        "import sys, compressor.pipeline, compressor.cli, compressor.api;"
        "heavy = {'numpy', 'torch', 'onnx', 'onnxruntime', 'rich', 'PIL'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("stage", ["calibrate", "quantize", "run-int8-onnx-cpu"])
def test_kill_9_and_the_same_command_goes_on_to_the_same_scales(
    net: Path, done: Path, tmp_path: Path, stage: str
) -> None:
    command = [
        *COMPRESS, net / "net.onnx", "--target", "int8:onnx", "--data", net / "data.npz", "--calib", "40",
        "--max-drop", "10", "--bench", "0", "--batch", "1", "--out", tmp_path / "out",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out" / "steps").glob(f"{stage}-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "report.json").exists()
    again = compress(*command[3:])
    assert again.returncode == 0, again.stderr
    assert scales(tmp_path / "out") == scales(done)
    assert list((tmp_path / "out").rglob("*.partial")) == []


def scales(out: Path) -> dict[str, bytes]:
    import onnx

    model = onnx.load(out / "engines" / "int8-onnx-cpu" / "model.onnx")
    return {item.name: item.SerializeToString() for item in model.graph.initializer}


def test_inspect_report_and_doctor(net: Path, done: Path) -> None:
    inspected = compress("inspect", net / "net.onnx")
    assert inspected.returncode == 0, inspected.stderr
    for word in ("image", "logits", "Conv"):
        assert word in inspected.stdout
    again = compress("report", done)
    assert again.returncode == 0, again.stderr
    assert "int8:onnx:cpu" in again.stdout
    refused(compress("report", net), 2, "report.json")
    refused(compress("inspect", net / "nothing.pt"), 1, "nothing.pt")
    doctor = compress("doctor")
    for word in ("onnxruntime", "torch", "tensorflow"):
        assert word in doctor.stdout


def test_labels_of_another_model_are_doubted(net: Path, tmp_path: Path) -> None:
    x = np.load(net / "data.npz")["x"]
    answers = np.load(net / "data.npz")["y"]
    np.savez(tmp_path / "shifted.npz", x=x, y=(answers + 1) % 4)
    result = compress(
        net / "net.onnx", "--target", "fp32:onnx", "--data", tmp_path / "shifted.npz", "--bench", "0",
        "--out", tmp_path / "o",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "no better than guessing" in result.stderr


def brief(net: Path, out: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A run without latency."""
    data = ("--data", net / "data.npz")
    return compress(
        net / "net.onnx", "--target", "int8:onnx", *data, "--bench", "0", "--out", out, *arguments
    )


def test_nothing_of_the_user_is_replaced(net: Path, tmp_path: Path) -> None:
    (tmp_path / "engines" / "int8-onnx-cpu").mkdir(parents=True)
    (tmp_path / "engines" / "int8-onnx-cpu" / "notes.txt").write_text("mine")
    refused(brief(net, tmp_path), 1, "--out", "earlier run")
    model = tmp_path / "model.onnx"
    model.write_bytes((net / "net.onnx").read_bytes())
    result = compress(model, "--target", "int8:onnx", "--data", net / "data.npz", "--out", model)
    refused(result, 2, "--out", "is what is read")
    assert model.read_bytes() == (net / "net.onnx").read_bytes()
    assert (tmp_path / "engines" / "int8-onnx-cpu" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("side", ["small.onnx.json", "small.xml.json", "small.bin"])
def test_files_beside_an_engine_are_not_replaced(net: Path, tmp_path: Path, side: str) -> None:
    kind = "openvino" if side == "small.bin" or ".xml" in side else "onnx"
    out = tmp_path / f"small.{'xml' if kind == 'openvino' else 'onnx'}"
    given = (net / "net.onnx", "--target", f"fp32:{kind}:cpu", "--bench", "0", "--data", net / "data.npz")
    (tmp_path / side).write_text('{"mine": 1}')
    refused(compress(*given, "--out", out), 2, f"also writes {side} beside it", "choose another --out")
    assert [path.name for path in tmp_path.iterdir()] == [side]
    (tmp_path / side).unlink()
    for _ in range(2):  # what an earlier run wrote is replaced
        done = compress(*given, "--out", out)
        assert done.returncode == 0, done.stderr


def test_engines_of_another_model_go(net: Path, tmp_path: Path) -> None:
    import onnx

    other = onnx.load(net / "net.onnx")
    other.graph.doc_string = "another"
    onnx.save(other, tmp_path / "other.onnx")
    out, given = tmp_path / "out", ("--bench", "0", "--data", net / "data.npz", "--out", tmp_path / "out")
    for target in ("fp32:onnx:cpu", "fp16:onnx:cpu"):
        assert compress(net / "net.onnx", "--target", target, *given).returncode == 0
    names = {path.name for path in (out / "engines").iterdir()}
    assert names == {"fp32-onnx-cpu", "fp16-onnx-cpu"}  # both are of this model
    for name in names:
        (out / "engines" / name / "notes.txt").write_text("mine")
    again = compress(tmp_path / "other.onnx", "--target", "fp32:onnx:cpu", *given)
    assert again.returncode == 0, again.stderr
    assert not {path.name for path in (out / "engines" / "fp16-onnx-cpu").iterdir()} - {"notes.txt"}
    assert (out / "engines" / "fp32-onnx-cpu" / "notes.txt").read_text() == "mine"
    manifest = json.loads((out / "engines" / "fp32-onnx-cpu" / "engine.json").read_text())
    assert manifest["source"]["path"] == str(tmp_path / "other.onnx")


def test_lint_writes_over_nothing(net: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes((net / "net.onnx").read_bytes())
    before = model.read_bytes()
    for out, words in (
        (model, "is what is read"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x.onnx", "there is no folder"),
    ):
        refused(compress("lint", model, "--for", "ort", "--fix", "--out", out), 2, f"--out {out}", words)
    (tmp_path / "link.onnx").symlink_to(tmp_path / "target.onnx")
    done = compress("lint", model, "--for", "ort", "--fix", "--out", tmp_path / "link.onnx")
    assert done.returncode in (0, 1), done.stderr
    assert (tmp_path / "link.onnx").is_symlink()
    assert (tmp_path / "target.onnx").is_file()
    assert model.read_bytes() == before
    full = compress("lint", model, "--for", "ort", "--fix", "--out", "/dev/full/x.onnx")
    refused(full, 2, "there is no folder /dev/full")


def test_figures_of_bench_replace_no_engine_device_or_link(net: Path, tmp_path: Path) -> None:
    model, engine = tmp_path / "m.onnx", ("bench", tmp_path / "m.onnx", "--made-up", "--requests", "2")
    model.write_bytes((net / "net.onnx").read_bytes())
    before = model.read_bytes()
    (tmp_path / "to-engine").symlink_to(model)
    for name in ("m.onnx", "to-engine"):
        refused(compress(*engine, "--json", tmp_path / name), 2, "is what is read")
    assert model.read_bytes() == before
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    done = compress(*engine, "--json", tmp_path / "link.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["engines"]
    (tmp_path / "null").symlink_to("/dev/null")
    assert compress(*engine, "--json", tmp_path / "null").returncode == 0
    assert Path("/dev/null").is_char_device()
    (tmp_path / "full").symlink_to("/dev/full")
    refused(compress(*engine, "--json", tmp_path / "full"), 1, "the disk is full", "choose another --json")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_ends_in_one_line(net: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [*COMPRESS, "bench", net / "net.onnx", "--made-up", "--seconds", "100", "--json", "x.json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        list(map(str, command)), env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    time.sleep(4)
    assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.strip().splitlines()[-1] == "compress: interrupted"
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    assert not [link for link in Path("/proc").glob("[0-9]*/cwd") if os.path.realpath(link) == str(tmp_path)]


def test_folders_made_for_a_wrong_request_go_again(net: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "a" / "b" / "c", tmp_path / "empty"):
        refused(brief(net, out, "--eval-data", "nowhere.npz"), 1, "nowhere.npz")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_weights_beside_the_model_and_batch_are_noticed(net: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(net / "net.onnx")
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    arguments = ("--target", "int8:onnx", "--data", net / "data.npz", "--bench", "0", "--out", tmp_path / "o")
    digests = []
    for _ in range(2):
        result = compress(tmp_path / "m.onnx", *arguments)
        assert result.returncode == 0, result.stderr
        report = json.loads((tmp_path / "o" / "report.json").read_text())
        digests.append([engine["sha256"] for engine in report["engines"]])
        weights = np.fromfile(tmp_path / "m.data", np.float32)
        (-weights).tofile(tmp_path / "m.data")
    assert not set(digests[0]) & set(digests[1])
    again = compress(tmp_path / "m.onnx", *arguments, "--batch", "7")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "quantize"),
        ([{"stage": "quantize", "foo": 1}], "foo"),
    ],
)
def test_a_recipe_that_cannot_make_int8_is_refused(
    net: Path, tmp_path: Path, steps: list[dict[str, object]], words: str
) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"steps": steps}))
    refused(brief(net, tmp_path / "o", "--recipe", tmp_path / "r.json"), 2, words)


def test_a_recipe_takes_the_scheme_of_the_machine(net: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"steps": [{"stage": "quantize", "observer": "minmax"}]}))
    result = brief(net, tmp_path / "o", "--recipe", tmp_path / "r.json")
    assert result.returncode == 0, result.stderr
    recipe = json.loads((tmp_path / "o" / "engines" / "int8-onnx-cpu" / "recipe.json").read_text())
    assert recipe["steps"][0]["scheme"].startswith("ort-")
    (stored,) = (tmp_path / "o" / "steps").glob("export-int8-onnx-cpu-*")
    engine = bytearray((stored / "model.onnx").read_bytes())
    engine[len(engine) // 2] ^= 1
    (stored / "model.onnx").write_bytes(engine)
    refused(brief(net, tmp_path / "o", "--recipe", tmp_path / "r.json"), 1, "not the file that was measured")


def test_a_closed_stderr_does_not_stop_the_job(net: Path, tmp_path: Path) -> None:
    command = " ".join([*COMPRESS, str(net / "net.onnx"), "--target fp32:onnx --bench 0 --data",
                        str(net / "data.npz"), "--out", str(tmp_path / "o"), "2>&-"])  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(["bash", "-c", command], env=environment, stdout=subprocess.DEVNULL, check=False)
    assert result.returncode == 0
    assert (tmp_path / "o" / "report.json").is_file()


def test_a_model_with_nothing_to_quantize_is_passed_on_and_that_is_said(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, 8, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], "relu")], "g", ports[:1], ports[1:])
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10),
        tmp_path / "m.onnx",
    )
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32))
    result = compress(
        tmp_path / "m.onnx", "--target", "int8:onnx", "--data", tmp_path / "d.npz", "--bench", "0",
        "--out", tmp_path / "o",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "nothing to quantize" in result.stderr
