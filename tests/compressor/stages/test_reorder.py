"""The stage that reorders channels, alone and in a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from compressor import compress
from compressor.stages import reorder

RNG = np.random.default_rng(3)
CONSTANTS = {
    "w": RNG.standard_t(4, (16, 3, 3, 3)).astype("f4") * np.float32(0.2),
    "b": RNG.normal(0, 0.1, 16).astype("f4"),
    "v": RNG.standard_t(4, (8, 16, 3, 3)).astype("f4") * np.float32(0.2),
}
NODES = [("Conv", "x w b", "c"), ("Relu", "c", "r"), ("Conv", "r v", "y")]
X = RNG.normal(0, 1, (40, 3, 10, 10)).astype("f4")


def test_the_function_stays(model_of: Callable[..., Any], answer: Callable[..., Any], tmp_path: Path) -> None:
    source = model_of(NODES, {"x": ["N", 3, 10, 10]}, ["y"], CONSTANTS)
    source["facts"]["smoothed"] = ["r"]
    made = reorder.run(source, str(tmp_path), "ort-x86-avx2")
    assert made["facts"]["reordered"] == 1
    assert made["facts"]["smoothed"] == ["r"]  # quantize asks for it
    want, got = answer(source["path"], {"x": X}), answer(tmp_path / made["path"], {"x": X})
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_a_recipe_may_name_it(model_of: Callable[..., Any], tmp_path: Path) -> None:
    source = model_of(NODES, {"x": ["N", 3, 10, 10]}, ["y"], CONSTANTS)
    found = {}
    for name, before in (("plain", []), ("order", [{"stage": "reorder"}])):
        recipe, steps = tmp_path / f"{name}.json", [*before, {"stage": "quantize"}]
        recipe.write_text(json.dumps({"version": 1, "name": name, "steps": steps}))
        report = compress(
            source["path"], "int8:onnx", data=X, scheme="ort-x86-avx2", bench=0, out=tmp_path / name,
            recipe=str(recipe),
        )  # fmt: skip
        found[name] = report.engines[1]
        assert found[name]["agreement"]["sqnr_db"] > 20
        assert all(layer["sqnr_db"] > 20 for layer in report.data["layers"]["int8:onnx:cpu"])
    assert found["order"]["portable"]["cost_db"] < found["plain"]["portable"]["cost_db"]
