"""Every rule on a graph that breaks it and on one that does not; fixes keep their promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from compressor.errors import UsageError
from compressor.quantization.lint import RULES, fix, lint
from compressor.quantization.lint.base import TARGETS

MENDED = [rule for rule in RULES if rule.mend]
UNRUNNABLE = {"QDQ006", "ORT001"}  # refused by the runtime before they are mended


def _found(rule: str, model: onnx.ModelProto) -> dict[str, list]:
    return {target: [item for item in lint(model, target) if item.rule == rule] for target in TARGETS}


def test_every_rule_has_a_graph_that_breaks_it_and_one_that_does_not(cases: dict) -> None:
    assert sorted(cases) == sorted(rule.id for rule in RULES)
    assert len(RULES) >= 40


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_finds_what_it_is_about_and_nothing_else(rule: Any, cases: dict) -> None:
    broken, kept = cases[rule.id]
    found, clean = _found(rule.id, broken()), _found(rule.id, kept())
    for target in TARGETS:
        severity = rule.severity(target)
        assert bool(found[target]) == (severity is not None), target
        assert all(item.severity == severity and item.reason for item in found[target])
        assert clean[target] == [], target


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_says_where_it_comes_from_and_what_to_do(rule: Any) -> None:
    assert all((rule.title, rule.source, rule.fix))
    assert bool(rule.promise) == (rule.mend is not None)
    assert any(rule.severity(target) for target in TARGETS)


def test_an_unknown_target_is_refused(cases: dict) -> None:
    with pytest.raises(UsageError, match="tensorrt, ort"):
        lint(cases["QDQ001"][1](), "tvm")


def _run(model: onnx.ModelProto, x: NDArray) -> NDArray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])


def _target(rule: Any) -> str:
    return next(target for target in TARGETS if rule.severity(target))


@pytest.mark.parametrize("rule", MENDED, ids=lambda rule: rule.id)
def test_a_fix_mends_and_keeps_its_promise(rule: Any, cases: dict) -> None:
    broken = cases[rule.id][0]()
    before = broken.SerializeToString()
    found = [item for item in lint(broken, _target(rule)) if item.rule == rule.id]
    assert [item.mechanical for item in found] == [True] * max(1, len(found))
    mended, fixed = fix(broken, found)
    assert broken.SerializeToString() == before
    assert {item.key for item in fixed} == {item.key for item in found}
    assert not [item for item in lint(mended, _target(rule)) if item.rule == rule.id]
    shape = [dim.dim_value for dim in broken.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).normal(0, 1, shape).astype(np.float32)
    after = _run(mended, x)
    assert np.isfinite(after).all()
    if rule.id not in UNRUNNABLE:
        change = np.abs(after - _run(broken, x)).max()
        assert change <= (1e-5 if rule.promise.startswith("nothing") else 0.15 * np.abs(after).max())


def test_what_is_asked_is_mended_and_no_more(cases: dict) -> None:
    broken = cases["TRT004"][0]()
    found = [item for item in lint(broken, "tensorrt") if item.rule == "TRT004"]
    _, fixed = fix(broken, [])
    assert fixed == []
    mended, _ = fix(broken, found)
    left = {item.rule for item in lint(mended, "tensorrt")}
    assert left & {"TRT003", "TRT004"} == {"TRT003"}


def test_a_runtime_s_file_becomes_one_that_tensorrt_takes(cases: dict) -> None:
    broken = cases["ORT003"][1]()
    mended, _ = fix(broken, lint(broken, "tensorrt"))
    assert [item for item in lint(mended, "tensorrt") if item.severity == "error"] == []
    x = np.random.default_rng(1).normal(0, 1, (1, 16, 8, 8)).astype(np.float32)
    before, after = _run(broken, x), _run(mended, x)
    assert np.abs(before - after).max() < 0.05 * np.abs(before).max()
