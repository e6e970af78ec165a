"""Which recipes a target has, and in which order."""

from __future__ import annotations

import pytest

from compressor import plugins, presets
from compressor.errors import UnsupportedError, UsageError
from compressor.recipe import Recipe, Step
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


QUANTIZE, DYNAMIC, EVEN = Step("quantize"), Step("dynamic"), Step("equalize")
FOUR, EIGHT = Step("weight_only"), Step("weight_only", {"bits": 8})
HALF, BRAIN = Step("cast", {"compute": "float32"}), Step("cast", {"to": "bfloat16", "compute": "float32"})
MAKERS = {
    "int8": QUANTIZE, "int8-dynamic": DYNAMIC, "int8-weight": EIGHT, "int4": FOUR, "fp16": HALF,
    "bf16": BRAIN,
}  # fmt: skip


def suited(target: str, *steps: Step, asked: str | None = None) -> tuple[Step, ...]:
    return presets.suited(Recipe("mine", steps), Target.parse(target), "ort-x86-vnni", asked).steps


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_is_made_by_one_kind_of_step_alone(precision: str) -> None:
    """Every step for every target: what is made is what is asked for, or nothing is."""
    for made, step in MAKERS.items():
        if made == precision:
            assert suited(f"{precision}:onnx:cpu", EVEN, step)[-1].stage == step.stage
            continue
        with pytest.raises(UsageError, match=r"mine: ") as caught:
            suited(f"{precision}:onnx:cpu", EVEN, step)
        assert f"makes {made}" in str(caught.value) or "which no recipe changes" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "steps", "said"),
    [
        ("int8", (FOUR, QUANTIZE), "'weight_only' makes int4"),
        ("int8", (DYNAMIC, QUANTIZE), "'dynamic' makes int8-dynamic"),
        ("int8", (QUANTIZE, HALF), "'cast' makes fp16"),
        ("int8", (QUANTIZE, QUANTIZE), "must be the last one, and stand there once"),
        ("int8", (QUANTIZE, EVEN), "'quantize' must be the last one"),
        ("fp16", (FOUR,), "makes int4"),
        ("int8", (EVEN,), "no step 'quantize'"),
        ("fp16", (), "no step 'cast'"),
        ("fp32", (EVEN,), "fp32:onnx:cpu is the model as it is, which no recipe changes"),
        ("int4", (Step("weight_only", {"bits": 3}),), "with bits 3 is unknown; known are 8 and 4"),
        ("fp16", (Step("cast", {"to": "int8"}),), "with to 'int8' is unknown"),
        ("fp16", (Step("cast", {"device": "cuda"}),), "it computes on cuda, but the target is fp16:onnx:cpu"),
    ],
)
def test_a_recipe_of_another_kind_is_refused(target: str, steps: tuple[Step, ...], said: str) -> None:
    with pytest.raises(UsageError, match="recipe mine") as caught:
        suited(f"{target}:onnx:cpu", *steps)
    assert said in str(caught.value)


def test_the_recipe_of_the_float_engine_makes_it_again() -> None:
    assert suited("fp32:onnx:cpu") == ()


def test_a_recipe_gets_scheme_and_device_where_it_leaves_them_open() -> None:
    even, quantize = suited("int8:onnx:cpu", EVEN, Step("quantize", {"scheme": "ort-arm"}))
    assert (even.parameters["scheme"], quantize.parameters["scheme"]) == ("ort-x86-vnni", "ort-arm")
    assert suited("fp16:onnx:cuda", Step("cast"))[0].parameters == {"device": "cuda"}


def test_a_recipe_with_another_scheme_than_was_asked_for_is_refused() -> None:
    own = Step("quantize", {"scheme": "ort-arm"})
    assert suited("int8:onnx:cpu", own, asked="ort-arm")[0].parameters["scheme"] == "ort-arm"
    with pytest.raises(UsageError, match="names the scheme ort-arm, but --scheme is ort-x86-vnni"):
        suited("int8:onnx:cpu", own, asked="ort-x86-vnni")


@pytest.mark.parametrize("scheme", ["openvino-arm", "openvino-x86-avx2", "ort-cuda", "litert"])
def test_dynamic_int8_is_made_for_the_runtime_that_runs_it(scheme: str) -> None:
    with pytest.raises(UnsupportedError, match="int8-dynamic:onnx:cpu: "):
        presets.check_scheme(Target.parse("int8-dynamic:onnx:cpu"), scheme)
    with pytest.raises(UnsupportedError, match="int8-dynamic:onnx:cpu: "):
        suited("int8-dynamic:onnx:cpu", Step("dynamic", {"scheme": scheme}))
    presets.check_scheme(Target.parse("int8:onnx:cpu"), scheme)
    presets.check_scheme(Target.parse("int8-dynamic:onnx:cpu"), "ort-arm")
