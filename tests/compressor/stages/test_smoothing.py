"""Smoothing of a transformer through the stages: int8 is mended where outliers ruin it, float stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.errors import UsageError
from compressor.stages import equalize, quantize

WIDTH, HEADS, INNER, LENGTH = 32, 2, 64, 8
GPTQ = {"rounding": "gptq", "bias_correction": "fast", "observer": "mse"}


def block(number: int, source: str) -> tuple[list[Any], str]:
    """Attention and a feed-forward part, each behind a LayerNormalization that the residual reads too."""

    def own(text: str) -> str:
        return " ".join(f"{name}{number}" for name in text.split())

    nodes = [
        ("LayerNormalization", f"{source} {own('s1 b1')}", own("n")),
        *[("MatMul", own(f"n w{part}"), own(part)) for part in "qkv"],
        *[("Reshape", f"{own(part)} split", own(f"{part}r")) for part in "qkv"],
        ("Transpose", own("qr"), own("qt"), {"perm": [0, 2, 1, 3]}),
        ("Transpose", own("kr"), own("kt"), {"perm": [0, 2, 3, 1]}),
        ("Transpose", own("vr"), own("vt"), {"perm": [0, 2, 1, 3]}),
        ("MatMul", own("qt kt"), own("a")), ("Mul", f"{own('a')} half", own("as")),
        ("Softmax", own("as"), own("p")), ("MatMul", own("p vt"), own("c")),
        ("Transpose", own("c"), own("ct"), {"perm": [0, 2, 1, 3]}),
        ("Reshape", f"{own('ct')} join", own("cj")), ("MatMul", own("cj wo"), own("o")),
        ("Add", own("o n"), own("r")), ("LayerNormalization", own("r s2 b2"), own("m")),
        ("MatMul", own("m wu"), own("u")), ("Relu", own("u"), own("g")), ("MatMul", own("g wd"), own("d")),
        ("Add", own("d m"), own("y")),
    ]  # fmt: skip
    return nodes, own("y")


@pytest.fixture
def transformer(model_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Two blocks. Three of 32 channels are 60 times the others, and count for as much."""
    rng = np.random.default_rng(3)
    outliers = np.where(np.isin(np.arange(WIDTH), [3, 11, 20]), 60, 1).astype("f4")
    nodes: list[Any] = []
    name, constants = "x", {"half": np.float32(0.05)}
    constants |= {"split": np.array([0, 0, HEADS, WIDTH // HEADS]), "join": np.array([0, 0, WIDTH])}
    for number in range(2):
        part, name = block(number, name)
        nodes += part
        for norm in "12":
            constants[f"s{norm}{number}"] = outliers * rng.uniform(0.8, 1.2, WIDTH).astype("f4")
            constants[f"b{norm}{number}"] = rng.normal(0, 0.1, WIDTH).astype("f4")
        for weight, shape in {"q": WIDTH, "k": WIDTH, "v": WIDTH, "o": WIDTH, "u": INNER}.items():
            value = rng.normal(0, 0.3, (WIDTH, shape))
            constants[f"w{weight}{number}"] = (value if weight == "o" else value / outliers[:, None]).astype(
                "f4"
            )
        constants[f"wd{number}"] = rng.normal(0, 0.3, (INNER, WIDTH)).astype("f4")
    constants["head"] = (rng.normal(0, 0.3, (WIDTH, 6)) / outliers[:, None]).astype("f4")
    nodes.append(("MatMul", f"{name} head", "out"))
    return model_of(nodes, {"x": ["n", LENGTH, WIDTH]}, ["out"], constants)


@pytest.fixture
def data(transformer: dict[str, Any], tmp_path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """A reference of 64 samples, and 64 others."""
    from compressor import data as sources

    x = np.random.default_rng(2).normal(0, 1, (128, LENGTH, WIDTH)).astype("f4")
    np.savez(tmp_path / "x.npz", x=x[:64])
    given = {"source": str(tmp_path / "x.npz"), "preprocess": None, "inputs": transformer["inputs"]}
    facts = sources.describe_task(**given, folder=str(tmp_path))
    rest = {"binding": facts["binding"], "sha256": facts["sha256"]}
    return {**given, **rest, "indices": None, "batch": 16, "n": 64}, x[64:]


def int8(model: dict[str, Any], data: Any, scheme: str, folder: Path) -> dict[str, Any]:
    """A model through all tasks of the stage quantize."""
    for name in ("ranges", "moments"):
        Path(folder, name).mkdir(parents=True)
    quantize.calibrate(model, data, scheme, f"{folder}/ranges")
    quantize.moments(model, data, scheme, f"{folder}/moments")
    found = quantize.run(model, str(folder), f"{folder}/ranges", scheme, moments=f"{folder}/moments", **GPTQ)
    return {**found, "path": str(folder / found["path"])}


def smoothed(model: dict[str, Any], data: Any, scheme: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    how = {"scheme": scheme, "where": "rows"}
    found = equalize.calibrate(model, data, str(folder), **how)
    made = equalize.run(model, str(folder), "smooth", ranges=str(folder), **how)
    assert made["facts"]["links"] == found["tensors"] == len(made["facts"]["smoothed"])
    assert all(0 < alpha < 1 for alpha in found["alpha"].values())
    return {**made, "path": str(folder / made["path"])}


@pytest.mark.parametrize("scheme", ["ort-x86-vnni", "ort-x86-avx2"])
def test_smoothing_mends_a_transformer_with_outliers(
    transformer: dict[str, Any], data: Any, answer: Any, sqnr: Any, tmp_path: Path, scheme: str
) -> None:
    feeds = {"x": data[1]}
    wanted = answer(transformer["path"], feeds)
    even = smoothed(transformer, data[0], scheme, tmp_path / "even")
    assert even["facts"]["inserted"] >= 4  # behind every normalization, whose outputs the residual reads too
    assert {"n0_smoothed", "m0_smoothed", "n1_smoothed", "m1_smoothed"} <= set(even["facts"]["smoothed"])
    np.testing.assert_allclose(answer(even["path"], feeds), wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())
    plain = int8(transformer, data[0], scheme, tmp_path / "plain")
    mended = int8(even, data[0], scheme, tmp_path / "mended")
    assert mended["facts"]["quantized"] >= plain["facts"]["quantized"] == 13
    before, after = (sqnr(wanted, answer(made["path"], feeds)) for made in (plain, mended))
    assert before < 15
    assert after > before + 8


def test_smoothed_tensors_keep_their_whole_range(
    transformer: dict[str, Any], data: Any, tmp_path: Path
) -> None:
    import onnx

    from compressor.quantization import calibrate

    even = smoothed(transformer, data[0], "ort-x86-vnni", tmp_path / "even")
    made = int8(even, data[0], "ort-x86-vnni", tmp_path / "q")
    values = {
        item.name: onnx.numpy_helper.to_array(item) for item in onnx.load(made["path"]).graph.initializer
    }
    low, high = calibrate.ranges(tmp_path / "q" / "ranges", "minmax")["n0_smoothed"]
    tight = calibrate.ranges(tmp_path / "q" / "ranges", "mse")["n0_smoothed"]
    assert float(values["n0_smoothed_scale"]) == pytest.approx((high - low) / 255, rel=0.01)
    assert tight[1] - tight[0] < high - low


def test_a_part_that_does_not_exist_is_refused(transformer: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="where 'columns' is unknown; known are rows, all"):
        equalize.run(transformer, str(tmp_path), where="columns")
