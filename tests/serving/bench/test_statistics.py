"""Ratios, quantiles and verdicts from numbers whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from serving.bench.statistics import MIN_CLUSTERS, SAMPLES_FOR, quantiles, ratio, verdict


def clusters(rng: np.random.Generator, truth: float, n: int = 20, between: float = 0.01) -> list[np.ndarray]:
    """Log-ratios of passes: each cluster has its own level, as sessions do."""
    return [np.log(truth) + rng.normal(0, between) + rng.normal(0, 0.02, 6) for _ in range(n)]


def test_interval_of_a_ratio_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [ratio(clusters(rng, 1.3), rng) for _ in range(300)]
    covered = np.mean([entry["low"] <= 1.3 <= entry["high"] for entry in found])
    assert 0.88 <= covered <= 0.99
    assert np.median([entry["value"] for entry in found]) == pytest.approx(1.3, rel=0.003)


def test_passes_are_no_clusters() -> None:
    """A thousand passes in few sessions tell little: the interval must not shrink with them."""
    rng = np.random.default_rng(1)
    few = [rng.normal(0, 0.01) + rng.normal(0, 0.001, 1000) for _ in range(8)]
    found = ratio(few, rng)
    assert found["high"] - found["low"] > 0.004


def test_no_interval_from_too_few_clusters() -> None:
    rng = np.random.default_rng(0)
    found = ratio(clusters(rng, 2.0, MIN_CLUSTERS - 1), rng)
    assert found["value"] == pytest.approx(2, rel=0.05)
    assert found["low"] is None
    assert verdict(found, None)[0] == "undecided"


def test_one_wild_cluster_does_not_move_the_ratio() -> None:
    rng = np.random.default_rng(0)
    given = clusters(rng, 1.5)
    given[3] = given[3] + 2.0
    assert ratio(given, rng)["value"] == pytest.approx(1.5, rel=0.01)


QUIET = {"value": 1.0, "low": 0.995, "high": 1.004}


@pytest.mark.parametrize(
    ("low", "high", "noise", "claim"),
    [
        (1.3, 1.4, QUIET, "faster"),
        (1.3, 1.4, None, "faster"),
        (0.7, 0.8, QUIET, "slower"),
        (0.99, 1.01, QUIET, "same"),
        (1.005, 1.015, QUIET, "same"),
        (0.9, 1.1, QUIET, "undecided"),
        (1.01, 1.05, QUIET, "undecided"),
        (1.05, 1.1, {"value": 1.0, "low": 0.93, "high": 1.02}, "undecided"),
        (0.9, 0.95, {"value": 1.0, "low": 0.98, "high": 1.12}, "undecided"),
        (1.3, 1.4, {"value": 1.0, "low": 0.93, "high": 1.06}, "faster"),
    ],
)
def test_verdict(low: float, high: float, noise: dict[str, float | None] | None, claim: str) -> None:
    found, reason = verdict({"value": (low + high) / 2, "low": low, "high": high}, noise)
    assert found == claim
    assert (reason is None) == (claim != "undecided")


def test_quantiles_are_observed_values_in_order() -> None:
    rng = np.random.default_rng(0)
    times = [rng.lognormal(0, 0.5, 200) for _ in range(10)]
    found = quantiles(times, rng)
    pooled = np.sort(np.concatenate(times))
    assert found["p50"] == pooled[999]
    assert found["p99"] == pooled[1979]
    assert found["p50"] <= found["p90"] <= found["p99"]
    for name in ("p50", "p90", "p99"):
        low, high = found[f"{name}_interval"]
        assert low <= found[name] <= high
        assert high > low


def test_intervals_of_quantiles_cover_the_truth() -> None:
    rng = np.random.default_rng(2)
    inside = 0
    for _ in range(40):
        low, high = quantiles([rng.lognormal(0, 0.3, 200) for _ in range(15)], rng)["p50_interval"]
        inside += low <= 1.0 <= high
    assert inside >= 34


def test_percentiles_are_claimed_from_enough_calls_only() -> None:
    rng = np.random.default_rng(0)
    few = quantiles([np.ones(SAMPLES_FOR["p90"] - 1)], rng)
    assert (few["p50"], few["p90"], few["p99"]) == (1.0, None, None)
    assert "claimed from 64" in few["p90_reason"]
    some = quantiles([np.ones(SAMPLES_FOR["p99"] - 1)], rng)
    assert (some["p90"], some["p99"]) == (1.0, None)
    assert quantiles([np.ones(SAMPLES_FOR["p99"])], rng)["p99"] == 1.0


def test_early_stopping_needs_these_numbers_of_calls() -> None:
    """MLPerf: the fewest calls of which at most one is above the percentile with 1 % chance or less."""
    for level, name in ((0.9, "p90"), (0.99, "p99")):

        def doubt(q: int, level: float = level) -> float:
            return level**q + q * (1 - level) * level ** (q - 1)

        needed = SAMPLES_FOR[name]
        assert doubt(needed) <= 0.01 < doubt(needed - 1)
