"""The contract of every runtime."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from compressor import plugins
from compressor.errors import DataError
from compressor.model import TensorSpec
from serving.runtimes import check_feeds

SPECS = (TensorSpec("image", "float32", ("N", 3, 8)), TensorSpec("ids", "int64", ("N",)))


def feeds() -> dict[str, np.ndarray]:
    return {"image": np.zeros((2, 3, 8), np.float32), "ids": np.zeros(2, np.int64)}


@pytest.mark.parametrize("name", plugins.names("runtimes"))
def test_every_runtime_has_what_the_seam_asks_for(name: str) -> None:
    module = plugins.module("runtimes", name)
    assert module.DESCRIPTION
    assert module.PACKAGE
    assert module.SUFFIX.startswith(".")
    assert module.available() is None or isinstance(module.available(), str)
    assert callable(module.open_session)
    assert callable(module.precision)
    if module.available() is None:
        assert "cpu" in module.devices() or "cuda" in module.devices()


@pytest.mark.parametrize("name", plugins.names("runtimes"))
def test_asking_a_runtime_what_it_can_imports_nothing_heavy(name: str) -> None:
    code = (
        f"import sys; from compressor import plugins; m = plugins.module('runtimes', '{name}'); "
        "m.available(); m.devices(); import serving; "
        "heavy = {'numpy', 'onnxruntime', 'onnx', 'torch'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_feeds_that_fit_pass() -> None:
    check_feeds(SPECS, feeds())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.pop("ids"), "missing ids"),
        (lambda f: f.update(extra=f["ids"]), "not known extra"),
        (lambda f: f.update(ids=f["ids"].astype(np.int32)), "'ids' must be int64, not int32"),
        (lambda f: f.update(image=f["image"][0]), "'image' must have the shape ?x3x8, not 3x8"),
        (lambda f: f.update(image=f["image"][:, :2]), "must have the shape ?x3x8, not 2x2x8"),
        (lambda f: f.update(ids=[1, 2]), "must be a numpy array, not list"),
    ],
)
def test_the_difference_is_named(change, words: str) -> None:
    given = feeds()
    change(given)
    with pytest.raises(DataError, match=words.replace("?", r"\?")):
        check_feeds(SPECS, given)
