"""Manifests, and loading engines by them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor import events
from compressor.errors import DataError, ModelFileError, UnsupportedError, UsageError
from compressor.store import file_digest
from serving import load_engine
from serving.engine import read_manifest, write_manifest

X = np.ones((2, 64), np.float32)


@pytest.fixture
def engine(make_mlp: Any) -> Path:
    return make_mlp("model.onnx", 2)


def manifest(**more: Any) -> dict[str, Any]:
    specs = [{"name": "x", "dtype": "float32", "shape": ["N", 64]}]
    head = {"target": "fp32:onnx:cpu", "runtime": "onnx", "device": "cpu", "file": "model.onnx"}
    return {**head, "inputs": specs, "outputs": specs, **more}


def test_a_manifest_holds_hash_and_size(engine: Path) -> None:
    path = write_manifest(engine.parent, manifest(scheme="u8s8"))
    found = read_manifest(path)
    assert path.name == "engine.json"
    assert found["version"] == 1
    assert found["sha256"] == file_digest(engine)
    assert found["size_bytes"] == engine.stat().st_size
    assert found["scheme"] == "u8s8"


@pytest.mark.parametrize("name", ["", "engine.json", "model.onnx"])
def test_folder_manifest_and_file_open_the_same_engine(engine: Path, name: str) -> None:
    write_manifest(engine.parent, manifest())
    outputs = load_engine(engine.parent / name, threads=1).run({"x": X})
    assert outputs["y"].shape == (2, 64)


def test_an_engine_under_a_name_of_its_own(engine: Path, tmp_path: Path) -> None:
    alone = tmp_path / "mine.onnx"
    alone.write_bytes(engine.read_bytes())
    write_manifest(tmp_path, manifest(file="mine.onnx"))
    (tmp_path / "engine.json").rename(tmp_path / "mine.onnx.json")
    load_engine(alone)
    load_engine(tmp_path / "mine.onnx.json")
    alone.write_bytes(engine.read_bytes() + b"\0")
    with pytest.raises(ModelFileError, match="not loaded"):
        load_engine(alone)


def test_an_engine_without_a_manifest_opens(engine: Path) -> None:
    assert load_engine(str(engine)).run({"x": X})["y"].shape == (2, 64)


def test_a_changed_engine_is_not_loaded(engine: Path) -> None:
    write_manifest(engine.parent, manifest())
    data = bytearray(engine.read_bytes())
    data[-40] ^= 1
    engine.write_bytes(data)
    for path in (engine, engine.parent):
        with pytest.raises(ModelFileError, match="not loaded, because it is not the file that its manifest"):
            load_engine(path)


def test_files_beside_the_engine_are_verified_too(engine: Path) -> None:
    (engine.parent / "weights.bin").write_bytes(b"12345")
    found = read_manifest(write_manifest(engine.parent, manifest(data_files=["weights.bin"])))
    assert found["size_bytes"] == engine.stat().st_size + 5
    load_engine(engine.parent)
    (engine.parent / "weights.bin").write_bytes(b"12346")
    with pytest.raises(ModelFileError, match=r"weights\.bin: not loaded"):
        load_engine(engine.parent)
    (engine.parent / "weights.bin").unlink()
    with pytest.raises(ModelFileError, match="is missing"):
        load_engine(engine.parent)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": 2}, UnsupportedError, "version 2, this program reads version 1"),
        ({"file": "../model.onnx"}, ModelFileError, "must lie beside its manifest"),
        ({"sha256": None}, ModelFileError, "it lacks sha256"),
        ({"runtime": "nonesuch"}, UnsupportedError, "no 'nonesuch' among the runtimes"),
        ({"device": "npu"}, UnsupportedError, "no device 'npu'"),
    ],
)
def test_manifests_that_cannot_be_followed(engine: Path, change: Any, error: Any, words: str) -> None:
    path = write_manifest(engine.parent, manifest())
    changed = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    with pytest.raises(error, match=words):
        load_engine(path)


def test_what_is_no_manifest(engine: Path) -> None:
    path = engine.parent / "engine.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(ModelFileError, match=r"not JSON|it lacks version"):
            load_engine(path)
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_engine(path)
    with pytest.raises(ModelFileError, match="no such engine"):
        load_engine(engine.parent / "none.onnx")
    (engine.parent / "model.xyz").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="no runtime for a file that ends in"):
        load_engine(engine.parent / "model.xyz")


def test_another_version_of_the_runtime_is_said(engine: Path) -> None:
    from compressor.machine import packages

    name = next(name for name in packages() if name.startswith("onnxruntime"))
    heard: list[dict[str, Any]] = []
    events.listen(heard.append)
    try:
        write_manifest(engine.parent, manifest(made_with={name: version(name), "torch": "0.1"}))
        load_engine(engine)
        assert heard == []
        write_manifest(engine.parent, manifest(made_with={name: "1.2.3"}))
        load_engine(engine)
    finally:
        events.listen(events._default)
    assert f"{name} 1.2.3" in heard[0]["warning"]


def test_an_engine_is_served_with_numpy_and_its_runtime_alone(engine: Path) -> None:
    write_manifest(engine.parent, manifest())
    code = """
import sys
from importlib.abc import MetaPathFinder

class Forbid(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        root = name.split(".")[0]
        if root in ("torch", "torchvision", "onnx", "onnxscript", "PIL", "rich", "safetensors", "scipy"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Forbid())
import numpy as np
from serving import load_engine
print(load_engine(sys.argv[1]).run({"x": np.ones((2, 64), np.float32)})["y"].shape)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(engine.parent)], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "(2, 64)", result.stderr


def test_the_folder_of_a_run_names_the_engines_in_it(engine: Path) -> None:
    run = engine.parent / "run"
    folder = run / "engines" / "fp32-onnx-cpu"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(engine.read_bytes())
    write_manifest(folder, manifest())
    for given in (run, run / "engines"):
        with pytest.raises(ModelFileError, match=r"give one of: .*engines/fp32-onnx-cpu"):
            load_engine(given)
    with pytest.raises(ModelFileError, match=r"no engine's \(it has no engine.json\)$"):
        load_engine(engine.parent)


@pytest.mark.parametrize("given", [X, [X], "x"])
def test_arrays_without_names_are_refused_in_words(engine: Path, given: Any) -> None:
    with pytest.raises(DataError, match=r"takes a dict of arrays by input name \(x\), not"):
        load_engine(engine).run(given)


@pytest.mark.parametrize("threads", [0, -1, 9_999_999_999])
def test_threads_out_of_range_are_refused_in_words(engine: Path, threads: int) -> None:
    with pytest.raises(UsageError, match="threads must be from 1 to 4096"):
        load_engine(engine, threads=threads)
