"""The rules of recommendation, one case each."""

from __future__ import annotations

from typing import Any

import pytest

from compressor.report import Report, verdicts
from compressor.report.html import render

BASE = "fp32:onnx:cpu"
INT8 = "int8:onnx:cpu"


@pytest.fixture
def base(engine: Any) -> Any:
    return engine(BASE, role="baseline")


def found(data: dict[str, Any], target: str = INT8) -> tuple[str | None, str]:
    result = verdicts(data)
    return result.recommended, next(line["text"] for line in result.lines if line["target"] == target)


def test_a_fast_and_accurate_candidate_is_recommended(report: Any) -> None:
    data = report()
    chosen, line = found(data)
    assert chosen == INT8
    assert line.startswith(
        "Recommended. 1.41× the speed of float (1.37–1.45); 3.77× smaller; top1 drop 0.15 points"
    )
    assert "budget of 1 point kept" in line
    assert data["headline"].startswith(f"Use {INT8}: 1.41×")
    assert [row["recommended"] for row in data["engines"]] == [False, True]


def test_a_broken_budget_leaves_the_float_engine(report: Any, base: Any, engine: Any) -> None:
    data = report([base, engine(INT8, drop=2.46, budget="broken")])
    chosen, line = found(data)
    assert chosen == BASE
    assert line.startswith("Not recommended: the accuracy budget is broken. ")
    assert data["headline"].startswith(f"The accuracy budget is broken. Use the float engine {BASE}")


def test_int8_slower_than_float_is_never_recommended(report: Any, base: Any, engine: Any) -> None:
    chosen, line = found(report([base, engine(INT8, speed=0.85)]))
    assert chosen == BASE
    assert line.startswith("Not recommended: it is slower than float. Slower than float: 0.85× its speed")


@pytest.mark.parametrize(
    ("low", "high", "chosen", "words"),
    [
        (0.99, 1.01, BASE, "Not recommended: it is no faster than float"),
        (0.90, 1.01, BASE, "Not recommended: its speed-up is not proven"),
        (0.99, 1.30, None, "Not recommended yet: its speed-up is not proven"),
        (None, None, None, "Not recommended yet: its speed-up is not proven"),
    ],
)
def test_the_whole_interval_must_be_faster(
    report: Any, base: Any, engine: Any, low: float | None, high: float | None, chosen: str | None, words: str
) -> None:
    """Undecided is no evidence for float either, unless the candidate cannot be faster."""
    row = engine(INT8)
    row["latency"]["ratio_to_baseline"] = {"value": 1.0, "low": low, "high": high}
    recommended, line = found(report([base, row]))
    assert recommended == chosen
    assert line.startswith(words)


def unproven(engine: Any, target: str = INT8, **changes: Any) -> Any:
    row = engine(target, speed=2.4, **changes)
    reason = "fewer than 5 sets of fresh sessions fit into the time"
    row["latency"]["ratio_to_baseline"] |= {
        "low": None,
        "high": None,
        "verdict": "undecided",
        "reason": reason,
    }
    return row


def test_an_unproven_speed_up_asks_for_a_longer_measurement(report: Any, base: Any, engine: Any) -> None:
    headline = report([base, unproven(engine)], options={"bench": 40.0})["headline"]
    assert headline.startswith(f"No recommendation yet: that {INT8} is faster than float is not proven")
    assert "--bench 120" in headline
    assert "2.40× (fewer than 5 sets of fresh sessions fit into the time)" in headline
    assert "float engine" not in headline
    both = report([base, unproven(engine), unproven(engine, "int4:onnx:cpu")])["headline"]
    assert f"{INT8}, int4:onnx:cpu" in both
    assert "--bench 60" in both


def test_what_is_undecided_takes_nothing_from_what_is_proven(report: Any, base: Any, engine: Any) -> None:
    proven = engine("fp16:onnx:cpu", speed=1.6)
    assert verdicts(report([base, unproven(engine), proven])).recommended == "fp16:onnx:cpu"
    lost = unproven(engine, drop=9.0, budget="broken")
    assert verdicts(report([base, lost])).recommended == BASE
    quick = engine("fp32:openvino:cpu", role="baseline", p50=2.0)
    slow = unproven(engine)
    slow["latency"]["ratio_to_baseline"] |= {"low": 0.9, "high": 3.0}
    assert verdicts(report([base, slow, quick])).recommended == "fp32:openvino:cpu"


def test_the_measurer_of_the_ratio_has_the_word(report: Any, base: Any, engine: Any) -> None:
    row = engine(INT8)
    row["latency"]["ratio_to_baseline"] |= {"verdict": "undecided", "reason": "no larger than the noise"}
    chosen, line = found(report([base, row]))
    assert chosen is None
    assert line.startswith("Not recommended yet: its speed-up is not proven.")
    assert "speed against float undecided: 1.41× (1.37–1.45; no larger than the noise)" in line.lower()


def test_undecided_accuracy_may_be_recommended_but_is_said(report: Any, base: Any, engine: Any) -> None:
    data = report([base, engine(INT8, drop=0.9, budget="undecided")])
    chosen, line = found(data)
    assert chosen == INT8
    assert "budget of 1 point undecided: 650 samples are too few to tell" in line
    assert "undecided" in data["headline"]


def test_the_fastest_of_a_runtime_is_chosen_by_the_paired_ratio(report: Any, base: Any, engine: Any) -> None:
    slow, fast = engine(INT8, speed=1.4), engine("int8+prune50:onnx:cpu", speed=2.1)
    fast["latency"] |= {"p50_ms": 99.0, "p90_ms": 99.0, "p99_ms": 99.0}  # measured in a noisy hour
    chosen, line = found(report([base, slow, fast]))
    assert chosen == "int8+prune50:onnx:cpu"
    assert "Not recommended: int8+prune50:onnx:cpu is faster" in line


def test_a_float_engine_that_dominates_is_recommended(report: Any, base: Any, engine: Any) -> None:
    other = engine("fp32:openvino:cpu", role="baseline", p50=9.0)
    data = report([base, engine(INT8), other])
    chosen, line = found(data)
    assert chosen == "fp32:openvino:cpu"
    assert "Not recommended: fp32:openvino:cpu is faster and more accurate" in line
    half = engine("fp16:onnx:cpu", speed=1.6, drop=0.0)
    assert verdicts(report([base, engine(INT8), half])).recommended == "fp16:onnx:cpu"


def test_of_equally_fast_engines_the_most_accurate_wins(report: Any, base: Any, engine: Any) -> None:
    data = report([base, engine(INT8, speed=1.41, drop=0.4), engine("fp16:onnx:cpu", speed=1.40, drop=0.0)])
    assert verdicts(data).recommended == "fp16:onnx:cpu"


def test_a_type_that_only_stores_weights_is_said(report: Any, base: Any, engine: Any) -> None:
    stored = {"share_int8": 0.0, "share_by_type": {"float32": 1.0}, "weights_by_type": {"float16": 0.99}}
    computed = {**stored, "share_by_type": {"float16": 1.0}}
    part, none = (
        {**stored, "weights_by_type": {"float16": share, "float32": 1 - share}} for share in (0.3, 0.0)
    )
    some = {"share_int8": 1.0, "share_by_type": {"int8": 1.0}, "weights_by_type": {"int4": 0.4, "int8": 0.6}}
    for target, precision, words in (
        ("fp16:onnx:cpu", stored, "float16 is how weights are stored: 100 % of the compute runs in float32"),
        ("fp16:onnx:cpu", computed, None),
        ("int4:onnx:cpu", some, "only 40.0 % of the weights are int4"),
        (
            "fp16:onnx:cpu",
            part,
            "only 30.0 % of the weights are float16; 100 % of the compute runs in float32",
        ),
        ("fp16:onnx:cpu", none, "none of the weights are float16 (nothing to cast)."),
        ("bf16:onnx:cpu", stored, "none of the weights are bfloat16 (nothing to cast)."),
    ):
        facts = {"reason": "nothing to cast"} if words and "none" in words else {}
        row = engine(target, precision={"float_islands": [], **precision}, quantization=facts)
        text = found(report([base, row]), target)[1]
        assert (words in text) if words else ("stored" not in text)
        assert ("is how weights are stored" in text) is (precision is stored and target == "fp16:onnx:cpu")


def test_layers_left_in_float_and_layers_that_did_not_fuse_are_told_apart(
    report: Any, base: Any, engine: Any
) -> None:
    reason = "its inputs are quantized, its output is not (it goes to Add)"
    island = {"name": "c", "op": "Conv", "share": 0.2, "reason": reason}
    asked = {"name": "a", "op": "Conv", "reason": "left in float on request"}
    never = {"name": "b", "op": "LSTM", "reason": "the runtime has no int8 kernel for LSTM"}
    precision = {"share_int8": 0.62, "float_islands": [island] * 3}
    row = engine(INT8, precision=precision, quantization={"float": [asked, never]})
    line = found({**report([base, row]), "options": {"recipe": "r.json"}})[1]
    assert "only 62.0 % of the compute runs in int8 (1 layer left in float by the recipe)" in line
    line = found({**report([base, row]), "options": {"max_drop": 1}})[1]
    assert "only 62.0 % of the compute runs in int8 (1 layer left in float by the search)" in line
    assert f"1 layer of the int8 file runs in float ({reason})" in line
    row = engine(INT8, precision=precision, quantization={"float": [asked, asked, never]})
    assert "of the int8 file" not in found(report([base, row]))[1]


def test_little_int8_is_said(report: Any, base: Any, engine: Any) -> None:
    little = {"share_int8": 0.62, "float_islands": []}
    assert (
        "only 62.0 % of the compute runs in int8" in found(report([base, engine(INT8, precision=little)]))[1]
    )
    unknown = {"share_int8": None, "float_islands": []}
    assert "of the compute" not in found(report([base, engine(INT8, precision=unknown)]))[1]
    by_design = report([base, engine("int8-weight:onnx:cpu", precision=little)])
    assert "of the compute" not in found(by_design, "int8-weight:onnx:cpu")[1]


@pytest.mark.parametrize(
    ("gap", "lost", "said"),
    [
        (9.1, None, True),
        (11.5, None, True),
        (11.7, None, False),
        (38.0, None, False),
        (None, None, False),
        (9.1, 2.9, True),
        (9.1, -1.0, False),
    ],
)
def test_kernels_that_saturate_are_said(
    report: Any, base: Any, engine: Any, gap: float | None, lost: float | None, said: bool
) -> None:
    gaps = {"sqnr_db": gap, "lost_db": lost}
    row = engine(INT8, agreement={"top1": 0.908, "sqnr_db": 8.6}, simulation_gap=gaps)
    assert ("the kernels lose more than quantization itself" in found(report([base, row]))[1]) is said


def unlabelled(engine: Any, **agreement: float | None) -> list[Any]:
    rows = [
        engine(BASE, role="baseline"),
        engine(INT8, agreement={"top1": None, "sqnr_db": None, **agreement}),
    ]
    return [{**row, "metric": None, "drop": None} for row in rows]


@pytest.mark.parametrize("place", ["line", "page"])
def test_why_accuracy_is_unknown_is_said(report: Any, engine: Any, place: str) -> None:
    """The reason that was found, not a guess at it."""

    def said(reason: str | None, **data: Any) -> str:
        rows = [{**row, "metric_reason": reason} for row in unlabelled(engine, top1=0.97, sqnr_db=19.0)]
        made = {**report(rows, metric=None, max_drop=None), **data}
        return found(made)[1] if place == "line" else render(made)

    assert "labels from 0 to 10 fit none" in said("labels from 0 to 10 fit none of the outputs")
    assert "no labels" not in said("labels from 0 to 10 fit none of the outputs")
    assert "no labels" in said(None)
    assert "no evaluation data" in said(None, data={"calibration": None, "evaluation": None})


def test_why_a_budget_is_undecided_is_said(report: Any, base: Any, engine: Any) -> None:
    row = engine(INT8, budget="undecided")
    assert "samples are too few to tell" in found(report([base, row]))[1]
    row["drop"] |= {"low": None, "high": None, "reason": "the metric has no value on 900 of 1000 resamples"}
    line = found(report([base, row]))[1]
    assert "undecided: the metric has no value on 900 of 1000 resamples" in line
    assert "too few" not in line


def test_without_labels_agreement_decides(report: Any, engine: Any) -> None:
    facts = {"metric": None, "max_drop": None}
    chosen, line = found(report(unlabelled(engine, top1=0.97, sqnr_db=19.0), **facts))
    assert chosen == INT8
    assert line.startswith("Recommended as far as agreement tells.")
    assert "accuracy unknown (no labels)" in line
    chosen, line = found(report(unlabelled(engine, top1=0.4, sqnr_db=3.0), **facts))
    assert chosen == BASE
    assert "its predictions agree with float on less than 90.0 %" in line
    assert found(report(unlabelled(engine, sqnr_db=21.0), **facts))[0] == INT8
    assert found(report(unlabelled(engine, sqnr_db=4.0), **facts))[0] == BASE
    assert found(report(unlabelled(engine), **facts))[0] == BASE


def test_without_a_budget_a_sure_loss_is_not_recommended(report: Any, base: Any, engine: Any) -> None:
    broken = report([base, engine(INT8, drop=12.0, budget=None)], max_drop=None)
    chosen, line = found(broken)
    assert chosen == BASE
    assert "surely loses more than 1 %" in line
    assert found(report([base, engine(INT8, drop=0.3, budget=None)], max_drop=None))[0] == INT8


def test_nothing_is_recommended_without_latency(report: Any, base: Any, engine: Any) -> None:
    data = report([{**base, "latency": None}, engine(INT8, latency=None)])
    assert found(data)[0] is None
    assert data["headline"].startswith("No recommendation without latency.")


def test_a_metric_that_is_better_low_rises(report: Any, base: Any, engine: Any) -> None:
    data = report([base, engine(INT8, drop=0.002)], metric={"name": "mse", "higher_is_better": False})
    assert "mse rise 0.00200 (" in found(data)[1]
    assert "point" not in found(data)[1]


def test_with_two_runtimes_the_float_engine_that_speed_is_held_against_is_named(
    report: Any, base: Any, engine: Any
) -> None:
    other, small = engine("fp32:openvino:cpu", role="baseline"), engine("int8:openvino:cpu")
    data = report([base, engine(INT8), other, small])
    assert "the speed of fp32:onnx:cpu (" in found(data)[1]
    assert "the speed of fp32:openvino:cpu (" in found(data, "int8:openvino:cpu")[1]
    assert "the speed of float (" in found(report([base, engine(INT8)]))[1]


def test_a_metric_of_the_user_is_called_by_its_function(report: Any, base: Any, engine: Any) -> None:
    metric = {"name": "/home/me/eval/metrics.py:equal_errors", "higher_is_better": False}
    data = report([base, engine(INT8, drop=0.002)], metric=metric)
    assert "; equal_errors rise 0.00200 (" in found(data)[1]
    for text in (data["headline"], str(Report(data)), render(data)):
        assert "equal_errors" in text
        assert "/home/me" not in text


def test_a_report_without_candidates_says_so(report: Any, base: Any) -> None:
    assert report([base])["headline"] == "No compressed engine was made."


def test_vectors_near_float_need_no_common_highest_element(report: Any, engine: Any) -> None:
    facts = {"metric": None, "max_drop": None}
    assert found(report(unlabelled(engine, top1=0.8, sqnr_db=14.0), **facts))[0] == BASE
    assert found(report(unlabelled(engine, top1=0.8, sqnr_db=18.0), **facts))[0] == INT8
