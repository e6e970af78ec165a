"""What is said of an engine on the other kind of processor, and of one made for another machine."""

from __future__ import annotations

from typing import Any

from compressor.report import Report, verdicts
from compressor.report.html import render as page
from compressor.report.portability import portability
from compressor.report.schema import validate
from compressor.report.terminal import render

INT8 = "int8:onnx:cpu"
SAFE = {
    "scheme": "ort-x86-avx2", "without": "ort-x86-avx2", "layers": 0, "of": 20, "proven": True,
    "measured": None, "cost_db": 1.94, "worst_db": 2.6,
}  # fmt: skip
MEASURED = {
    "samples": 16, "sqnr_db": 25.2, "saturated_sqnr_db": 8.6, "top1": 0.98, "saturated_top1": 0.9,
    "outputs": 0.023,
}  # fmt: skip
FULL = {
    "scheme": "ort-x86-vnni", "without": "ort-x86-avx2", "layers": 34, "of": 50, "proven": False,
    "measured": MEASURED,
}  # fmt: skip


def test_a_safe_file_is_said_to_be_the_same_and_what_that_costs(engine: Any) -> None:
    said = portability(engine(INT8, portable=SAFE))
    assert said is not None
    assert said.startswith("the same on x86 with and without VNNI: no pair of products can overflow")
    assert "error would be 1.9 dB lower (mean of the layers; at most 2.6 dB)" in said


def test_a_full_range_file_is_said_to_lose_with_figures(engine: Any) -> None:
    said = portability(engine(INT8, portable=FULL)) or ""
    assert "overflow in 34 layers of 50: SQNR 8.6 dB instead of 25.2 dB" in said
    assert "90.0 % of predictions as float's instead of 98.0 %" in said
    assert "computed for 16 samples; 2.3 % of the values" in said
    assert said.endswith("build with --scheme ort-x86-avx2.")
    vectors = portability(engine(INT8, portable=FULL, agreement={"top1": None, "sqnr_db": 25.0})) or ""
    assert "predictions" not in vectors


def test_nothing_is_said_where_nothing_was_looked_at(engine: Any) -> None:
    assert portability(engine(INT8)) is None
    assert portability(engine(INT8, portable=None)) is None


def test_terminal_and_page_say_it(report: Any, engine: Any) -> None:
    data = report([engine("fp32:onnx:cpu", role="baseline"), engine(INT8, portable=FULL)])
    validate(data)
    assert "SQNR 8.6 dB instead of 25.2 dB" in " ".join(render(Report(data)).split())
    assert "SQNR 8.6 dB instead of 25.2 dB" in page(data)


def test_an_engine_for_another_machine_is_not_recommended_for_its_speed(report: Any, engine: Any) -> None:
    base = engine("fp32:onnx:cpu", role="baseline")
    data = report([base, engine(INT8, speed=1.6, made_for="TensorRT")])
    validate(data)
    found = verdicts(data)
    assert found.recommended == "fp32:onnx:cpu"
    assert found.lines[0]["text"].startswith(
        "Not for this machine: it is made for TensorRT, and its speed here proves nothing. 3.77× smaller"
    )
    assert "1.60×" not in found.headline
    both = verdicts(report([base, engine(INT8, speed=3.0, made_for="TensorRT"), engine("int4:onnx:cpu")]))
    assert both.recommended == "int4:onnx:cpu"
