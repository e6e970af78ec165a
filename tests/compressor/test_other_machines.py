"""Engines for other machines than this one, from the request to the report."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import onnx
import pytest

from compressor import compress
from compressor.errors import CompressError, UsageError
from compressor.quantization.lint import lint


def engine(report, out: Path) -> Path:
    return out / report.engines[1]["path"]


def test_tensorrt_gets_its_form_and_no_praise_for_speed(net: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    report = compress(
        net / "net.onnx", "int8:onnx", data=net / "data.npz", scheme="tensorrt", calib=30, bench=1, out=out
    )
    row = report.engines[1]
    assert row["made_for"] == "TensorRT"
    assert not row["recommended"]
    assert row["agreement"]["sqnr_db"] > 20
    assert row["portable"] is None
    assert "made for TensorRT, and its speed here proves nothing" in report.verdict
    assert lint(onnx.load(engine(report, out)), "tensorrt") == []
    assert [rung["name"] for rung in report.data["rungs"]] == ["gptq"]  # slow here is no reason to search on


@pytest.mark.skipif(platform.machine() != "x86_64", reason="pairs of products are summed on x86")
def test_the_report_says_what_the_other_kind_of_x86_does(net: Path, tmp_path: Path) -> None:
    found = {}
    for kind in ("vnni", "avx2"):
        report = compress(
            net / "net.onnx", "int8:onnx", data=net / "data.npz", scheme=f"ort-x86-{kind}", calib=30,
            bench=0, out=tmp_path / kind,
        )  # fmt: skip
        found[kind] = report.engines[1]["portable"]
        manifest = json.loads(engine(report, tmp_path / kind).with_name("engine.json").read_text())
        assert manifest["portable"] == found[kind]
    full, safe = found["vnni"], found["avx2"]
    assert (safe["proven"], safe["layers"], safe["measured"]) == (True, 0, None)
    assert safe["cost_db"] <= safe["worst_db"]
    assert not full["proven"]
    assert full["without"] == "ort-x86-avx2"
    assert full["measured"]["samples"] == 16
    assert full["measured"]["saturated_sqnr_db"] < full["measured"]["sqnr_db"]


def test_dynamic_int8_is_refused_where_no_kernel_does_it(net: Path, tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="TensorRT has no kernels that quantize while they run"):
        compress(net / "net.onnx", "int8-dynamic:onnx", scheme="tensorrt", bench=0, out=tmp_path / "o")


def test_a_scheme_that_no_target_has_a_use_for_is_refused(net: Path, tmp_path: Path) -> None:
    """Weight-only and half engines are made by no scheme; beside int8 it is the int8 engine's."""
    for target in ("int4:onnx", "fp16:onnx", "fp32:onnx"):
        with pytest.raises(
            UsageError, match="--scheme ort-arm says how int8 and int8-dynamic are made; none"
        ):
            compress(net / "net.onnx", target, scheme="ort-arm", bench=0, out=tmp_path / "o")


def test_a_recipe_for_int8_makes_no_float_engine(net: Path, tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text('{"steps": [{"stage": "quantize"}]}')
    given = {"data": net / "data.npz", "recipe": tmp_path / "q.json", "bench": 0, "out": tmp_path / "o"}
    for targets in ("fp32:onnx", ["int8:onnx", "fp32:onnx"]):
        with pytest.raises(UsageError, match="fp32:onnx:cpu is the model as it is, which no recipe changes"):
            compress(net / "net.onnx", targets, **given)
