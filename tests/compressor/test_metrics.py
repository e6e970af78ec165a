"""Metrics: every formula against a value worked out by hand or printed in a paper."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor import metrics, user_code
from compressor.errors import DataError, UsageError


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe, Stat. Med. 17 (1998) 857, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_newcombes_table(successes: int, n: int, low: float, high: float) -> None:
    share, got_low, got_high = metrics.wilson(successes, n)
    assert share == successes / n
    assert (got_low, got_high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_lies_around_the_share_and_within_0_and_1(counts: tuple[int, int]) -> None:
    share, low, high = metrics.wilson(*counts)
    assert 0 <= low <= share <= high <= 1
    assert low < high


def test_mcnemar_by_hand() -> None:
    assert metrics.mcnemar(1, 7) == pytest.approx(2 * (1 + 8) / 2**8)
    assert metrics.mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert metrics.mcnemar(3, 3) == 1.0
    assert metrics.mcnemar(0, 0) == 1.0


def test_mcnemar_agrees_with_the_binomial_test_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for b, c in [(12, 25), (400, 460), (9000, 9300)]:
        assert metrics.mcnemar(b, c) == pytest.approx(stats.binomtest(b, b + c).pvalue, rel=1e-9)


def test_tango_gives_the_interval_of_fagerland_and_others() -> None:
    """Airway hyper-responsiveness, 21 pairs, 1 and 7 discordant: Stat. Med. 33 (2014) 2850."""
    estimate, low, high = metrics.tango(1, 7, 21)
    assert estimate == pytest.approx(-6 / 21)
    assert (low, high) == (pytest.approx(-0.517, abs=5e-4), pytest.approx(-0.026, abs=5e-4))


def test_tango_without_discordant_pairs_is_z2_over_n_plus_z2() -> None:
    z2 = 1.959963984540054**2
    for n in (1, 20, 650):
        estimate, low, high = metrics.tango(0, 0, n)
        assert estimate == 0
        assert high == pytest.approx(z2 / (n + z2), rel=1e-9)
        assert low == pytest.approx(-high, rel=1e-9)


def test_tango_at_the_edges() -> None:
    assert metrics.tango(5, 0, 5)[2] == pytest.approx(1.0)
    assert metrics.tango(0, 5, 5)[1] == pytest.approx(-1.0)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 200))
def test_tango_turns_with_its_arguments(b: int, c: int, same: int) -> None:
    n = b + c + same + 1
    estimate, low, high = metrics.tango(b, c, n)
    turned, turned_low, turned_high = metrics.tango(c, b, n)
    assert low <= estimate <= high
    assert (turned, turned_low, turned_high) == (
        pytest.approx(-estimate),
        pytest.approx(-high, abs=1e-9),
        pytest.approx(-low, abs=1e-9),
    )


def test_bca_agrees_with_scipy_on_skewed_values() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(3).lognormal(0, 1, 60)
    value, low, high = metrics.interval(values)
    ours = np.array([low, high])
    found = stats.bootstrap((values,), np.mean, n_resamples=20000, method="BCa", random_state=1)
    theirs = np.array([found.confidence_interval.low, found.confidence_interval.high])
    width = theirs[1] - theirs[0]
    assert value == pytest.approx(values.mean())
    assert np.abs(ours - theirs).max() < 0.06 * width
    assert high - value > value - low  # the long tail is on the right


def test_the_bootstrap_is_seeded() -> None:
    values = np.random.default_rng(0).normal(size=40)
    assert metrics.interval(values, seed=5) == metrics.interval(values, seed=5)
    assert metrics.interval(values, seed=5) != metrics.interval(values, seed=6)


def test_bootstrap_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(11)
    covered = 0
    for trial in range(200):
        _, low, high = metrics.interval(rng.exponential(1.0, 50), seed=trial)
        assert low is not None
        assert high is not None
        covered += low <= 1.0 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_proportions_are_in_percent() -> None:
    scores = np.array([True] * 81 + [False] * 182)
    value, low, high = metrics.interval(scores)
    assert (value, low, high) == (
        pytest.approx(30.798, abs=1e-3),
        pytest.approx(25.53, abs=5e-3),
        pytest.approx(36.62, abs=5e-3),
    )
    assert metrics.interval((81, 263)) == (value, low, high)


def test_one_sample_has_no_interval_and_none_is_an_error() -> None:
    assert metrics.interval(np.array([2.5])) == (2.5, None, None)
    with pytest.raises(DataError, match="no sample"):
        metrics.interval(np.array([]))


RNG_OF_VECTORS = np.random.default_rng(11)
SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.9, 0.05, 0.05]], np.float32)


def test_top1_takes_the_first_of_equal_scores_as_argmax_does() -> None:
    scores = metrics.evaluate("top1", SCORES, np.array([1, 0, 2, 1]))
    assert scores.values is not None
    assert scores.values.tolist() == [True, True, False, False]
    assert metrics.measure(scores)["value"] == 50.0


def test_top5_by_hand() -> None:
    outputs = np.tile(np.arange(8, dtype=np.float32), (8, 1))
    scores = metrics.evaluate("top5", {"logits": outputs[:, :, None, None]}, np.arange(8))
    assert scores.values is not None
    assert scores.values.tolist() == [False] * 3 + [True] * 5


def test_top5_of_five_classes_says_nothing() -> None:
    with pytest.raises(DataError, match="top5 says nothing with 3 classes"):
        metrics.evaluate("top5", SCORES, np.array([0, 1, 2, 0]))


def test_labels_beyond_the_classes_are_an_error() -> None:
    with pytest.raises(DataError, match="labels go from 0 to 7, but the output has 3 classes"):
        metrics.evaluate("top1", SCORES, np.array([0, 1, 7, 0]))


def test_accuracy_is_top1_and_unknown_names_are_a_usage_error() -> None:
    assert metrics.check("accuracy") == "top1"
    assert metrics.check("mine:score") == "mine:score"
    with pytest.raises(UsageError, match="'acuracy' is unknown; known are top1"):
        metrics.check("acuracy")


def test_errors_by_hand() -> None:
    got, labels = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32), np.array([[1.0, 0.0], [0.0, 1.0]])
    for name, per_sample, value in (
        ("mse", [2.0, 12.5], 7.25),
        ("mae", [1.0, 3.5], 2.25),
        ("rmse", [2.0, 12.5], math.sqrt(7.25)),
    ):
        scores = metrics.evaluate(name, {"y": got}, labels)
        assert scores.values is not None
        assert scores.values.tolist() == per_sample
        assert not scores.higher_is_better
        assert metrics.interval(scores)[0] == pytest.approx(value)


def test_binary_has_its_threshold_at_half_or_at_logit_zero() -> None:
    labels = np.array([0, 1, 1])
    share = metrics.evaluate("binary", np.array([[0.4], [0.6], [0.4]]), labels)
    logit = metrics.evaluate("binary-logit", np.array([-0.1, 0.6, 0.4]), labels)
    assert share.values is not None
    assert logit.values is not None
    assert share.values.tolist() == [True, True, False]
    assert logit.values.all()


@pytest.mark.parametrize(
    ("labels", "output", "name"),
    [
        (np.array([0, 2]), np.zeros((2, 3), np.float32), "top1"),
        (np.array([0, 2]), np.zeros((2, 3, 1, 1), np.float32), "top1"),
        (np.array([0, 2]), np.array([0, 1]), "top1"),
        (np.array([0, 1]), np.array([[0.2], [0.9]], np.float32), "binary"),
        (np.array([0, 1]), np.array([-3.0, 4.0], np.float32), "binary-logit"),
        (np.array([0.5, 1.0]), np.zeros((2, 1), np.float32), "mse"),
        (np.array([0, 7]), np.zeros((2, 3), np.float32), None),
        (np.array([0.5, 1.0]), np.zeros((2, 3), np.float32), None),
        (np.array([0.0, 2.0]), np.zeros((2, 3), np.float32), "top1"),
        (np.array([0.0, 1.0]), np.zeros((2, 1), np.float32), "mse"),
        (np.array([0.0, 3.0]), np.zeros((2, 3), np.float32), None),
        (np.array([0.0, np.nan]), np.zeros((2, 3), np.float32), None),
        (np.array([0.0, np.inf]), np.zeros((2, 3), np.float32), None),
        (np.array([-1, 2]), np.zeros((2, 3), np.float32), None),
        (np.zeros((2, 4, 4), np.int64), np.zeros((2, 3, 4, 4), np.float32), None),
        (None, np.zeros((2, 3), np.float32), None),
    ],
)
def test_choose(labels: np.ndarray | None, output: np.ndarray, name: str | None) -> None:
    found, reason = metrics.choose(labels, {"out": output})
    assert found == name
    assert reason
    if found is not None and labels is not None:
        metrics.evaluate(found, {"out": output}, labels)


def test_choose_says_what_does_not_fit() -> None:
    _, reason = metrics.choose(np.array([0, 999]), {"logits": np.zeros((2, 10), np.float32)})
    assert "0 to 999" in reason
    assert "logits (2, 10)" in reason


def _pairs(both: int, only_first: int, only_second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    first = [True] * (both + only_first) + [False] * (only_second + neither)
    second = [True] * both + [False] * only_first + [True] * only_second + [False] * neither
    return np.array(first), np.array(second)


def test_paired_drop_of_proportions_is_in_points() -> None:
    drop = metrics.paired_drop(*_pairs(1, 1, 7, 12))
    assert drop["value"] == pytest.approx(-100 * 6 / 21)
    assert (drop["low"], drop["high"]) == (pytest.approx(-51.7, abs=0.05), pytest.approx(-2.6, abs=0.05))
    assert drop["p_value"] == pytest.approx(0.0703125)
    assert drop["verdict"] is None
    assert (drop["n"], drop["left_out"]) == (21, 0)


@pytest.mark.parametrize(
    ("pairs", "max_drop", "verdict"),
    [
        ((9000, 3, 1, 996), 0.5, "kept"),
        ((900, 0, 0, 100), 0.5, "kept"),  # z²/(n+z²) is 0.38 points
        ((600, 0, 0, 50), 0.5, "undecided"),  # 0.59 points: too few samples to say
        ((800, 10, 2, 188), 0.5, "undecided"),
        ((700, 200, 10, 90), 1.0, "broken"),
        ((700, 10, 200, 90), 0.0, "kept"),
    ],
)
def test_verdicts(pairs: tuple[int, int, int, int], max_drop: float, verdict: str) -> None:
    assert metrics.paired_drop(*_pairs(*pairs), max_drop=max_drop)["verdict"] == verdict


def test_lower_is_better_turns_the_sign() -> None:
    rng = np.random.default_rng(0)
    before = rng.exponential(1.0, 200)
    after = before + 0.5 + rng.normal(0, 0.1, 200)
    worse = metrics.paired_drop(before, after, higher_is_better=False, max_drop=0.1)
    better = metrics.paired_drop(before, after, higher_is_better=True, max_drop=0.1)
    assert worse["value"] == pytest.approx(0.5, abs=0.05)
    assert worse["low"] < worse["value"] < worse["high"]
    assert worse["verdict"] == "broken"
    assert worse["p_value"] == pytest.approx(1 / 2001)
    assert better["value"] == pytest.approx(-worse["value"])
    assert better["verdict"] == "kept"


def test_no_difference_has_p_of_one_and_is_kept() -> None:
    values = np.random.default_rng(0).normal(size=50)
    drop = metrics.paired_drop(values, values, max_drop=0.0)
    assert (drop["value"], drop["low"], drop["high"], drop["p_value"]) == (0.0, 0.0, 0.0, 1.0)
    assert drop["verdict"] == "kept"


def test_sign_flips_agree_with_all_flips_counted_by_hand() -> None:
    """Differences 1, 2, 3: of 8 sign patterns, 2 reach |6|: p = 0.25."""
    drop = metrics.paired_drop(np.array([1.0, 2.0, 3.0]), np.zeros(3))
    assert drop["p_value"] == pytest.approx(0.25, abs=0.04)


def test_the_drop_of_rmse_is_the_difference_of_the_roots() -> None:
    labels = np.random.default_rng(1).normal(size=(300, 2))
    near, far = labels + 0.1, labels + 0.4
    first, second = (metrics.evaluate("rmse", {"y": got}, labels) for got in (near, far))
    drop = metrics.paired_drop(first, second, max_drop=0.2)
    assert drop["value"] == pytest.approx(0.3)
    assert drop["verdict"] == "broken"


def test_different_samples_are_refused() -> None:
    with pytest.raises(DataError, match="different samples"):
        metrics.paired_drop(np.ones(3, bool), np.ones(4, bool))


def test_nan_in_a_classifier_is_a_wrong_answer_and_counted() -> None:
    outputs = SCORES.copy()
    outputs[0, 2] = np.nan
    result = metrics.measure(metrics.evaluate("top1", outputs, np.array([1, 0, 1, 0])))
    assert result["nonfinite"] == 1
    assert result["value"] == 75.0


def test_nan_in_a_regression_is_left_out_counted_and_breaks_the_budget() -> None:
    labels = np.zeros((5, 1))
    good, bad = np.full((5, 1), 0.1), np.full((5, 1), 0.1)
    bad[2] = np.inf
    first, second = (metrics.evaluate("mse", {"y": got}, labels) for got in (good, bad))
    assert metrics.measure(second)["nonfinite"] == 1
    assert metrics.measure(second)["value"] == pytest.approx(0.01)
    drop = metrics.paired_drop(first, second, max_drop=1.0)
    assert (drop["left_out"], drop["verdict"]) == (1, "broken")
    assert metrics.paired_drop(second, second, max_drop=1.0)["verdict"] == "kept"


def test_only_nan_is_an_error() -> None:
    scores = metrics.evaluate("mse", {"y": np.full((3, 1), np.nan)}, np.zeros((3, 1)))
    with pytest.raises(DataError, match="NaN or infinite"):
        metrics.interval(scores)


USERS = """
import numpy as np

def hits(outputs, labels):
    return outputs.argmax(1) == labels

def error(outputs, labels):
    return np.abs(outputs[:, 0] - labels)
error.higher_is_better = False

def correlation(outputs, labels):
    return np.corrcoef(outputs[:, 0], labels)[0, 1]

def both(outputs, labels):
    return outputs["a"][:, 0] + outputs["b"][:, 0] > labels

def auc(outputs, labels):
    if len(set(labels.tolist())) < 2:
        raise ValueError("one class only")
    return 0.5

def broken(outputs, labels):
    return outputs["nowhere"]

def shapeless(outputs, labels):
    return np.zeros((2, 2))
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory; its name."""
    name = f"users_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_users_boolean_scores_are_a_proportion(users: str) -> None:
    scores = metrics.evaluate(f"{users}:hits", {"out": SCORES}, np.array([1, 0, 2, 0]))
    result = metrics.measure(scores)
    assert (result["value"], result["unit"], result["n"]) == (75.0, "%", 4)


def test_a_users_error_says_that_lower_is_better(users: str) -> None:
    labels = np.linspace(0, 1, 30)
    first, second = (
        metrics.evaluate(f"{users}:error", {"out": labels[:, None] + shift}, labels) for shift in (0.1, 0.3)
    )
    drop = metrics.paired_drop(first, second, max_drop=0.05)
    assert drop["value"] == pytest.approx(0.2)
    assert drop["verdict"] == "broken"


def test_a_metric_of_the_whole_set_is_resampled_by_samples(users: str) -> None:
    rng = np.random.default_rng(2)
    labels = rng.normal(size=100)
    near, far = labels + 0.3 * rng.normal(size=100), labels + 2 * rng.normal(size=100)
    first, second = (
        metrics.evaluate(f"{users}:correlation", {"out": got[:, None]}, labels) for got in (near, far)
    )
    value, low, high = metrics.interval(first)
    assert low is not None
    assert high is not None
    # Fisher's z interval for a correlation of normal variables.
    assert low == pytest.approx(math.tanh(math.atanh(value) - 1.96 / math.sqrt(97)), abs=0.02)
    assert high == pytest.approx(math.tanh(math.atanh(value) + 1.96 / math.sqrt(97)), abs=0.02)
    drop = metrics.paired_drop(first, second, max_drop=0.1)
    assert drop["value"] == pytest.approx(value - metrics.interval(second)[0])
    assert drop["verdict"] == "broken"
    assert drop["p_value"] < 0.01


def test_a_slow_metric_of_the_whole_set_is_asked_seldom_and_gets_the_same_interval(users: str) -> None:
    rng = np.random.default_rng(2)
    labels = rng.normal(size=100)
    outputs = {"out": (labels + 0.3 * rng.normal(size=100))[:, None]}
    fast = metrics.evaluate(f"{users}:correlation", outputs, labels)
    asked: list[bytes] = []

    def whole(rows: np.ndarray) -> float:
        asked.append(rows.tobytes())
        assert fast.whole is not None
        return fast.whole(rows)

    slow = replace(fast, whole=whole, seconds=2.0)
    for got, wanted in zip(metrics.interval(slow), metrics.interval(fast), strict=True):
        assert got == pytest.approx(wanted, abs=0.01)
    assert len(asked) == 51


def test_a_metric_of_the_whole_set_is_called_once_for_each_resample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counted.py").write_text(
        "CALLS = []\ndef mean(outputs, labels):\n    CALLS.append(1)\n    return float(outputs.mean())\n"
    )
    monkeypatch.chdir(tmp_path)
    outputs, labels = np.arange(8.0)[:, None], np.zeros(8, int)
    scores = metrics.evaluate("counted.py:mean", outputs, labels)
    metrics.measure(scores)
    calls = len(user_code.load("counted.py:mean").__globals__["CALLS"])
    metrics.paired_drop(scores, scores)
    metrics.measure(scores)
    assert len(user_code.load("counted.py:mean").__globals__["CALLS"]) == calls
    assert calls <= 1002


def test_several_outputs_come_as_a_dict(users: str) -> None:
    outputs = {"a": np.ones((3, 1)), "b": np.ones((3, 1))}
    scores = metrics.evaluate(f"{users}:both", outputs, np.array([0, 3, 1]))
    assert scores.values is not None
    assert scores.values.tolist() == [True, False, True]


def test_a_metric_that_fails_on_resamples_has_no_interval(users: str) -> None:
    scores = metrics.evaluate(f"{users}:auc", {"out": SCORES}, np.array([1, 0, 0, 0]))
    assert metrics.interval(scores) == (0.5, None, None)


def test_a_users_mistakes_name_the_exception_and_the_line(users: str) -> None:
    line = USERS.splitlines().index('    return outputs["nowhere"]') + 1
    said = rf"{users}:broken failed with IndexError.*\({users}.py, line {line}\)"
    with pytest.raises(DataError, match=said):
        metrics.evaluate(f"{users}:broken", {"out": SCORES}, np.array([1, 0, 0, 0]))
    with pytest.raises(DataError, match=r"gave float64 of shape \(2, 2\)"):
        metrics.evaluate(f"{users}:shapeless", {"out": SCORES}, np.array([1, 0, 0, 0]))
    with pytest.raises(UsageError, match=f"module '{users}' has no 'missing'"):
        metrics.evaluate(f"{users}:missing", {"out": SCORES}, np.array([1, 0, 0, 0]))
    with pytest.raises(UsageError, match="no module 'no_such_module'"):
        metrics.evaluate("no_such_module:f", {"out": SCORES}, np.array([1, 0, 0, 0]))


def test_agreement_by_hand() -> None:
    """ref² sums to 9 + 16 = 25, (ref - got)² to 0.25: 20 dB."""
    found = metrics.agreement({"y": np.array([[3.0], [4.0]])}, {"y": np.array([[3.3], [3.6]])})
    assert found["sqnr_db"] == pytest.approx(20.0)
    assert found["max_abs"] == pytest.approx(0.4)
    assert found["cosine"] == pytest.approx((3 * 3.3 + 4 * 3.6) / (5 * math.hypot(3.3, 3.6)))
    assert found["top1"] is None
    assert found["n"] == 2


def test_agreement_does_not_depend_on_the_batches() -> None:
    rng = np.random.default_rng(0)
    reference = {"a": rng.normal(size=(50, 7)), "b": rng.normal(size=(50, 2, 3))}
    outputs = {name: array + 0.01 * rng.normal(size=array.shape) for name, array in reference.items()}
    streamed = metrics.Agreement()
    for start in range(0, 50, 8):
        rows = slice(start, start + 8)
        streamed.update(
            {name: array[rows] for name, array in reference.items()},
            {name: array[rows] for name, array in outputs.items()},
        )
    whole = metrics.agreement(reference, outputs)
    assert streamed.result()["sqnr_db"] == pytest.approx(whole["sqnr_db"])
    assert streamed.result()["top1"] == whole["top1"]
    assert whole["n"] == 50
    error = sum(float(((reference[k] - outputs[k]) ** 2).sum()) for k in reference)
    signal = sum(float((reference[k] ** 2).sum()) for k in reference)
    assert whole["sqnr_db"] == pytest.approx(10 * math.log10(signal / error))
    assert set(whole["outputs"]) == {"a", "b"}


def test_agreement_counts_classes() -> None:
    other = SCORES.copy()
    other[3] = [0.0, 1.0, 0.0]
    assert metrics.agreement({"y": SCORES}, {"y": other})["top1"] == 0.75
    numbers = metrics.agreement({"y": np.array([1, 2, 3])}, {"y": np.array([1, 2, 4])})
    assert numbers["top1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_agreement_with_nan_is_finite_json_and_fails_loudly(bad: float) -> None:
    other = SCORES.copy()
    other[0, 0] = bad
    found = metrics.agreement({"y": SCORES}, {"y": other})
    assert found["nonfinite"] == 1
    assert found["sqnr_db"] == -200.0
    assert found["top1"] == 0.75
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("reference", "got", "decibels"),
    [(0.0, 0.0, 200.0), (1.0, 1.0, 200.0), (0.0, 1.0, -200.0), (1e-30, 1e30, -200.0), (1.0, 2.0, 0.0)],
)
def test_agreement_is_finite_at_the_edges(reference: float, got: float, decibels: float) -> None:
    found = metrics.agreement({"y": np.full((2, 1), reference)}, {"y": np.full((2, 1), got)})
    assert found["sqnr_db"] == pytest.approx(decibels)
    json.dumps(found, allow_nan=False)


def test_the_package_is_imported_without_numpy() -> None:
    code = "import sys, compressor.metrics as m; m.check('accuracy'); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_names_are_there() -> None:
    for name in metrics.__all__:
        assert getattr(metrics, name)
    with pytest.raises(AttributeError):
        metrics.nothing  # noqa: B018


def test_an_infinite_score_has_a_place_in_the_order() -> None:
    masked = np.where(SCORES == 0, -np.inf, SCORES).astype(np.float32)
    result = metrics.measure(metrics.evaluate("top1", masked, np.array([1, 0, 1, 0])))
    assert (result["value"], result["nonfinite"]) == (100.0, 2)
    found = metrics.agreement({"y": masked}, {"y": masked})
    assert (found["top1"], found["nonfinite"], found["nonfinite_reference"]) == (1.0, 0, 2)
    assert found["sqnr_db"] == 200.0


def test_labels_with_fractions_are_no_classes() -> None:
    with pytest.raises(DataError, match="class numbers, but they have fractions"):
        metrics.evaluate("top1", SCORES, np.array([0.5, 1, 0, 2]))
    whole = metrics.evaluate("top1", SCORES, np.array([1.0, 0.0, 1.0, 0.0]))
    assert metrics.measure(whole)["value"] == 100.0


def test_embeddings_have_no_classes_to_agree_on() -> None:
    rows = RNG_OF_VECTORS.normal(size=(64, 32))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    noisy = unit + 0.05 * RNG_OF_VECTORS.normal(size=unit.shape)
    found = metrics.agreement({"y": unit}, {"y": noisy})
    assert found["top1"] is None
    assert found["outputs"]["y"]["top1"] is None
    assert found["sqnr_db"] == pytest.approx(-20 * np.log10(0.05 * np.sqrt(32)), abs=0.5)
    assert metrics.agreement({"y": rows}, {"y": rows})["top1"] == 1  # logits may well be anything
    confident = np.eye(4)[[0, 1, 2, 3, 0]]
    assert metrics.agreement({"y": confident}, {"y": confident})["top1"] == 1  # probabilities of 1
    by_metric = metrics.Agreement(classes=True)
    by_metric.update({"y": unit}, {"y": noisy})
    assert by_metric.result()["top1"] is not None
    parts = metrics.Agreement()
    for start in range(0, 64, 7):
        parts.update({"y": unit[start : start + 7]}, {"y": noisy[start : start + 7]})
    assert parts.result()["top1"] is None


def test_pairs_stay_together_in_resamples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same interval as that of a metric over one row a pair."""
    monkeypatch.chdir(tmp_path)
    Path("paired.py").write_text(
        "import numpy as np\n"
        "def corr(outputs, labels):\n"
        "    cosine = (outputs[0::2] * outputs[1::2]).sum(1)\n"
        "    return float(np.corrcoef(cosine, labels[0::2, 1])[0, 1])\n"
        "corr.groups = lambda labels: labels[:, 0]\n"
        "def single(outputs, labels):\n"
        "    return float(np.corrcoef(outputs[:, 0], labels)[0, 1])\n"
        "def wrong(outputs, labels):\n"
        "    return 1.0\n"
        "wrong.groups = lambda labels: labels\n"
    )
    one, two = RNG_OF_VECTORS.normal(size=(2, 80, 3))
    score = (one * two).sum(1) + RNG_OF_VECTORS.normal(size=80)
    rows = np.stack([one, two], axis=1).reshape(160, 3)
    labels = np.stack([np.repeat(np.arange(80), 2), np.repeat(score, 2)], axis=1)
    found = metrics.measure(metrics.evaluate("paired.py:corr", rows, labels))
    wanted = metrics.measure(metrics.evaluate("paired.py:single", (one * two).sum(1, keepdims=True), score))
    assert found["value"] == pytest.approx(wanted["value"])
    assert (found["low"], found["high"]) == pytest.approx((wanted["low"], wanted["high"]))
    assert found["low"] > 0.3
    with pytest.raises(DataError, match="its groups have shape"):
        metrics.evaluate("paired.py:wrong", rows, labels)


CARELESS = """
import numpy as np

def spoils(outputs, labels):
    hits = outputs.argmax(1) == labels
    outputs[:], labels[:] = 0, 0
    return hits

def spoils_whole(outputs, labels):
    share = (outputs.argmax(1) == labels).mean()
    outputs[:], labels[:] = 0, 0
    return share

def spoil(labels):
    numbers = labels.copy()
    labels[:] = 0
    return numbers
spoils.groups = spoil

def _again(outputs):
    return len(np.unique(outputs, axis=0)) < len(outputs)

def shapes(outputs, labels):
    return np.zeros(2) if _again(outputs) else 0.5

def words(outputs, labels):
    return "x" if _again(outputs) else 0.5

def nothing(outputs, labels):
    return float("nan") if _again(outputs) else 0.5

def unsure(outputs, labels):
    return 0.5
unsure.higher_is_better = "no"

def hits(outputs, labels):
    return outputs.argmax(1) == labels[:, 0]

def error(outputs, labels):
    return np.abs(outputs[:, 0] - labels[:, 0])
error.higher_is_better = False

def lone_hits(outputs, labels):
    return hits(outputs, labels)

def lone_error(outputs, labels):
    return error(outputs, labels)
lone_error.higher_is_better = False
hits.groups = error.groups = lambda labels: labels[:, 1]

def together(outputs, labels):
    return hits(outputs, labels)
together.groups = lambda labels: np.full(len(labels), "a")

def astray(outputs, labels):
    return hits(outputs, labels)
astray.groups = lambda labels: np.full(len(labels), np.nan)
"""


@pytest.fixture
def careless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "careless.py").write_text(CARELESS)
    monkeypatch.chdir(tmp_path)
    return "careless.py"


@pytest.mark.parametrize("name", ["spoils", "spoils_whole"])
def test_what_a_metric_does_to_its_arguments_is_not_done_to_ours(careless: str, name: str) -> None:
    outputs, labels = np.eye(4)[[0, 1, 2, 3, 3]], np.array([0, 1, 2, 3, 1])
    kept = outputs.copy(), labels.copy()
    scores = metrics.evaluate(f"{careless}:{name}", outputs, labels)
    again = metrics.evaluate(f"{careless}:{name}", outputs, labels)
    percent = 1 if name == "spoils" else 100
    assert percent * metrics.interval(scores)[0] == percent * metrics.interval(again)[0] == pytest.approx(80)
    assert np.array_equal(outputs, kept[0])
    assert np.array_equal(labels, kept[1])
    assert not scores.groups or [group.tolist() for group in scores.groups] == [[0], [1, 4], [2], [3]]


@pytest.mark.parametrize(
    ("name", "said"),
    [("shapes", r"gave float64 of shape \(2,\)"), ("words", r"gave <U1 of shape \(\)"), ("nothing", "NaN")],
)
def test_why_a_metric_has_no_value_on_resamples_is_told(careless: str, name: str, said: str) -> None:
    outputs = np.random.default_rng(0).normal(size=(40, 4))
    scores = metrics.evaluate(f"{careless}:{name}", outputs, np.zeros(40, int))
    assert metrics.interval(scores) == (0.5, None, None)
    drop = metrics.paired_drop(scores, scores, max_drop=1)
    assert (drop["verdict"], drop["low"]) == ("undecided", None)
    assert re.search(rf"no value on \d+ of 1000 resamples.*{said}", drop["reason"])


def test_a_direction_that_is_no_truth_value_is_refused(careless: str) -> None:
    with pytest.raises(DataError, match="higher_is_better is 'no'; it must be True or False"):
        metrics.evaluate(f"{careless}:unsure", SCORES, np.array([1, 0, 2, 0]))


def _doubled(hits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and labels of two equal samples a group, which is right where `hits` says so."""
    outputs = np.eye(2)[np.repeat(~hits, 2).astype(int)]
    return outputs, np.stack([np.zeros(2 * len(hits), int), np.repeat(np.arange(len(hits)), 2)], axis=1)


def test_shares_of_samples_in_groups_have_the_interval_of_the_groups(careless: str) -> None:
    """Two equal samples a group say no more than one: bounds as of half the samples, one degree less."""
    rng = np.random.default_rng(5)
    before = rng.random(120) < 0.8
    after = np.where(rng.random(120) < 0.2, rng.random(120) < 0.5, before)
    scores = [metrics.evaluate(f"{careless}:hits", *_doubled(hits)) for hits in (before, after)]
    value, low, high = metrics.interval(scores[0])
    wanted = metrics.wilson(before.mean() * 119, 119)
    assert (value, low, high) == pytest.approx([100 * bound for bound in wanted])
    drop = metrics.paired_drop(*scores, max_drop=1)
    worse, better = int((before & ~after).sum()), int((after & ~before).sum())
    wanted = metrics.tango(worse, better, 120)
    assert drop["value"] == pytest.approx(100 * wanted[0])
    assert (drop["low"], drop["high"]) == pytest.approx([100 * bound for bound in wanted[1:]], abs=0.15)
    assert drop["p_value"] == pytest.approx(metrics.mcnemar(worse, better), abs=0.03)
    lone = [metrics.evaluate(f"{careless}:lone_hits", *_doubled(hits)) for hits in (before, after)]
    narrow = metrics.paired_drop(*lone)
    assert drop["high"] - drop["low"] == pytest.approx(2**0.5 * (narrow["high"] - narrow["low"]), rel=0.05)


def test_groups_without_a_difference_prove_no_more_than_their_number(careless: str) -> None:
    """Of ten groups of fifty that agree, no more is known than of ten samples."""
    labels = np.stack([np.zeros(500, int), np.repeat(np.arange(10), 50)], axis=1)
    scores = metrics.evaluate(f"{careless}:hits", np.eye(2)[np.zeros(500, int)], labels)
    drop = metrics.paired_drop(scores, scores, max_drop=1)
    assert drop["high"] == pytest.approx(100 * metrics.tango(0, 0, 10)[2])
    assert drop["verdict"] == "undecided"
    assert metrics.interval(scores)[1] == pytest.approx(100 * metrics.wilson(10, 10)[1])


def test_errors_of_samples_in_groups_are_drawn_by_groups(careless: str) -> None:
    """Doubled samples have the interval of single ones, and groups that flip signs together their p."""
    rng = np.random.default_rng(6)
    errors = rng.gamma(2.0, size=(2, 60))
    labels = np.stack([np.zeros(120), np.repeat(np.arange(60), 2)], axis=1)
    first, second = (
        metrics.evaluate(f"{careless}:error", np.repeat(row, 2)[:, None], labels) for row in errors
    )
    single = metrics.evaluate(f"{careless}:lone_error", errors[0][:, None], labels[::2])
    assert metrics.interval(first) == pytest.approx(metrics.interval(single), rel=0.05)
    drop, wanted = metrics.paired_drop(first, second), metrics.paired_drop(errors[1], errors[0])
    assert drop["value"] == pytest.approx(wanted["value"])
    assert (drop["low"], drop["high"]) == pytest.approx((wanted["low"], wanted["high"]), abs=0.06)
    assert drop["p_value"] == pytest.approx(wanted["p_value"], abs=0.02)


def test_a_sample_without_a_score_is_left_out_of_its_group(careless: str) -> None:
    labels = np.stack([np.zeros(6), [0, 0, 1, 1, 2, 2]], axis=1)
    got = np.array([[1.0], [3.0], [np.nan], [5.0], [np.nan], [np.nan]])
    value, low, high = metrics.interval(metrics.evaluate(f"{careless}:error", got, labels))
    assert value == 3.0
    assert low is not None
    assert high is not None
    assert 2.0 <= low <= value <= high <= 5.0


def test_groups_that_cannot_be_told_apart_give_no_bounds(careless: str) -> None:
    outputs, labels = _doubled(np.ones(4, bool))
    scores = metrics.evaluate(f"{careless}:together", outputs, labels)
    assert metrics.interval(scores) == (100, None, None)
    drop = metrics.paired_drop(scores, scores, max_drop=1)
    assert (drop["verdict"], drop["reason"]) == ("undecided", "all its samples are of one group")
    with pytest.raises(DataError, match="groups are not all finite"):
        metrics.evaluate(f"{careless}:astray", outputs, labels)
