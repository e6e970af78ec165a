"""No file runs code of its own: pickles, exported programs and TorchScript made to attack."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import CompressError, ModelFileError
from compressor.loading import LoadOptions, inspect, load
from compressor.model import TensorSpec
from compressor.pickles import globals_of

MARK = "MARK"
PROGRAM = "models/model.json"


class Payload:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARK}",)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Sequential(torch.nn.Linear(4, 2))
    path = tmp_path / "good.pt2"
    dims = ({0: torch.export.Dim("n")},)
    torch.export.save(torch.export.export(net, (torch.rand(2, 4),), dynamic_shapes=dims), str(path))
    return path


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rewritten(source: Path, edit: Callable[[str, bytes], bytes]) -> Path:
    target = source.with_name("evil.pt2")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, edit(name.partition("/")[2], old.read(name)))
    return target


def in_program(old: str, new: str) -> Callable[[str, bytes], bytes]:
    def edit(name: str, data: bytes) -> bytes:
        if name != PROGRAM:
            return data
        text = json.dumps(json.loads(data))
        assert old in text
        return text.replace(old, new).encode()

    return edit


def with_pickled_weight(name: str, data: bytes) -> bytes:
    if name == "data/weights/weight_0":
        return pickled(Payload())
    if name.endswith("weights_config.json"):
        config = json.loads(data)
        for entry in config["config"].values():
            entry["use_pickle"] = entry["path_name"] == "weight_0"
        return json.dumps(config).encode()
    return data


def with_opaque_constant(name: str, data: bytes) -> bytes:
    if not name.endswith("constants_config.json"):
        return data
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    return json.dumps({"config": {"x": entry}}).encode()


RUN = f"__import__('os').system('touch {MARK}')"
ATTACKS = {
    "sample inputs": lambda name, data: pickled(Payload()) if name.startswith("data/sample") else data,
    "weights": with_pickled_weight,
    "constants": with_opaque_constant,
    "operator": in_program("torch.ops.aten.linear.default", "torch.os.system"),
    "file operator": in_program("torch.ops.aten.linear.default", "torch.ops.aten.from_file.default"),
    "argument name": in_program('"name": "input"', f'"name": "input={RUN}"'),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_exported_program_cannot_run_code(program: Path, tmp_path: Path, attack: str) -> None:
    path = rewritten(program, ATTACKS[attack])
    with pytest.raises(ModelFileError, match=r"could run code|no tensor|cannot read"):
        load(path, LoadOptions(), tmp_path)
    assert not Path(MARK).exists()


def test_a_size_cannot_run_code(program: Path, tmp_path: Path) -> None:
    def edit(name: str, data: bytes) -> bytes:
        def changed(value: Any, key: str = "") -> Any:
            if isinstance(value, dict):
                return {each: changed(entry, each) for each, entry in value.items()}
            if isinstance(value, list):
                return [changed(entry) for entry in value]
            return RUN if key == "expr_str" else value

        return json.dumps(changed(json.loads(data))).encode() if name == PROGRAM else data

    path = rewritten(program, edit)
    with pytest.raises(ModelFileError, match="could run code: the size"):
        load(path, LoadOptions(), tmp_path)
    assert not Path(MARK).exists()


def test_guards_of_a_program_are_not_run(program: Path, tmp_path: Path) -> None:
    def edit(name: str, data: bytes) -> bytes:
        return json.dumps({**json.loads(data), "guards_code": [RUN]}).encode() if name == PROGRAM else data

    load(rewritten(program, edit), LoadOptions(), tmp_path)
    assert not Path(MARK).exists()


def test_the_unchanged_program_is_taken(program: Path, tmp_path: Path) -> None:
    model = load(rewritten(program, lambda name, data: data), LoadOptions(), tmp_path)
    assert model.inputs[0].shape == ("batch", 4)


def test_a_program_saved_on_another_device_is_read_on_the_cpu(program: Path, tmp_path: Path) -> None:
    path = rewritten(
        program,
        lambda name, data: data.replace(b'{"type": "cpu", "index": null}', b'{"type": "cuda", "index": 0}'),
    )
    assert b"cuda" in path.read_bytes()
    assert load(path, LoadOptions(), tmp_path).parameters == 10


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_not_run_but_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.pt"
    torch.save({"weight": torch.ones(2), "x": Payload()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelFileError, match=r"code of posix\.system.*--trust"):
        load(path, LoadOptions(), tmp_path)
    assert inspect(path)["classes"] == ["posix.system"]
    assert not Path(MARK).exists()


def test_torchscript_that_writes_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.save(x, "MARK")
            return x

    monkeypatch.chdir(tmp_path)
    torch.jit.script(Writes()).save(str(tmp_path / "net.pt"))
    samples = (TensorSpec("x", "float32", (2,)),)
    with pytest.raises(CompressError, match=r"reads or writes files by torch\.save"):
        load(tmp_path / "net.pt", LoadOptions(samples=samples), tmp_path)
    assert not Path(MARK).exists()


@pytest.mark.parametrize("protocol", range(5))
def test_globals_are_seen_in_every_protocol(protocol: int) -> None:
    import pickle

    assert globals_of(io.BytesIO(pickle.dumps([Payload(), 1], protocol))) == ["posix.system"]


def test_a_name_that_is_no_constant_is_unknown() -> None:
    assert globals_of(io.BytesIO(b"\x80\x04N\x93.")) == ["?"]
    assert globals_of(io.BytesIO(b"cos\nsystem\n(S'x'\ntR\xff garbage")) == ["os.system"]
