"""A file is taken for what its bytes are, and what is no model is named."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from compressor import events, plugins
from compressor.errors import ModelFileError
from compressor.loading import inspect, recognise


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole file of each kind."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("files")
    net = torch.nn.Linear(4, 2).eval()
    torch.save(net.state_dict(), folder / "torch_pickle")
    torch.save(net.state_dict(), folder / "torch_pickle.legacy", _use_new_zipfile_serialization=False)
    torch.jit.trace(net, torch.rand(2, 4)).save(str(folder / "torchscript"))
    torch.export.save(torch.export.export(net, (torch.rand(2, 4),)), str(folder / "exported.pt2"))
    save_file(net.state_dict(), folder / "safetensors")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weight = onnx.numpy_helper.from_array(np.ones((4, 2), np.float32), "w")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", s]) for n, s in (("x", 4), ("y", 2))]
    graph = helper.make_graph([node], "g", values[:1], values[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), folder / "onnx")
    return folder


def test_every_kind_recognises_its_own_files_and_no_others(files: Path) -> None:
    for path in files.iterdir():
        own = path.name.partition(".")[0]
        found = {kind for kind in plugins.names("loaders") if plugins.module("loaders", kind).recognise(path)}
        assert found == {own}, path.name


def test_every_kind_has_the_protocol() -> None:
    for kind in plugins.names("loaders"):
        module = plugins.module("loaders", kind)
        assert isinstance(module.DESCRIPTION, str)
        assert all(callable(getattr(module, name)) for name in ("recognise", "load", "inspect"))


@pytest.mark.parametrize("name", ["torch_pickle", "torchscript", "exported.pt2", "safetensors", "onnx"])
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_cut_files_are_called_damaged(files: Path, tmp_path: Path, name: str, kept: float) -> None:
    data = (files / name).read_bytes()
    path = tmp_path / f"cut_{name}"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ModelFileError, match=rf"cut_{name}.*(truncated|damaged)"):
        recognise(path)


def test_a_flipped_byte_in_an_archive_is_noticed(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "flipped.pt"
    with zipfile.ZipFile(files / "torchscript") as archive:
        name = next(name for name in archive.namelist() if name.endswith("data/0"))
        stored = archive.read(name)
    data = bytearray((files / "torchscript").read_bytes())
    data[data.index(stored)] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="damaged"):
        recognise(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty \\(0 bytes\\)"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "LFS pointer"),
        (b"\x1c\0\0\0TFL3" + bytes(64), "TFLite"),
        (b"\x20\0\0\0ORTM" + bytes(64), "onnxruntime"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "Keras .h5"),
        (b"name: net\nlayers: 3\n", "text file"),
        (bytes(range(255, 100, -1)), "not a valid model file"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        recognise(path)


def test_a_missing_file_a_folder_and_a_saved_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        recognise(tmp_path / "none.pt")
    with pytest.raises(ModelFileError, match="is a folder"):
        recognise(tmp_path)
    (tmp_path / "saved_model.pb").touch()
    with pytest.raises(ModelFileError, match="SavedModel"):
        recognise(tmp_path)


def test_an_onnx_file_with_the_wrong_name_is_taken_and_said(files: Path, tmp_path: Path) -> None:
    said: list[str] = []
    events.listen(lambda event: said.append(event.get("warning", "")))
    path = tmp_path / "net.pt"
    path.write_bytes((files / "onnx").read_bytes())
    try:
        assert recognise(path) == "onnx"
    finally:
        events.listen(events._default)
    assert "ONNX model" in said[0]


def test_inspect_says_what_every_file_holds(files: Path) -> None:
    found = {path.name: inspect(path) for path in files.iterdir()}
    assert all(facts["size_bytes"] > 0 for facts in found.values())
    assert {facts["parameters"] for name, facts in found.items() if name != "onnx"} == {10}
    assert found["onnx"]["operators"] == {"MatMul": 1}
    assert found["onnx"]["inputs"] == [{"name": "x", "dtype": "float32", "shape": ("N", 4)}]
    assert found["exported.pt2"]["operators"] == {"linear": 1}
    assert found["torch_pickle"]["tensors"]["weight"] == ["float32", [2, 4]]


def test_inspect_names_what_this_version_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(b"\x1c\0\0\0TFL3" + bytes(64))
    assert "TFLite" in inspect(path)["description"]


def test_inspect_counts_parameters_apart_from_buffers_and_lists_few(tmp_path: Path) -> None:
    net = torch.nn.Sequential(*(torch.nn.BatchNorm1d(3) for _ in range(6)))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    facts = inspect(tmp_path / "net.pt")
    assert (facts["parameters"], facts["buffers"]) == (6 * 2 * 3, 6 * (2 * 3 + 1))
    assert list(facts["tensors"])[20:] == ["…"]
    assert facts["tensors"]["…"] == "and 10 more"
    assert facts["tensors"]["0.num_batches_tracked"] == ["int64", "scalar"]
    assert list(facts).index("architectures") < list(facts).index("tensors")


def test_inspect_counts_weights_beside_the_file(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((400, 2), np.float32), "w")
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", s]) for n, s in (("x", 400), ("y", 2))
    ]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:], [weight]))
    path = tmp_path / "m.onnx"
    onnx.save_model(model, str(path), save_as_external_data=True, location="m.data")
    facts = inspect(path)
    assert facts["size_bytes"] == path.stat().st_size + 3200
    assert facts["files"] == ["m.onnx", "m.data"]
