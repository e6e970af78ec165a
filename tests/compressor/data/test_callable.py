"""Batches from the user's own code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compressor.data import DataOptions, Dataset, open_dataset
from compressor.errors import DataError, UsageError
from compressor.model import TensorSpec

CODE = """
from collections import UserDict
import numpy as np

X = np.arange(24, dtype=np.float32).reshape(6, 4)

def arrays():
    return [X[:4], X[4:]]

def pairs():
    for start in range(0, 6, 2):
        yield X[start:start + 2], np.arange(start, start + 2)

def dicts():
    yield UserDict(a=X, b=X[:, :1], labels=np.arange(6) % 2)

def ragged():
    for length in (3, 5, 5):
        yield {"ids": np.full((2, length), length), "mask": np.ones((2, length), bool)}

def lists():
    yield [[1.0, 2.0], [3.0, 4.0]], [0, 1]

def shuffled():
    yield np.random.default_rng().normal(size=(3, 2))

once = iter([X])
loader = [(X[:3], np.zeros(3, int)), (X[3:], np.ones(3, int))]

def failing():
    yield X
    raise KeyError("no such file")

def nothing():
    return []

def number():
    return 3

def triple():
    yield X, X, X

def uneven():
    yield {"a": X, "b": X[:2]}

def scalar():
    yield np.float32(3)

def hot():
    for row in np.eye(4)[[2, 0, 3, 1]]:
        yield X[:1], row[None]

def vectors():
    for row in ([1.0, 0.0], [1.0, 1.0]):
        yield X[:1], np.array([row])

def half():
    yield X[:3], np.zeros(3)
    yield X[3:]
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """Opens a source of the user's module, which lies in the working directory."""
    name = f"own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def opened(attribute: str, *inputs: TensorSpec) -> Dataset:
        return open_dataset(f"{name}:{attribute}", DataOptions(None, inputs))

    return opened


def test_plain_arrays_are_called_x(users: Callable[..., Dataset]) -> None:
    dataset = users("arrays")
    assert dataset.arrays == (TensorSpec("x", "float32", (4,)),)
    assert (dataset.length, dataset.labels) == (6, None)
    batches = list(dataset.batches(None, 3))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2], [3], [4, 5]]
    assert np.concatenate([batch.inputs["x"] for batch in batches]).ravel().tolist() == list(range(24))


def test_pairs_are_inputs_and_labels(users: Callable[..., Dataset]) -> None:
    dataset = users("pairs")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == list(range(6))
    chosen = list(dataset.batches(np.array([1, 2, 5]), 8))
    assert [batch.indices.tolist() for batch in chosen] == [[1], [2], [5]]
    assert [batch.labels.tolist() for batch in chosen if batch.labels is not None] == [[1], [2], [5]]


def test_mappings_may_hold_labels(users: Callable[..., Dataset]) -> None:
    dataset = users("dicts")
    assert [array.name for array in dataset.arrays] == ["a", "b"]
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 1] * 3
    as_input = users("dicts", TensorSpec("labels", "int64", ("n",)))
    assert [array.name for array in as_input.arrays] == ["a", "b", "labels"]
    assert as_input.labels is None


def test_ragged_batches_are_never_merged(users: Callable[..., Dataset]) -> None:
    dataset = users("ragged")
    assert dataset.arrays == (TensorSpec("ids", "int64", ("dim1",)), TensorSpec("mask", "bool", ("dim1",)))
    shapes = [batch.inputs["ids"].shape for batch in dataset.batches(np.array([1, 2, 4, 5]), 8)]
    assert shapes == [(1, 3), (1, 5), (2, 5)]


def test_nested_lists_and_a_bare_iterable(users: Callable[..., Dataset]) -> None:
    assert users("lists").arrays == (TensorSpec("x", "float64", (2,)),)
    dataset = users("loader")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_torch_tensors_and_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "torch_data.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "x = torch.arange(10.).reshape(5, 2).requires_grad_()\n"
        "loader = DataLoader(TensorDataset(x.detach(), torch.arange(5)), batch_size=2)\n"
        "def graph():\n    yield {'x': x * 2}\n"
        "mixed = DataLoader(TensorDataset(torch.arange(1000)), batch_size=10, shuffle=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    dataset = open_dataset("torch_data:loader", DataOptions())
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 1, 2, 3, 4]
    assert dataset.arrays == (TensorSpec("x", "float32", (2,)),)
    (batch,) = open_dataset("torch_data:graph", DataOptions()).batches(None, 8)
    assert batch.inputs["x"].ravel().tolist() == [2.0 * k for k in range(10)]
    with pytest.raises(DataError, match="second pass gives other samples"):
        _ = open_dataset("torch_data:mixed", DataOptions()).length


def test_shuffling_is_refused(users: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match="second pass gives other samples"):
        _ = users("shuffled").length
    with pytest.raises(DataError, match="second pass gives other samples"):
        _ = users("once").length


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("failing", r"failing failed with KeyError: 'no such file' \(own_\d+\.py, line \d+\)"),
        ("nothing", "it gave no batch"),
        ("number", "number failed with TypeError: 'int' object is not iterable"),
        ("triple", "gave a sequence of 3 things; give an array"),
        ("uneven", r"must have the same first axis; it gave a \(6, 4\), b \(2, 4\)"),
        ("scalar", r"must have the same first axis; it gave x \(\)"),
    ],
)
def test_mistakes_are_said(users: Callable[..., Dataset], attribute: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        _ = users(attribute).length


def test_what_is_not_there_is_said(users: Callable[..., Dataset], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no 'missing'"):
        users("missing")
    with pytest.raises(UsageError, match="no module 'no_such'"):
        open_dataset("no_such:data", DataOptions())
    (tmp_path / "needs_more.py").write_text("import not_installed_either\n")
    with pytest.raises(DataError, match=r"ModuleNotFoundError.*\(needs_more.py, line 1\)"):
        open_dataset("needs_more:data", DataOptions())
    (tmp_path / "bad_syntax.py").write_text("def f(:\n")
    with pytest.raises(DataError, match="SyntaxError"):
        open_dataset("bad_syntax:f", DataOptions())


def test_one_hot_labels_are_told_from_all_batches(users: Callable[..., Dataset]) -> None:
    batches = list(users("hot").batches(None, 8))
    assert [batch.labels.tolist() for batch in batches if batch.labels is not None] == [[2], [0], [3], [1]]
    batches = list(users("vectors").batches(None, 8))
    assert [batch.labels.shape for batch in batches if batch.labels is not None] == [(1, 2), (1, 2)]


def test_labels_of_some_batches_only_are_left_aside(users: Callable[..., Dataset]) -> None:
    dataset = users("half")
    assert dataset.labels is None
    assert dataset.warnings == ("some batches have labels and some have none: all are left aside",)


def test_the_digest_is_of_the_content(users: Callable[..., Dataset]) -> None:
    assert users("pairs").sha256 == users("pairs").sha256
    assert users("pairs").sha256 != users("arrays").sha256
