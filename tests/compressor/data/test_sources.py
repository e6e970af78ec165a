"""The seam of data sources: what every plugin must do, and what a source's text means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from compressor import plugins
from compressor.data import DataOptions, open_dataset
from compressor.errors import DataError
from compressor.model import TensorSpec

INPUT = TensorSpec("x", "float32", ("n", 3, 8, 8))


def _image_folder(folder: Path) -> str:
    for name in ("a", "b"):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 256, (9, 7, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number}.png")
    return str(folder / "pictures")


def _npz(folder: Path) -> str:
    values = np.random.default_rng(0).normal(size=(6, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=values, y=np.arange(6) // 3)
    return str(folder / "data.npz")


def _callable(folder: Path) -> str:
    name = f"contract_{abs(hash(str(folder)))}"
    (folder / f"{name}.py").write_text(
        "import numpy as np\n"
        "def batches():\n"
        "    rng = np.random.default_rng(0)\n"
        "    for label in (0, 1):\n"
        "        yield rng.normal(size=(3, 3, 8, 8)).astype('f4'), np.full(3, label)\n"
    )
    return f"{name}:batches"


EXAMPLES: dict[str, Callable[[Path], str]] = {
    "image_folder": _image_folder,
    "npz": _npz,
    "callable": _callable,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("kind", plugins.names("sources"))
def test_every_source_keeps_the_contract(kind: str, tmp_path: Path) -> None:
    source = EXAMPLES[kind](tmp_path)
    plugin = plugins.module("sources", kind)
    assert plugin.DESCRIPTION
    assert [
        name for name in plugins.names("sources") if plugins.module("sources", name).recognise(source)
    ] == [kind]
    dataset = open_dataset(source, DataOptions(None, (INPUT,)))
    assert dataset.kind == kind
    assert (dataset.length, dataset.usable.tolist()) == (6, list(range(6)))
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(dataset.sha256) == 64
    (array,) = dataset.arrays
    assert (array.shape, array.dtype) == ((3, 8, 8), "float32")
    whole = list(dataset.batches(None, 4))
    assert max(len(batch.indices) for batch in whole) <= 4
    assert np.concatenate([batch.indices for batch in whole]).tolist() == list(range(6))
    values = np.concatenate([batch.inputs[array.name] for batch in whole])
    picked = list(dataset.batches(np.array([0, 2, 5]), 2))
    assert np.array_equal(np.concatenate([batch.inputs[array.name] for batch in picked]), values[[0, 2, 5]])
    assert np.concatenate([batch.labels for batch in picked if batch.labels is not None]).tolist() == [
        0,
        0,
        1,
    ]
    assert list(dataset.batches(np.array([], int), 2)) == []
    again = open_dataset(source, DataOptions(None, (INPUT,)))
    assert again.sha256 == dataset.sha256


def test_a_path_that_exists_comes_before_everything(tmp_path: Path) -> None:
    np.savez("data:train", x=np.zeros((2, 3)))
    Path("data:train.npz").rename("data:train")
    (tmp_path / "data.py").write_text("train = [[1.0]]")
    with pytest.raises(DataError, match="cannot be read as data"):
        open_dataset("data:train", DataOptions())  # an archive without its ending is no archive


def test_a_split_comes_before_a_module_and_a_module_before_a_missing_split(tmp_path: Path) -> None:
    (tmp_path / "set" / "val").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "set" / "val" / "a.png")
    (tmp_path / "set" / "__init__.py").write_text("import numpy as np\nval = test = [np.zeros((2, 3))]\n")
    assert open_dataset("set:val", DataOptions()).kind == "image_folder"
    assert open_dataset("set:test", DataOptions()).kind == "callable"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "there is no such file or folder; pass a folder of pictures"),
        ("nowhere/deep.npz", "there is no such file or folder"),
        ("file.csv", "this kind of file cannot be read as data; pass a folder of pictures, an .npz"),
        ("code.py", "name what gives the batches too, e.g. code.py:batches"),
        ("a" * 300, "there is no such file or folder"),
        ("~nobody-here/x.npz", "there is no such file or folder"),
        ("a\0b", "there is no such file or folder"),
        ("folder:val", r"folder folder has no sub-folder 'val' \(it has none\)"),
        ("folder", "no samples in it, no file with a picture's ending"),
    ],
)
def test_what_is_no_source_is_said(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "file.csv").write_text("a,b\n")
    (tmp_path / "code.py").write_text("make = 3\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=words):
        open_dataset(source, DataOptions())
