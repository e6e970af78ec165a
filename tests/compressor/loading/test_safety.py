"""No file runs code of its own: pickles, exported programs and TorchScript made to attack."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import CompressError, ModelFileError
from compressor.loading import LoadOptions, inspect, load, torchscript
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
    with pytest.raises(CompressError, match=r"reads or writes files by 'torch\.save'"):
        load(tmp_path / "net.pt", LoadOptions(samples=samples), tmp_path)
    assert not Path(MARK).exists()


SCRIPTED = """class Net(Module):
  __parameters__ = []
  __buffers__ = []
  training : bool
  _is_full_backward_hook : Optional[bool]
  def forward(self: __torch__.Net,
    x: Tensor) -> Tensor:
    return torch.relu(x)
"""
CALL = "    return torch.relu(x)\n"
SAVE = f'(torch.zeros([1]), "{MARK}")'
SCRIPT_ATTACKS = {
    "blank": (CALL, f"    _0 = torch. save{SAVE}\n{CALL}"),
    "line break": (CALL, f"    _0 = (torch.\n  save){SAVE}\n{CALL}"),
    "comment": (CALL, f"    _0 = (torch. # x\n  save){SAVE}\n{CALL}"),
    "line join": (CALL, f"    _0 = torch. \\\n  save{SAVE}\n{CALL}"),
    "by name": (CALL, f'    _0 = getattr(torch, "save"){SAVE}\n{CALL}'),
    "in a branch": (
        CALL,
        f'    if torch.is_floating_point(x):\n      _0 = getattr(torch, "save"){SAVE}\n{CALL}',
    ),
    "long form": (CALL, f"    _0 = ops.aten.save{SAVE}\n{CALL}"),
    "mapped file": (CALL, f'    _0 = torch. from_file("{MARK}", True, 16)\n{CALL}'),
    "other operators": (CALL, f'    _0 = ops.image.write_file("{MARK}", x)\n{CALL}'),
    "default value": ("x: Tensor)", f"x: Tensor, y: NoneType=torch. save{SAVE})"),
    "default value by name": ("x: Tensor)", f'x: Tensor, y: NoneType=getattr(torch, "save"){SAVE})'),
    "class constant": (
        "  training : bool\n",
        f'  training : bool\n  a : Final[NoneType] = getattr(torch, "save"){SAVE}\n',
    ),
    "state": (
        "  def forward",
        "  def __setstate__(self: __torch__.Net,\n    state: bool) -> NoneType:\n"
        f'    _0 = getattr(torch, "save"){SAVE}\n    return None\n  def forward',
    ),
}


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def scripted(folder: Path, old: str = "", new: str = "") -> Path:
    """An archive of `Net` with `SCRIPTED` for its code, edited."""
    whole = folder / "whole.pt"
    torch.jit.script(Net()).save(str(whole))
    assert old in SCRIPTED
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(folder / "net.pt", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith(".py"):
                class_name = re.search(rb"self: (__torch__\S*),", data)
                assert class_name
                data = SCRIPTED.replace(old, new).replace("__torch__.Net", class_name[1].decode()).encode()
            if not name.endswith(".debug_pkl"):
                target.writestr(name, data)
    return folder / "net.pt"


def test_the_plain_script_is_taken(tmp_path: Path) -> None:
    samples = (TensorSpec("x", "float32", (2,)),)
    assert load(scripted(tmp_path), LoadOptions(samples=samples), tmp_path).facts["operators"] == {"relu": 1}


@pytest.mark.parametrize("attack", SCRIPT_ATTACKS)
def test_torchscript_cannot_touch_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = scripted(tmp_path, *SCRIPT_ATTACKS[attack])
    samples = (TensorSpec("x", "float32", (2,)),)
    with pytest.raises(ModelFileError, match=r"is refused.*--trust"):
        load(path, LoadOptions(samples=samples), tmp_path)
    with pytest.raises(ModelFileError, match=r"is refused.*--trust"):
        inspect(path)
    assert not Path(MARK).exists()


@pytest.mark.parametrize("attack", ["by name", "in a branch"])
def test_compiled_functions_are_checked_by_themselves(tmp_path: Path, attack: str) -> None:
    from compressor.loading import _script_code

    unit = torch._C.CompilationUnit()
    path = scripted(tmp_path, *SCRIPT_ATTACKS[attack])
    torch._C.import_ir_module(unit, str(path), torch.device("cpu"), {}, False)
    with pytest.raises(ModelFileError, match=r"by 'aten::save' \(in forward\)"):
        _script_code.check_functions(path, unit.get_functions())


def test_hooks_of_torchscript_are_checked(tmp_path: Path) -> None:
    from compressor.loading import _script_code

    def hook(self: Any, x: tuple[torch.Tensor]) -> None:
        torch.save(x[0], "MARK")

    net = Net()
    net.register_forward_pre_hook(hook)
    torch.jit.script(net).save(str(tmp_path / "net.pt"))
    unit = torch._C.CompilationUnit()
    torch._C.import_ir_module(unit, str(tmp_path / "net.pt"), torch.device("cpu"), {}, False)
    with pytest.raises(ModelFileError, match="by 'aten::save'"):
        _script_code.check_functions(tmp_path / "net.pt", unit.get_functions())


def test_a_trusted_script_may_do_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = scripted(tmp_path, "x: Tensor)", f'x: Tensor, y: Tensor=torch.from_file("{MARK}", True, 4))')
    torchscript._read(path, trust=True)
    assert Path(MARK).exists()  # so that the attacks above are real: loading alone runs a default value


@pytest.mark.parametrize("protocol", range(5))
def test_globals_are_seen_in_every_protocol(protocol: int) -> None:
    import pickle

    assert globals_of(io.BytesIO(pickle.dumps([Payload(), 1], protocol))) == ["posix.system"]


def test_a_name_that_is_no_constant_is_unknown() -> None:
    assert globals_of(io.BytesIO(b"\x80\x04N\x93.")) == ["?"]
    assert globals_of(io.BytesIO(b"cos\nsystem\n(S'x'\ntR\xff garbage")) == ["os.system"]
