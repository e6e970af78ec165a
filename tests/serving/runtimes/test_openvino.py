"""OpenVINO: sessions, errors, and in which types an engine really computes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compressor.errors import DataError, ModelFileError, UnsupportedError
from compressor.model import TensorSpec
from serving.runtimes import openvino as runtime

pytest.importorskip("openvino", reason="openvino is not installed")


def engine(path: Path) -> Path:
    """The engine of an ONNX file, in a folder of its own."""
    from compressor import onnx_files
    from compressor.model import Model
    from exporters.openvino import export

    model = Model("onnx", path, *onnx_files.specs(onnx.load(path)), sha256="", parameters=0, kind="onnx")
    folder = path.with_suffix("")
    folder.mkdir()
    return folder / export(model.json(), "int8:openvino:cpu", str(folder))["file"]


@pytest.fixture
def mixed(mixed_engine: Path) -> Path:
    return engine(mixed_engine)


def feeds(n: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(n, 3, 16, 16)).astype(np.float32)}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def macs(path: Path, **arrays: np.ndarray) -> dict[str, int]:
    """Multiply-accumulates by name of the operator, without those that have none."""
    found = runtime.precision(engine(path), arrays, device="cpu")
    return {row["name"]: row["macs"] for row in found["operators"] if row["macs"]}


def test_session_gives_specs_and_outputs_by_name(mixed: Path) -> None:
    session = runtime.open_session(mixed, device="cpu", threads=1)
    assert session.inputs == (TensorSpec("x", "float32", ("dim0", 3, 16, 16)),)
    assert session.outputs == (TensorSpec("y", "float32", ("dim0", 10)),)
    first, second = session.run(feeds(2)), session.run(feeds(5))
    assert first["y"].shape == (2, 10)  # not overwritten by the later run
    assert second["y"].shape == (5, 10)


def test_bound_calls_do_not_meet(mixed: Path) -> None:
    session = runtime.open_session(mixed, device="cpu")
    wanted = [session.run(feeds(seed=seed))["y"] for seed in (0, 1)]
    calls = [session.bind(feeds(seed=seed)) for seed in (0, 1)]
    for which in (1, 0, 0, 1):
        np.testing.assert_array_equal(calls[which]()[0], wanted[which])


def test_arrays_of_any_layout_are_taken(mixed: Path) -> None:
    session = runtime.open_session(mixed, device="cpu")
    x = feeds()["x"]
    turned = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    turned.flags.writeable = False
    np.testing.assert_array_equal(session.run({"x": turned})["y"], session.run({"x": x})["y"])


def test_simulation_runs_the_pairs_around_float_kernels(mixed: Path, mixed_engine: Path) -> None:
    from serving.runtimes import onnx as ort

    def types(**settings: bool) -> set[str]:
        compiled = runtime.compile_model(mixed, "cpu", runtime.settings(1, **settings))
        facts = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
        kernels = [fact for fact in facts if fact["layerType"].astype(str) == "Convolution"]
        return {str(fact["runtimePrecision"].astype(str)) for fact in kernels}

    assert types(simulate=True) == {"f32"}
    assert "u8" in types()
    fused = runtime.open_session(mixed, device="cpu").run(feeds())["y"]
    simulated = runtime.open_session(mixed, device="cpu", simulate=True).run(feeds())["y"]
    wanted = ort.open_session(mixed_engine, device="cpu", simulate=True).run(feeds())["y"]
    for found in (fused, simulated):
        assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()


def test_float_is_float32_on_every_processor(make_mlp: Any) -> None:
    path = make_mlp("mlp.onnx", 3, width=256)
    x = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    weights = [np.asarray(onnx.numpy_helper.to_array(item)) for item in onnx.load(path).graph.initializer]
    wanted = x.astype(np.float64)
    for weight in weights:
        wanted = np.tanh(wanted @ weight)
    np.testing.assert_allclose(
        runtime.open_session(engine(path), device="cpu").run({"x": x})["y"], wanted, atol=1e-5
    )


def test_arrays_are_checked_before_the_runtime_sees_them(mixed: Path) -> None:
    session = runtime.open_session(mixed, device="cpu")
    with pytest.raises(DataError, match="must have the shape"):
        session.run({"x": zeros(1, 4, 16, 16)})
    with pytest.raises(DataError, match="missing x"):
        session.bind({"y": zeros(1)})


def test_files_that_are_no_engines(tmp_path: Path, mixed: Path) -> None:
    def damaged(name: str, text: bytes | None, weights: bytes | None) -> Path:
        for suffix, content in ((".xml", text), (".bin", weights)):
            if content is not None:
                (tmp_path / name).with_suffix(suffix).write_bytes(content)
        return tmp_path / f"{name}.xml"

    text, weights = mixed.read_bytes(), mixed.with_suffix(".bin").read_bytes()
    for path, words in (
        (damaged("none", None, weights), "there is no such file"),
        (damaged("alone", text, None), r"alone\.bin: there is no such file"),
        (damaged("junk", b"abc" * 30, weights), "not a whole OpenVINO engine"),
        (damaged("cut", text[:3000], weights), "not a whole OpenVINO engine"),
        (damaged("half", text, weights[:100]), "not a whole OpenVINO engine"),
    ):
        with pytest.raises(ModelFileError, match=words) as caught:
            runtime.open_session(path, device="cpu")
        assert "\n" not in str(caught.value)


def test_an_engine_under_another_name(tmp_path: Path, mixed: Path) -> None:
    for suffix in (".xml", ".bin"):
        shutil.copy(mixed.with_suffix(suffix), (tmp_path / "mine").with_suffix(suffix))
    session = runtime.open_session(tmp_path / "mine.xml", device="cpu")
    assert session.run(feeds())["y"].shape == (2, 10)


def test_a_run_that_fails_is_one_line(graph: Any, tmp_path: Path) -> None:
    graph.node("Add", ["x", graph.floats("w", 1, 4)], "y")
    path = graph.save(tmp_path / "fails.onnx", {"x": ["N", "M"]}, {"y": ["N", "M"]})
    session = runtime.open_session(engine(path), device="cpu")
    with pytest.raises(UnsupportedError, match="fails on this input") as caught:
        session.run({"x": zeros(1, 5)})
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there_is_an_error(mixed: Path) -> None:
    with pytest.raises(UnsupportedError, match="no device 'cuda' here; it has: cpu"):
        runtime.open_session(mixed, device="cuda")


def test_precision_tells_integer_from_float_compute(mixed: Path) -> None:
    found = runtime.precision(mixed, feeds(), device="cpu")
    n, pixels = 2, 16 * 16
    integer = n * (pixels * 8 * 27 + pixels * 8 * 72 + pixels * 16 * 8 + 16 * 10)
    float_ = n * 10 * 10
    assert found["macs"] == integer + float_
    assert found["share_int8"] == pytest.approx(integer / (integer + float_))
    assert found["share_by_type"]["float32"] == pytest.approx(float_ / (integer + float_))
    assert found["fused_integer_ops"] == 4
    assert {row["name"] for row in found["operators"] if row["macs"]} == {
        "conv1",
        "conv2",
        "conv3",
        "fc",
        "y",
    }
    assert sum(row["time_share"] for row in found["operators"]) == pytest.approx(1)
    (island,) = found["float_islands"]
    assert island["name"] == "y"
    assert island["reason"] == "it has a float input and a float weight or second input"


def test_a_float_engine_has_no_islands(make_mlp: Any) -> None:
    found = runtime.precision(engine(make_mlp("mlp.onnx", 2)), {"x": zeros(3, 64)}, device="cpu")
    assert found["share_by_type"] == {"float32": 1.0}
    assert found["float_islands"] == []
    assert found["macs"] == 3 * 2 * 64 * 64


def test_an_engine_without_products_has_no_share(graph: Any, tmp_path: Path) -> None:
    graph.node("Sin", ["x"], "y")
    path = engine(graph.save(tmp_path / "r.onnx", {"x": ["N"]}, {"y": ["N"]}))
    found = runtime.precision(path, {"x": zeros(3)}, device="cpu")
    assert found["share_int8"] is None
    assert found["share_by_type"] == {}


def test_macs_of_convolutions(graph: Any, tmp_path: Path) -> None:
    graph.node("Conv", ["x", graph.floats("w", 8, 2, 3, 3)], "grouped", group=2, strides=[2, 2])
    graph.node("ConvTranspose", ["x", graph.floats("v", 4, 5, 2, 2)], "up", strides=[2, 2])
    path = graph.save(
        tmp_path / "c.onnx", {"x": [1, 4, 9, 9]}, {"grouped": [1, 8, 4, 4], "up": [1, 5, 18, 18]}
    )
    assert macs(path, x=zeros(1, 4, 9, 9)) == {"grouped": 8 * 16 * 2 * 9, "up": 4 * 81 * 5 * 4}


def test_macs_of_products(graph: Any, tmp_path: Path) -> None:
    graph.node("MatMul", ["a", "b"], "batched")
    graph.node("Gemm", ["c", graph.floats("w", 7, 5), graph.floats("v", 7)], "turned", transA=1, transB=1)
    inputs = {"a": [3, 4, 6], "b": [3, 6, 2], "c": [5, 8]}
    path = graph.save(tmp_path / "p.onnx", inputs, {"batched": [3, 4, 2], "turned": [8, 7]})
    found = macs(path, **{name: zeros(*shape) for name, shape in inputs.items()})
    assert sorted(found.values()) == sorted([3 * 4 * 6 * 2, 8 * 5 * 7])


def test_macs_of_a_recurrent_operator(graph: Any, tmp_path: Path) -> None:
    weights = [graph.floats("w", 1, 4 * 6, 3), graph.floats("r", 1, 4 * 6, 6)]
    graph.node("LSTM", ["x", *weights], "lstm", hidden_size=6)
    path = graph.save(tmp_path / "r.onnx", {"x": [5, 2, 3]}, {"lstm": [5, 1, 2, 6]})
    assert list(macs(path, x=zeros(5, 2, 3)).values()) == [5 * 2 * 4 * 6 * (3 + 6)]
