"""What a user can hand in by mistake: each is refused in one line that says what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor import events
from compressor.errors import CompressError, ModelFileError, UnsupportedError, UsageError
from compressor.loading import LoadOptions, inspect, load, recognise
from compressor.model import TensorSpec


def refused(path: Path, words: str, kind: type[CompressError] = ModelFileError, **options: Any) -> None:
    with pytest.raises(kind, match=words) as raised:
        load(path, LoadOptions(**options), path.parent)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_never_ends_is_not_opened(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "net.onnx"
    make(path)
    with pytest.raises(ModelFileError, match="no regular file"):
        recognise(path)
    with pytest.raises(ModelFileError, match="no regular file"):
        inspect(path)


@pytest.mark.parametrize("name", ["a" * 300 + ".onnx", "a\0b.onnx", "loop.onnx"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.onnx").symlink_to("loop.onnx")
    for call in (recognise, inspect):
        with pytest.raises(ModelFileError, match="cannot be read"):
            call(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may search every folder")
def test_a_folder_that_may_not_be_searched(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(ModelFileError, match="permission denied"):
        recognise(tmp_path / "closed" / "net.onnx")


# --------------------------------------------------------------------------- ONNX


def graph_of(shape: Any = ("N", 4), **entries: str) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((4, 2), np.float32), "w")
    if entries:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def written(folder: Path, model: onnx.ModelProto) -> Path:
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"location": "w.bin", "offset": "abc"}, "offset 'abc'"),
        ({"location": "w.bin", "offset": "-5"}, "offset '-5'"),
        ({"location": "w.bin", "length": "-10"}, "length '-10'"),
        ({"location": "w.bin", "offset": "0", "length": "99"}, "truncated"),
        ({"location": "link.bin", "length": "32"}, "link"),
        ({"location": "pipe.bin"}, "no regular file"),
        ({"location": "inner/w.bin", "length": "32"}, "link"),
        ({"location": "../w.bin"}, "outside its folder"),
        ({"location": "a" * 300}, "missing"),
    ],
)
def test_weights_beside_that_cannot_be_used(tmp_path: Path, entries: dict[str, str], words: str) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(32))
    (tmp_path / "link.bin").symlink_to("w.bin")
    (tmp_path / "inner").symlink_to(".")
    os.mkfifo(tmp_path / "pipe.bin")
    path = written(tmp_path, graph_of(**entries))
    refused(path, words)
    with pytest.raises(ModelFileError, match=words):
        inspect(path)


def test_a_model_without_inputs_or_outputs(tmp_path: Path) -> None:
    model = graph_of()
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 4), np.float32), "x"))
    del model.graph.input[:]
    refused(written(tmp_path, model), "has no input", UnsupportedError)

    class Constant(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(2)

    torch.jit.script(Constant()).save(str(tmp_path / "m.pt"))
    refused(tmp_path / "m.pt", "has no input", UnsupportedError)
    torch.export.save(torch.export.export(Constant(), ()), str(tmp_path / "m.pt2"))
    refused(tmp_path / "m.pt2", "has no input", UnsupportedError)


def test_an_input_without_a_shape_asks_for_it(tmp_path: Path) -> None:
    path = written(tmp_path, graph_of(shape=None))
    refused(path, "pass it, for example --input x=", UsageError)
    model = load(path, LoadOptions(inputs=(TensorSpec.parse("x=?x4"),)), tmp_path)
    assert model.inputs[0].shape == ("batch", 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [("x=?x4:int64", "is float32, not int64"), ("x=?x5", "fixed at 4"), ("z=1x4", "takes x")],
)
def test_an_input_that_contradicts_the_file(tmp_path: Path, text: str, words: str) -> None:
    inputs = (TensorSpec.parse(text),)
    refused(written(tmp_path, graph_of()), words, UsageError, inputs=inputs)


@pytest.mark.parametrize(
    ("text", "words"),
    [("input_1=?x5", "contradicts"), ("input_1=?x4:int64", "contradicts"), ("z=?x4", "takes input_1")],
)
def test_an_input_that_contradicts_a_program(tmp_path: Path, text: str, words: str) -> None:
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 2)), (torch.rand(2, 4),))
    torch.export.save(program, str(tmp_path / "m.pt2"))
    refused(tmp_path / "m.pt2", words, UsageError, inputs=(TensorSpec.parse(text),))


def test_options_that_a_kind_does_not_use_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 2)), (torch.rand(2, 4),))
    torch.export.save(program, str(tmp_path / "m.pt2"))
    events.listen(lambda event: said.append(event.get("warning", "")))
    try:
        load(written(tmp_path, graph_of()), LoadOptions(architecture="a:b"), tmp_path)
        load(tmp_path / "m.pt2", LoadOptions(inputs=(TensorSpec.parse("input_1=?x4"),)), tmp_path)
    finally:
        events.listen(events._default)
    assert [text.partition(":")[0] for text in said] == ["--arch is not used", "--input is not used"]


def test_a_name_with_a_line_break_stays_in_one_line(tmp_path: Path) -> None:
    import zipfile

    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 2)), (torch.rand(2, 4),))
    torch.export.save(program, str(tmp_path / "good.pt2"))
    with zipfile.ZipFile(tmp_path / "good.pt2") as old, zipfile.ZipFile(tmp_path / "m.pt2", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("models/model.json"):
                data = data.replace(b'"name": "linear"', b'"name": "x\\nimport os"')
                assert b"import os" in data
            new.writestr(name, data)
    refused(tmp_path / "m.pt2", "the name 'x import os'")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_name_the_users_file(tmp_path: Path, value: float) -> None:
    kind = "NaN" if np.isnan(value) else "Inf"
    model = graph_of()
    bad = np.ones((4, 2), np.float32)
    bad[1, 1] = value
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(bad, "w"))
    refused(written(tmp_path, model), rf"m\.onnx: weight 'w' holds {kind}")
    net = torch.nn.Sequential(torch.nn.Linear(4, 2))
    net[0].weight.data[1, 1] = value
    torch.save(net, tmp_path / "m.pt")
    inputs = (TensorSpec.parse("input=?x4"),)
    refused(tmp_path / "m.pt", rf"weight '0\.weight' holds {kind}", inputs=inputs)


# --------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([1, 2], "'a' has no description"),
        ({"dtype": "Z9", "shape": [1], "data_offsets": [0, 4]}, "'a' has the unknown dtype 'Z9'"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "'a' has no valid shape"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, "x"]}, "'a' has no valid shape"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "'a' has no valid shape"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"shape \[2\], but 4 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "truncated"),
        ({"dtype": "F32", "shape": [], "data_offsets": [0, 4], "more": 1}, None),
    ],
)
def test_a_safetensors_header_is_held_to_the_format(tmp_path: Path, entry: Any, words: str | None) -> None:
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    if words is None:
        assert inspect(path)["tensors"]["a"][0] == "float32"
        return
    refused(path, words)
    with pytest.raises(ModelFileError, match=words):
        inspect(path)


def test_safetensors_own_errors_are_one_line(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    refused(path, "cannot be read by safetensors")
    with pytest.raises(ModelFileError, match="cannot be read by safetensors"):
        inspect(path)


# --------------------------------------------------------------------------- torch


def test_a_module_that_contains_itself(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential())
    net[1]._modules["back"] = net
    torch.save(net, tmp_path / "m.pt")
    for architecture in (None, "torch.nn:Identity"):
        options = LoadOptions(architecture=architecture, inputs=(TensorSpec.parse("x=?x2"),))
        with pytest.raises(UnsupportedError, match=r"contains itself \(as '1\.back'\)"):
            load(tmp_path / "m.pt", options, tmp_path)


def test_a_module_that_is_used_twice_is_no_cycle(tmp_path: Path) -> None:
    net: torch.nn.Module = torch.nn.Linear(2, 2)
    for _ in range(3):
        net = torch.nn.Sequential(net, net)
    torch.save(net, tmp_path / "m.pt")
    model = load(tmp_path / "m.pt", LoadOptions(inputs=(TensorSpec.parse("input=?x2"),)), tmp_path)
    assert model.parameters == 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x=99999999999999999999x1x8x8", "too large"),
        (f"x=1{'0' * 5000}x1", "too large"),
        ("x=100000x100000", "too large"),
        ("x=?x3:float99", "unknown dtype 'float99'; known are float32"),
        ("x=²", "not of the form"),
        ("x=0x3", "not of the form"),
    ],
)
def test_inputs_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TensorSpec.parse(text)
