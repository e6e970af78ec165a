"""ONNX files in and out: conversion, versions, weights beside the graph."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor import onnx_files
from compressor.errors import ModelFileError, UnsupportedError, UsageError
from compressor.loading import LoadOptions, load
from compressor.model import Model, TensorSpec
from compressor.target import Target
from compressor.torch_graph import Origin, export
from exporters import onnx as exporter

RNG = np.random.default_rng(0)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.lstm = torch.nn.LSTM(4, 5, batch_first=True)

    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        features = torch.relu(self.bn(self.conv(image))).flatten(2).transpose(1, 2)
        state, _ = self.lstm(features * scale.unsqueeze(-1))
        return {"last": state[:, -1], "mean": features.mean((1, 2))}


def run(path: Path, feeds: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def small_onnx(path: Path, opset: int = 17, ir: int = 10, as_inputs: bool = False) -> onnx.ModelProto:
    weight = numpy_helper.from_array(RNG.normal(size=(64, 8)).astype(np.float32), "w")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", s]) for n, s in (("x", 64), ("y", 8))]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight])
    if as_inputs:
        graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 8]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    path.write_bytes(model.SerializeToString())
    return model


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Model]:
    folder = tmp_path_factory.mktemp("converted")
    torch.manual_seed(0)
    net = Net().eval()
    specs = (
        TensorSpec("image", "float32", ("batch", 3, 8, 8)),
        TensorSpec("scale", "float32", ("batch", 36)),
    )
    made = export(net, specs, (), folder / "model.pt2", Origin("test", "0" * 64))
    value = json.loads(json.dumps(exporter.convert(made.json(), str(folder), 20)))
    return net, Model.of(value, folder)


def test_names_free_batch_and_opset_are_as_asked(converted: tuple[Net, Model]) -> None:
    _, model = converted
    assert [str(spec) for spec in model.inputs] == ["image=batchx3x8x8:float32", "scale=batchx36:float32"]
    assert [spec.name for spec in model.outputs] == ["last", "mean"]
    assert {spec.shape[0] for spec in model.outputs} == {"batch"}
    assert model.facts["opset"] == 20
    assert set(model.facts["parity"]) == {"1", "2", "5"}
    assert max(model.facts["parity"].values()) < 1e-5


def test_the_file_gives_what_torch_gives_at_an_unseen_batch(converted: tuple[Net, Model]) -> None:
    net, model = converted
    image, scale = torch.randn(7, 3, 8, 8), torch.randn(7, 36)
    got = run(model.path, {"image": image.numpy(), "scale": scale.numpy()})
    with torch.no_grad():
        expected = net(image, scale)
    np.testing.assert_allclose(got[0], expected["last"].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], expected["mean"].numpy(), rtol=1e-4, atol=1e-5)


def test_the_engine_is_one_file_that_runs_alone(converted: tuple[Net, Model], tmp_path: Path) -> None:
    _, model = converted
    made = exporter.export(model.json(), "fp32:onnx:cpu", str(tmp_path))
    assert made["files"] == ["model.onnx"] == [each.name for each in tmp_path.iterdir()]
    assert made["size_bytes"] == (tmp_path / "model.onnx").stat().st_size
    assert len(made["sha256"]) == 64


def test_a_large_model_keeps_its_weights_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "LIMIT", 100)
    small_onnx(tmp_path / "in.onnx")
    folder = tmp_path / "out"
    folder.mkdir()
    source = load(tmp_path / "in.onnx", LoadOptions(), folder)
    engine = tmp_path / "engine"
    engine.mkdir()
    made = exporter.export(source.json(), "fp32", str(engine))
    assert made["files"] == ["model.onnx", "model.onnx.data"]
    moved = engine.rename(tmp_path / "moved")
    x = RNG.normal(size=(3, 64)).astype(np.float32)
    np.testing.assert_array_equal(
        run(moved / "model.onnx", {"x": x})[0], run(tmp_path / "in.onnx", {"x": x})[0]
    )


def test_weights_in_sub_folders_are_gathered_and_a_missing_one_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "blobs").mkdir(parents=True)
    model = small_onnx(tmp_path / "whole.onnx")
    tensor = model.graph.initializer[0]
    (folder / "blobs" / "w.bin").write_bytes(bytes(16) + tensor.raw_data)
    onnx.external_data_helper.set_external_data(tensor, "blobs/w.bin", 16, len(tensor.raw_data))
    tensor.ClearField("raw_data")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    loaded = load(folder / "model.onnx", LoadOptions(), tmp_path)
    x = RNG.normal(size=(3, 64)).astype(np.float32)
    expected = run(tmp_path / "whole.onnx", {"x": x})[0]
    np.testing.assert_array_equal(run(loaded.path, {"x": x})[0], expected)
    (folder / "blobs" / "w.bin").write_bytes(bytes(100))
    with pytest.raises(ModelFileError, match=r"blobs/w\.bin.*truncated"):
        load(folder / "model.onnx", LoadOptions(), tmp_path)
    (folder / "blobs" / "w.bin").unlink()
    with pytest.raises(ModelFileError, match=r"blobs/w\.bin.*missing"):
        load(folder / "model.onnx", LoadOptions(), tmp_path)


def test_weights_outside_the_folder_are_refused(tmp_path: Path) -> None:
    model = small_onnx(tmp_path / "model.onnx")
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, "../../secret", 0, 4)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match="outside its folder"):
        load(tmp_path / "model.onnx", LoadOptions(), tmp_path)


@pytest.mark.parametrize(("opset", "ir"), [(9, 3), (13, 7), (17, 14), (28, 14)])
def test_old_and_too_new_versions_load(tmp_path: Path, opset: int, ir: int) -> None:
    small_onnx(tmp_path / "in.onnx", opset, ir, as_inputs=ir == 3)
    folder = tmp_path / "out"
    folder.mkdir()
    model = load(tmp_path / "in.onnx", LoadOptions(), folder)
    assert [spec.name for spec in model.inputs] == ["x"]
    assert run(model.path, {"x": np.zeros((2, 64), np.float32)})[0].shape == (2, 8)


def test_sizes_can_be_given_and_must_fit(tmp_path: Path) -> None:
    small_onnx(tmp_path / "in.onnx")
    folder = tmp_path / "out"
    folder.mkdir()
    given = LoadOptions(inputs=(TensorSpec("x", "float32", (4, 64)),))
    assert load(tmp_path / "in.onnx", given, folder).inputs[0].shape == (4, 64)
    wrong = LoadOptions(inputs=(TensorSpec("x", "float32", ("batch", 32)),))
    with pytest.raises(UsageError, match=r"axis 1 .* is fixed at 64"):
        load(tmp_path / "in.onnx", wrong, folder)


def test_an_operator_that_the_runtime_lacks_is_named(tmp_path: Path) -> None:
    model = small_onnx(tmp_path / "in.onnx")
    model.graph.node[0].op_type = "Frobnicate"
    (tmp_path / "in.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedError, match="Frobnicate"):
        load(tmp_path / "in.onnx", LoadOptions(), tmp_path)


def test_strings_are_refused(tmp_path: Path) -> None:
    node = helper.make_node("Identity", ["s"], ["t"])
    values = [helper.make_tensor_value_info(name, TensorProto.STRING, [1]) for name in "st"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, ir_version=10), tmp_path / "in.onnx")
    with pytest.raises(UnsupportedError, match="input 's' is a string tensor"):
        load(tmp_path / "in.onnx", LoadOptions(), tmp_path)


def test_an_engine_that_is_run_next_is_not_loaded_first(tmp_path: Path) -> None:
    model = small_onnx(tmp_path / "in.onnx")
    given = load(tmp_path / "in.onnx", LoadOptions(), tmp_path)
    model.graph.node[0].op_type = "Frobnicate"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    broken = replace(given, path=tmp_path / "model.onnx").json()
    (tmp_path / "out").mkdir()
    assert exporter.export(broken, "int8:onnx:cpu", str(tmp_path / "out"), load=False)["file"] == "model.onnx"
    with pytest.raises(UnsupportedError, match="Frobnicate"):
        exporter.export(broken, "int8:onnx:cpu", str(tmp_path / "out"))


def test_an_export_that_differs_is_refused(converted: tuple[Net, Model], tmp_path: Path) -> None:
    from compressor.parity import check_onnx

    net, model = converted
    graph = onnx.load(model.path)
    tensor = next(each for each in graph.graph.initializer if len(each.dims) == 4)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.1, tensor.name))
    onnx.save(graph, tmp_path / "other.onnx")
    with pytest.raises(UnsupportedError, match=r"relative error .* at batch 1"):
        check_onnx(net, tmp_path / "other.onnx", model.inputs)


def test_what_cannot_be_made_is_said() -> None:
    assert exporter.check(Target.parse("int8:onnx:cpu")) is None
    assert "no kernels" in str(exporter.check(Target.parse("int8-dynamic:onnx:cuda")))
