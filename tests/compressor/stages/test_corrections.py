"""The quantize stage with its corrections, and the equalize stage before it, as tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.errors import DataError, UsageError
from compressor.stages import equalize, quantize

SCHEME = "ort-x86-avx2"
GPTQ = {"rounding": "gptq", "bias_correction": "fast", "observer": "mse"}


def spread(channels: int) -> np.ndarray:
    """Factors from 1/8 to 8."""
    return np.geomspace(1 / 8, 8, channels).astype("f4")


@pytest.fixture
def net(model_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Dense, depthwise and dense layers, with channels of very different range between."""
    rng = np.random.default_rng(1)
    a = rng.normal(0.2, 0.5, (24, 3, 3, 3)) * spread(24)[:, None, None, None]
    constants = {
        "a": a.astype("f4"),
        "d": rng.normal(0.1, 0.5, (24, 1, 3, 3)).astype("f4"),
        "b": (rng.normal(0.1, 0.5, (16, 24, 1, 1)) / spread(24)[:, None, None]).astype("f4"),
        "v": rng.normal(0, 0.5, (16, 10)).astype("f4"),
    }
    nodes = [
        ("Conv", "x a", "c1"), ("Relu", "c1", "r1"), ("Conv", "r1 d", "c2", {"group": 24}),
        ("Relu", "c2", "r2"), ("Conv", "r2 b", "c3"), ("Relu", "c3", "r3"),
        ("GlobalAveragePool", "r3", "p"), ("Flatten", "p", "f"), ("Gemm", "f v", "y"),
    ]  # fmt: skip
    return model_of(nodes, {"x": ["n", 3, 12, 12]}, ["y"], constants)


@pytest.fixture
def data(net: dict[str, Any], tmp_path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """A reference of 64 samples, and 64 others."""
    from compressor import data as sources

    x = np.random.default_rng(2).normal(0.5, 1, (128, 3, 12, 12)).astype("f4")
    np.savez(tmp_path / "x.npz", x=x[:64])
    given = {"source": str(tmp_path / "x.npz"), "preprocess": None, "inputs": net["inputs"]}
    facts = sources.describe_task(**given, folder=str(tmp_path))
    rest = {"binding": facts["binding"], "sha256": facts["sha256"]}
    return {**given, **rest, "indices": None, "batch": 16, "n": 64}, x[64:]


@pytest.fixture
def quantized(data: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A model through all tasks of the stage."""

    def call(model: dict[str, Any], **parameters: Any) -> dict[str, Any]:
        folder = tmp_path / f"q{len(list(tmp_path.glob('q*')))}"
        for name in ("", "ranges", "moments"):
            Path(folder, name).mkdir(exist_ok=True)
        quantize.calibrate(model, data[0], SCHEME, f"{folder}/ranges")
        if quantize.needs(parameters):
            quantize.moments(model, data[0], SCHEME, f"{folder}/moments")
            parameters["moments"] = f"{folder}/moments"
        if "data" in quantize.needs(parameters):
            parameters["data"] = data[0]
        found = quantize.run(model, str(folder), f"{folder}/ranges", SCHEME, **parameters)
        return {**found, "path": str(folder / found["path"])}

    return call


def test_corrections_bring_the_outputs_closer(
    net: dict[str, Any], data: Any, quantized: Callable[..., Any], answer: Any, sqnr: Any
) -> None:
    feeds = {"x": data[1]}
    wanted = answer(net["path"], feeds)
    found = {}
    for name, parameters in {
        "plain": {}, "fast": {"bias_correction": "fast"}, "gptq": GPTQ,
        "full": {**GPTQ, "bias_correction": "full"},
    }.items():  # fmt: skip
        made = quantized(net, **parameters)
        assert made["facts"]["quantized"] == 5
        assert made["facts"]["bias_correction"] == parameters.get("bias_correction")
        assert made["facts"]["rounding"] == parameters.get("rounding", "nearest")
        found[name] = sqnr(wanted, answer(made["path"], feeds))
    assert found["fast"] > found["plain"] + 0.5
    assert found["gptq"] > found["fast"]
    assert found["full"] > found["plain"] + 0.5


@pytest.mark.parametrize("method", ["smooth", "weights"])
def test_equalized_models_are_the_same_in_float_and_better_in_int8(
    net: dict[str, Any], data: Any, quantized: Any, answer: Any, sqnr: Any, tmp_path: Path, method: str
) -> None:
    folder = tmp_path / "equalized"
    folder.mkdir()
    ranges = None
    if equalize.calibration({"method": method}) == "required":
        assert equalize.calibrate(net, data[0], str(folder))["tensors"] == 2
        ranges = str(folder)
    made = equalize.run(net, str(folder), method, ranges=ranges)
    assert made["facts"]["links"] == 2
    assert made["facts"]["method"] == method
    made["path"] = str(folder / made["path"])
    feeds = {"x": data[1]}
    wanted, got = answer(net["path"], feeds), answer(made["path"], feeds)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    plain = sqnr(wanted, answer(quantized(net)["path"], feeds))
    assert sqnr(wanted, answer(quantized(made)["path"], feeds)) > plain + 1


def test_quantized_models_pass_through(
    net: dict[str, Any], quantized: Any, data: Any, tmp_path: Path
) -> None:
    made = quantized(net)
    folder = tmp_path / "equalized"
    folder.mkdir()
    assert equalize.calibrate(made, data[0], str(folder)) == {"tensors": 0, "alpha": {}}
    assert "already quantized" in equalize.run(made, str(folder), "weights")["facts"]["reason"]
    assert quantize.moments(made, data[0], SCHEME, str(folder)) == {"layers": 0}


def test_wrong_choices_are_refused_in_words(net: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rounding 'gptp' is unknown; known are nearest, gptq"):
        quantize.run(net, str(tmp_path), str(tmp_path), SCHEME, rounding="gptp")
    with pytest.raises(UsageError, match="bias_correction 'slow' is unknown; known are fast, full"):
        quantize.run(net, str(tmp_path), str(tmp_path), SCHEME, bias_correction="slow")
    with pytest.raises(UsageError, match="need moments"):
        quantize.run(net, str(tmp_path), str(tmp_path), SCHEME, rounding="gptq")
    with pytest.raises(UsageError, match="method 'smoth' is unknown"):
        equalize.run(net, str(tmp_path), "smoth")
    with pytest.raises(UsageError, match="alpha 2 is not a share"):
        equalize.run(net, str(tmp_path), alpha=2)
    with pytest.raises(DataError, match="needs ranges of channels"):
        equalize.run(net, str(tmp_path))
