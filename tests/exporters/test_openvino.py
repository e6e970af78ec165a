"""OpenVINO engines from ONNX models: names, numbers, digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor import onnx_files, worker
from compressor.errors import ModelFileError, UnsupportedError
from compressor.model import Model
from compressor.store import file_digest
from compressor.target import Target
from exporters import openvino as exporter
from serving.engine import load_engine, read_manifest

pytest.importorskip("openvino", reason="openvino is not installed")

TARGET = "fp32:openvino:cpu"
WEIGHT = np.random.default_rng(0).normal(size=(200, 100)).astype(np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Model]:
    """Two inputs in use, one that is not, an output that is an input, and one of a product."""

    def build(weight: np.ndarray = WEIGHT, op: str = "MatMul") -> Model:
        nodes = [
            helper.make_node(op, ["b", "w"], ["m"], "product"),
            helper.make_node("Add", ["m", "a"], ["y"], "sum"),
            helper.make_node("Identity", ["a"], ["z"], "same"),
        ]
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes,
            "g",
            [
                value("b", TensorProto.FLOAT, ["N", 200]),
                value("unread", TensorProto.INT64, ["N", 2]),
                value("a", TensorProto.FLOAT, ["N", 100]),
            ],
            [value("z", TensorProto.FLOAT, ["N", 100]), value("y", TensorProto.FLOAT, ["N", 100])],
            [numpy_helper.from_array(weight, "w")],
        )
        path = tmp_path / "source.onnx"
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        onnx.save(proto, path)
        return Model("onnx", path, *onnx_files.specs(proto), sha256="", parameters=0, kind="onnx")

    return build


def run(folder: Path, **feeds: np.ndarray) -> dict[str, Any]:
    from serving.runtimes.openvino import open_session

    return open_session(folder / "model.xml", device="cpu").run(feeds)


def arrays(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    return {
        "a": rng.normal(size=(n, 100)).astype(np.float32),
        "b": rng.normal(size=(n, 200)).astype(np.float32),
        "unread": np.zeros((n, 2), np.int64),
    }


def test_names_free_dimensions_and_unread_inputs_stay(model: Any, tmp_path: Path) -> None:
    exporter.export(model().json(), TARGET, str(tmp_path))
    for n in (1, 3):
        feeds = arrays(n)
        outputs = run(tmp_path, **feeds)
        assert set(outputs) == {"y", "z"}
        np.testing.assert_array_equal(outputs["z"], feeds["a"])
        np.testing.assert_allclose(outputs["y"], feeds["b"] @ WEIGHT + feeds["a"], rtol=1e-4, atol=1e-4)


ZERO, SHAPE = np.zeros(1, np.float32), np.array([0, -1], np.int64)
PASSING = [
    ("Dropout", [], {}),
    ("Identity", [], {}),
    ("Cast", [], {"to": TensorProto.FLOAT}),
    ("Add", ["zero"], {}),
    ("Reshape", ["shape"], {}),
]


@pytest.mark.parametrize(("op", "more", "attributes"), PASSING, ids=[op for op, *_ in PASSING])
@pytest.mark.parametrize("outputs", [("y",), ("y", "d"), ("y", "m"), ("y", "d", "m")])
def test_what_openvino_takes_out_leaves_the_names(
    tmp_path: Path, op: str, more: list[str], attributes: dict[str, Any], outputs: tuple[str, ...]
) -> None:
    """A node that does nothing behind the input, and one before the output; what is between is given too."""
    nodes = [
        helper.make_node(op, ["x", *more], ["d"], **attributes),
        helper.make_node("MatMul", ["d", "w"], ["m"]),
        helper.make_node(op, ["m", *more], ["y"], **attributes),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["N", 200])],
        [value(name, TensorProto.FLOAT, ["N", 200 if name == "d" else 100]) for name in outputs],
        [numpy_helper.from_array(*pair) for pair in ((WEIGHT, "w"), (ZERO, "zero"), (SHAPE, "shape"))],
    )
    path = tmp_path / "source.onnx"
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(proto, path)
    source = Model("onnx", path, *onnx_files.specs(proto), "0" * 64, WEIGHT.size, "onnx")
    (tmp_path / "out").mkdir()
    made = exporter.export(source.json(), TARGET, str(tmp_path / "out"))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(made["files"])
    feed = np.ones((3, 200), np.float32)
    found = run(tmp_path / "out", x=feed)
    assert set(found) == set(outputs)
    for name in outputs:
        np.testing.assert_allclose(found[name], feed if name == "d" else feed @ WEIGHT, rtol=1e-4)


def test_names_that_are_lost_are_said(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Dropout", ["x"], ["d", "mask"]),
        helper.make_node("Cast", ["mask"], ["kept"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["d", "kept"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    floats = [value(name, TensorProto.FLOAT, ["N", 4]) for name in "xy"]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", floats[:1], floats[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(proto, tmp_path / "source.onnx")
    source = Model("onnx", tmp_path / "source.onnx", *onnx_files.specs(proto), "0" * 64, 0, "onnx")
    with pytest.raises(UnsupportedError, match="another input, 'd'; the model's are x"):
        exporter.export(source.json(), TARGET, str(tmp_path))


def test_floats_are_not_stored_as_halves(model: Any, tmp_path: Path) -> None:
    found = exporter.export(model().json(), TARGET, str(tmp_path))
    assert (tmp_path / "model.bin").stat().st_size >= WEIGHT.nbytes
    assert found["files"] == ["model.xml", "model.bin"]
    assert found["size_bytes"] == sum((tmp_path / name).stat().st_size for name in found["files"])


def test_the_digest_covers_the_weights(model: Any, tmp_path: Path) -> None:
    digests = []
    for name, weight in (("one", WEIGHT), ("other", WEIGHT * 2)):
        folder = tmp_path / name
        folder.mkdir()
        found = exporter.export(model(weight).json(), TARGET, str(folder))
        assert found["sha256"] == file_digest(folder / "model.xml")
        assert file_digest(folder / "model.bin") in (folder / "model.xml").read_text()
        digests.append(found["sha256"])
    assert digests[0] != digests[1]


def test_the_same_model_gives_the_same_engine(model: Any, tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "again"):
        arguments = {"model": model().json(), "target": TARGET, "folder": str(tmp_path / name)}
        (tmp_path / name).mkdir()
        digests.add(worker.call("exporters.openvino:export", arguments).value["sha256"])
    assert len(digests) == 1


def test_a_model_that_openvino_lacks_operators_for_is_one_line(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"OpenVINO .*Nonesuch") as caught:
        exporter.export(model(op="Nonesuch").json(), TARGET, str(tmp_path))
    assert "\n" not in str(caught.value)


def test_pairs_that_change_nothing_are_left_out(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["a"]),
        helper.make_node("DequantizeLinear", ["a", "scale", "zero"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[1, 0]),
        helper.make_node("QuantizeLinear", ["c", "scale", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["d", "scale", "zero"], ["e"]),
        helper.make_node("Exp", ["e"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    constants = [("scale", np.float32(0.1)), ("zero", np.uint8(7))]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["N", 3])],
        [value("y", TensorProto.FLOAT, [3, "N"])],
        [numpy_helper.from_array(np.asarray(number), name) for name, number in constants],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(proto, tmp_path / "source.onnx")
    source = Model(
        "onnx", tmp_path / "source.onnx", *onnx_files.specs(proto), sha256="", parameters=0, kind="onnx"
    )
    exporter.export(source.json(), "int8:openvino:cpu", str(tmp_path))
    assert (tmp_path / "model.xml").read_text().count('type="FakeQuantize"') == 1
    assert not (tmp_path / "suited.onnx").exists()
    x = np.array([[0.31, -0.66, 2.0]], np.float32)
    assert np.log(run(tmp_path, x=x)["y"]) == pytest.approx(np.array([[0.3], [-0.7], [2.0]]), abs=1e-5)


def test_what_can_be_made(monkeypatch: pytest.MonkeyPatch, model: Any, tmp_path: Path) -> None:
    assert exporter.check(Target.parse("int8:openvino:cpu")) is None
    assert "fp32, int8" in str(exporter.check(Target.parse("int4:openvino:cpu")))
    monkeypatch.setattr(exporter, "find_spec", lambda name: None)
    assert "pip install 'modelpress[openvino]'" in str(exporter.check(Target.parse(TARGET)))
    with pytest.raises(UnsupportedError, match="not installed"):
        exporter.export(model().json(), TARGET, str(tmp_path))


def test_an_engine_file_of_any_name_comes_with_its_weights(net: Path, tmp_path: Path) -> None:
    from compressor import compress

    file = tmp_path / "mine.xml"
    report = compress(net / "net.onnx", target="int8", data=net / "data.npz", calib=40, bench=0, out=file)
    assert [engine["target"] for engine in report.engines] == ["fp32:openvino:cpu", "int8:openvino:cpu"]
    assert report.engines[1]["precision"]["share_int8"] == 1
    assert any("end in .onnx" in skipped["reason"] for skipped in report.data["skipped"])
    x = np.load(net / "data.npz")["x"][:3]
    assert load_engine(file).run({"image": x})["logits"].shape == (3, 4)
    weights = file.with_suffix(".bin")
    assert read_manifest(tmp_path / "mine.xml.json")["data_files"] == {"mine.bin": file_digest(weights)}
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(ModelFileError, match=r"mine\.bin: not loaded"):
        load_engine(file)
