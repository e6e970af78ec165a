"""A source that gives other samples in a later pass is noticed wherever it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.data import open_dataset, split, stream
from compressor.data._subset import subset
from compressor.data._types import DataOptions
from compressor.errors import DataError

INPUTS = [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}]
SOURCE = """import numpy as np
X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.arange(20) % 2
PASSES = []
def same():
    for start in (0, 4, 11):
        yield X[start:][:7 if start else 4], Y[start:][:7 if start else 4]
    yield X[18:], Y[18:]
def late():
    PASSES.append(1)
    yield X[:4]
    yield X[4:] + len(PASSES)
def label():
    PASSES.append(1)
    yield X[:4], Y[:4]
    yield X[4:], (Y[4:] + len(PASSES)) % 5
def shorter():
    PASSES.append(1)
    yield X[:4]
    yield X[4:][: 16 - len(PASSES)]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("feed.py").write_text(SOURCE)


def reference(source: str, role: str = "evaluation", **more: Any) -> dict[str, Any]:
    made = split(source, None, INPUTS, 5, 0, False, ".")
    common = {"source": source, "preprocess": None, "inputs": INPUTS, "binding": {"x": "x"}, "batch": 3}
    return {**common, "indices": made[role]["file"], "n": made[role]["n"], **more}


@pytest.mark.parametrize("name", ["late", "label", "shorter"])
def test_a_second_pass_of_the_same_process_is_held_against_the_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="a second pass gives other samples than the first"):
        reference(f"{tmp_path}/feed.py:{name}")


def test_the_same_samples_pass_in_batches_of_any_size(tmp_path: Path) -> None:
    data = reference(f"{tmp_path}/feed.py:same")
    expected = np.arange(60, dtype=np.float32).reshape(20, 3)
    for batch in (1, 3, 50):
        got = np.concatenate([each.inputs["x"] for each in stream({**data, "batch": batch})])
        assert np.array_equal(got, expected)
    assert sum(len(each.indices) for each in stream(data, start=7)) == 13


@pytest.mark.parametrize("role", ["calibration", "evaluation"])
@pytest.mark.parametrize("changed", ["values", "labels", "shape"])
def test_a_later_process_is_held_against_the_split(role: str, changed: str) -> None:
    x, y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20) % 2
    np.savez("d.npz", x=x, y=y)
    data = reference("d.npz", role)
    assert sum(len(each.indices) for each in stream(data)) == data["n"]
    number = int(np.load(data["indices"])[-1])
    if changed == "values":
        x[number, 1] += 1
    elif changed == "labels":
        y[number] = 1 - y[number]
    else:
        x = x.astype(np.float64)
        number = int(np.load(data["indices"])[0])
    np.savez("d.npz", x=x, y=y)
    with pytest.raises(DataError, match=rf"gave other samples than before \(first at number {number}, "):
        list(stream(data))


def test_a_source_that_has_become_shorter_is_refused() -> None:
    Path("grows.py").write_text(
        "import numpy as np\nN = [20]\ndef all(): yield np.ones((N[0], 3), np.float32)\n"
    )
    data = reference("grows.py:all")
    import grows  # type: ignore[import-not-found]

    grows.N[0] = 12
    with pytest.raises(DataError, match=r"fewer samples than before \(12 of 20\)"):
        list(stream(data))


def test_a_subset_keeps_its_fingerprints(tmp_path: Path) -> None:
    np.savez("d.npz", x=np.arange(60, dtype=np.float32).reshape(20, 3))
    data = reference("d.npz")
    (tmp_path / "drawn").mkdir()
    drawn = subset(data["indices"], 6, 0, "drawn")
    data = {**data, "indices": f"drawn/{drawn['file']}", "n": 6}
    assert sum(len(each.indices) for each in stream(data)) == 6
    np.savez("d.npz", x=np.ones((20, 3), np.float32))
    with pytest.raises(DataError, match="other samples than before"):
        list(stream(data))


@pytest.mark.parametrize("source", ["feed.py:same", "./feed.py:same", "{here}/feed.py:same", "feed:same"])
def test_a_file_and_a_module_are_the_same_source(tmp_path: Path, source: str) -> None:
    dataset = open_dataset(source.format(here=tmp_path), DataOptions())
    assert (dataset.kind, dataset.length) == ("callable", 20)
