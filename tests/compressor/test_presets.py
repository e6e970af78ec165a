"""Which recipes a target has, and in which order."""

from __future__ import annotations

import pytest

from compressor import plugins, presets
from compressor.errors import UnsupportedError
from compressor.target import PRECISIONS, Target


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_has_rungs_of_stages_that_exist(precision: str) -> None:
    for device in ("cpu", "cuda"):
        for rung in presets.rungs(Target.parse(f"{precision}:onnx:{device}"), "ort-x86-vnni"):
            assert {step.stage for step in rung.steps} <= set(plugins.names("stages"))


def test_rungs_of_a_target_differ() -> None:
    for precision in PRECISIONS:
        found = presets.rungs(Target.parse(f"{precision}:onnx:cpu"), "ort-x86-vnni")
        assert len({rung.name for rung in found}) == len(found)


def test_int4_rounds_by_gptq_only_with_data() -> None:
    target = Target.parse("int4:onnx:cpu")
    for calibrated, rounding in ((True, "gptq"), (False, "hqq")):
        steps = [rung.steps[0].parameters for rung in presets.rungs(target, "", calibrated)]
        assert {step["rounding"] for step in steps} == {rounding}
        assert [step.get("wide", 0) for step in steps] == [0, 0.25, 0.5]


def test_half_computes_where_there_are_kernels() -> None:
    def compute(text: str) -> list[str]:
        return [rung.steps[0].parameters["compute"] for rung in presets.rungs(Target.parse(text), "")]

    assert compute("bf16:onnx:cpu") == ["float32"]
    assert compute("bf16:onnx:cuda") == ["bfloat16", "float32"]
    assert compute("fp16:onnx:cuda") == ["float16", "float32"]


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no way to make int2"):
        presets.rungs(Target("int2", 0, "onnx", "cpu"), "")
