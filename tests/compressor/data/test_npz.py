"""Arrays on disk: lazily, by split, with labels, and nothing unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.data import DataOptions, Dataset, open_dataset
from compressor.data import npz as plugin
from compressor.errors import DataError
from compressor.model import TensorSpec

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 3, 4)).astype(np.float32)


def opened(path: Path, *inputs: TensorSpec, split: str = "") -> Dataset:
    return open_dataset(f"{path}{split}", DataOptions(None, inputs))


def saved(folder: Path, /, **arrays: Any) -> Path:
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def gathered(dataset: Dataset, name: str, size: int = 3) -> np.ndarray:
    return np.concatenate([batch.inputs[name] for batch in dataset.batches(None, size)])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_come_back_as_they_were(tmp_path: Path, save: Any, order: Any) -> None:
    save(tmp_path / "a.npz", image=np.array(X, order=order), label=np.arange(7), odd=X.astype(">f8"))
    dataset = opened(tmp_path / "a.npz")
    assert dataset.arrays == (TensorSpec("image", "float32", (3, 4)), TensorSpec("odd", "float64", (3, 4)))
    assert dataset.length == 7
    assert np.array_equal(gathered(dataset, "image"), X)
    assert np.array_equal(gathered(dataset, "odd"), X.astype(np.float64))
    assert dataset.labels is not None
    assert dataset.labels.tolist() == list(range(7))
    picked = list(dataset.batches(np.array([1, 4, 6]), 2))
    assert [batch.indices.tolist() for batch in picked] == [[1, 4], [6]]
    assert [batch.labels.tolist() for batch in picked if batch.labels is not None] == [[1, 4], [6]]
    assert np.array_equal(picked[1].inputs["image"], X[[6]])


def test_a_stored_array_is_mapped_and_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path, x=np.zeros((1000, 100)), y=np.arange(1000))
    dataset = opened(path)
    assert isinstance(dataset, plugin._Arrays)
    assert isinstance(dataset._array("x"), np.memmap)


def test_an_npy_file_is_one_unnamed_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    dataset = opened(tmp_path / "x.npy")
    assert dataset.arrays == (TensorSpec("arr_0", "float32", (3, 4)),)
    assert np.array_equal(gathered(dataset, "arr_0"), X)


def test_an_input_called_y_is_no_label(tmp_path: Path) -> None:
    path = saved(tmp_path, x=X, y=X)
    assert opened(path).labels is not None
    assert (
        opened(path, TensorSpec("x", "float32", ("n", 3, 4)), TensorSpec("y", "float32", ("n", 3, 4))).labels
        is None
    )


def test_splits_by_prefix_and_suffix(tmp_path: Path) -> None:
    path = saved(tmp_path, x_train=X, y_train=np.zeros(7, int), x_test=X[:2], y_test=np.ones(2, int))
    test = opened(path, split=":test")
    assert (test.arrays[0].name, test.length) == ("x", 2)
    assert test.labels is not None
    assert test.labels.tolist() == [1, 1]
    assert opened(path, split=":train").sha256 == opened(path, split=":train").sha256
    with pytest.raises(DataError, match="choose a part by :train or :test"):
        opened(path)
    with pytest.raises(DataError, match=r"no array is called 'val_\.\.\.'.*there are x_train"):
        opened(path, split=":val")


def test_a_lone_number_is_the_same_for_all_samples_and_others_are_left_aside(tmp_path: Path) -> None:
    path = saved(tmp_path, x=X, y=np.arange(7), rate=np.array(16000), names=np.array(["a", "b"]))
    dataset = opened(path)
    assert [array.name for array in dataset.arrays] == ["x", "rate"]
    assert gathered(dataset, "rate").tolist() == [16000] * 7
    assert dataset.notes == ("array 'names' (2) is left aside: it has not 7 rows",)


def test_arrays_of_different_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="differ in their number of samples: a has 7, b has 6"):
        opened(saved(tmp_path, a=X, b=X[:6]))


def test_one_hot_and_column_labels(tmp_path: Path) -> None:
    hot = opened(saved(tmp_path, x=X, y=np.eye(7)[[3, 0, 1, 1, 2, 6, 5]]))
    assert hot.labels is not None
    assert hot.labels.tolist() == [3, 0, 1, 1, 2, 6, 5]
    assert "one-hot labels are taken as class numbers 0 to 6" in hot.notes
    column = opened(saved(tmp_path, x=X, y=np.arange(7)[:, None]))
    assert column.labels is not None
    assert column.labels.shape == (7,)
    scores = opened(saved(tmp_path, x=X, y=np.ones((7, 2))))
    assert scores.labels is not None
    assert scores.labels.shape == (7, 2)


@pytest.mark.parametrize("labels", [np.array(["a"] * 7), np.array([{}] * 7, object), np.arange(5)])
def test_labels_that_are_no_use_are_said(tmp_path: Path, labels: np.ndarray) -> None:
    dataset = opened(saved(tmp_path, x=X, y=labels))
    assert dataset.labels is None
    assert any("left aside" in warning for warning in dataset.warnings)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (trap,)

    path = saved(tmp_path, x=np.array([Trap()] * 3, object), image=np.zeros((3, 2)))
    dataset = opened(path)
    assert TensorSpec("x", "object", ()) in dataset.arrays
    assert [set(batch.inputs) for batch in dataset.batches(None, 8)] == [{"image"}]
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a readable numpy file"),
        (b"PK\x03\x04 cut off", "not a readable numpy file"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "not a readable numpy file"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=words):
        opened(tmp_path / "a.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_cut_archive_is_refused(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", x=X)
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="not a readable numpy file"):
        opened(tmp_path / "a.npz")


def test_a_damaged_compressed_array_is_refused_when_it_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=RNG.normal(size=(50, 40)))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "a.npz").write_bytes(bytes(data))
    with pytest.raises(DataError, match="cannot be read"):
        list(opened(tmp_path / "a.npz").batches(None, 8))


def test_emptiness_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="archive is empty"):
        opened(saved(tmp_path))
    with pytest.raises(DataError, match="no samples in it, the arrays are empty"):
        opened(saved(tmp_path, x=X[:0]))
    with pytest.raises(DataError, match="no samples in it, only rate"):
        opened(saved(tmp_path, rate=np.array(3)))


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    before = opened(saved(tmp_path, x=X)).sha256
    assert opened(saved(tmp_path, x=X)).sha256 == before
    assert opened(saved(tmp_path, x=X + 1)).sha256 != before


def test_preprocess_is_said_to_be_left_out(tmp_path: Path) -> None:
    dataset = open_dataset(str(saved(tmp_path, x=X)), DataOptions({"resize": 8}))
    assert dataset.notes == ("arrays are given to the model as they are; preprocess is for pictures",)
