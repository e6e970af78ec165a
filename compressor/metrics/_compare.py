"""One engine's metric with its interval, and how much worse another engine is on the same samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.errors import DataError
from compressor.metrics._intervals import (
    Z,
    bca,
    bootstrap,
    design_effect,
    mcnemar,
    percentile,
    sign_flip,
    sums_of,
    tango,
    wilson,
)
from compressor.metrics._scores import Scores

__all__ = ["interval", "measure", "paired_drop"]

_Array = NDArray[Any]
_Bounds = tuple[float, float | None, float | None]
_WHOLE_RESAMPLES = 1000
_FEW_RESAMPLES = 50  # where the metric is slow: enough for a standard error, not for percentiles
_PATIENCE = 30.0  # seconds that resamples of one engine may take


def measure(scores: Scores, seed: int = 0) -> dict[str, Any]:
    """The metric as the report shows it: name, value, low, high, unit, higher_is_better, n, nonfinite."""
    value, low, high = interval(scores, seed)
    return {
        "name": scores.metric,
        "value": value,
        "low": low,
        "high": high,
        "unit": scores.unit,
        "higher_is_better": scores.higher_is_better,
        "n": scores.n,
        "nonfinite": scores.nonfinite,
    }


def interval(scores: Scores | _Array | tuple[int, int], seed: int = 0) -> _Bounds:
    """Value and 95 % bounds, in percent for proportions.

    Counts `(successes, n)` and bool scores get Wilson's interval, float scores the BCa bootstrap of
    their mean, a metric of the whole set the percentile bootstrap over samples; if it is slow, the normal
    interval of the bootstrap's standard error, which needs fewer resamples. Where samples count in groups,
    shares get Wilson's interval of counts divided by the `design_effect`, and groups are drawn. Bounds are
    None where there are too few samples or groups. Samples whose score is NaN are left out (and counted
    in `Scores`). Raises `DataError` if no sample has a score.
    """
    if isinstance(scores, tuple):
        return _percent(wilson(*scores))
    if not isinstance(scores, Scores):
        scores = Scores("", True, len(scores), values=scores)
    if scores.whole is not None:
        return _of_whole(scores, seed)
    values = scores.values
    assert values is not None
    if scores.groups is not None and len(values):
        return _of_groups(values, scores.groups, seed)
    if values.dtype == bool:
        return _percent(wilson(int(values.sum()), _some(len(values))))
    known = values[~np.isnan(values)]
    if _some(len(known)) < 2:
        return _root(float(known[0]), scores.root), None, None
    value, low, high = bca(known.astype(np.float64), seed)
    # A mean of squares has a root, and so have its bounds: the root is monotone.
    return _root(value, scores.root), _root(low, scores.root), _root(high, scores.root)


def paired_drop(
    baseline: Scores | _Array,
    candidate: Scores | _Array,
    higher_is_better: bool = True,
    max_drop: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """How much worse the candidate is on the same samples.

    Gives value, low, high, p_value, verdict, n, left_out, reason.

    In units of the metric, percent points for proportions (bool scores); positive is worse, also where
    lower is better. Proportions: McNemar's exact p and Tango's interval; float scores: sign-flip p and
    BCa; a metric of the whole set, and rmse: the paired bootstrap. `verdict` against `max_drop`: "kept" if
    the upper bound is within it, "broken" if the lower bound is beyond it or the candidate has samples
    without a score that the baseline has, else "undecided"; None without `max_drop`. `left_out` counts
    pairs without a score. `reason` says why there are no bounds where it is not that samples are few: the
    metric has no value on many resamples, or there are too few groups. Grouped samples are drawn, and their
    signs flipped, by groups. `higher_is_better` is read from `Scores` where they are given.
    """
    first, second = _scores(baseline, higher_is_better), _scores(candidate, higher_is_better)
    if first.n != second.n:
        raise DataError(f"two engines were scored on different samples ({first.n} and {second.n})")
    left_out, lost, reason = 0, 0, None
    if first.whole is not None and second.whole is not None:
        result, reason = _paired_whole(first, second, seed)
    else:
        assert first.values is not None
        assert second.values is not None
        if first.groups is not None and len(first.groups) < 2:
            reason = "all its samples are of one group"
        if first.values.dtype == bool:
            result = _paired_shares(first, second)
        else:
            missing = np.isnan(first.values) | np.isnan(second.values)
            lost = int((np.isnan(second.values) & ~np.isnan(first.values)).sum())
            left_out = int(missing.sum())
            _some(first.n - left_out)
            result = _paired_values(first, second, ~missing, seed)
    value, low, high, p_value = result
    verdict = None if max_drop is None else "broken" if lost else _verdict(low, high, max_drop)
    return {
        "value": value,
        "low": low,
        "high": high,
        "p_value": p_value,
        "verdict": verdict,
        "n": first.n,
        "left_out": left_out,
        "reason": reason if low is None else None,
    }


def _verdict(low: float | None, high: float | None, max_drop: float) -> str:
    if low is None or high is None:
        return "undecided"
    return "kept" if high <= max_drop else "broken" if low > max_drop else "undecided"


def _scores(scores: Scores | _Array, higher_is_better: bool) -> Scores:
    if isinstance(scores, Scores):
        return scores
    return Scores("", higher_is_better, len(scores), values=scores)


_Paired = tuple[float, float | None, float | None, float | None]


def _paired_shares(first: Scores, second: Scores) -> _Paired:
    assert first.values is not None
    assert second.values is not None
    worse, better = (first.values & ~second.values), (second.values & ~first.values)
    if not first.higher_is_better:
        worse, better = better, worse
    one, two, n = int(worse.sum()), int(better.sum()), _some(len(worse))
    groups = first.groups
    if groups is None:
        value, low, high = (100 * bound for bound in tango(one, two, n))
        return value, low, high, mcnemar(one, two)
    if len(groups) < 2:
        return 100 * (one - two) / n, None, None, None
    differences = worse.astype(np.float64) - better
    effect = design_effect(differences, worse | better, groups)
    value, low, high = (100 * bound for bound in tango(one / effect, two / effect, n / effect))
    return value, low, high, sign_flip(sums_of(differences, groups))


def _paired_values(first: Scores, second: Scores, known: _Array, seed: int) -> _Paired:
    assert first.values is not None
    assert second.values is not None
    sign = 1.0 if first.higher_is_better else -1.0
    before, after = first.values[known].astype(np.float64), second.values[known].astype(np.float64)
    if first.root:
        return _paired_roots(before, after, seed)
    differences = sign * (before - after)
    if first.groups is not None:
        return _paired_groups(differences, known, first.groups, seed)
    if len(differences) < 2:
        return float(differences[0]), None, None, None
    value, low, high = bca(differences, seed)
    return value, low, high, sign_flip(differences, seed)


def _paired_groups(differences: _Array, known: _Array, groups: list[_Array], seed: int) -> _Paired:
    """Differences of the `known` samples, whose groups are drawn and whose groups' signs are flipped."""
    spread = np.full(len(known), np.nan)
    spread[known] = differences
    value, low, high = _of_groups(spread, groups, seed)
    p_value = None if low is None else sign_flip(sums_of(np.nan_to_num(spread), groups), seed)
    return value, low, high, p_value


def _of_groups(values: _Array, groups: list[_Array], seed: int) -> _Bounds:
    """The mean of scores and its bounds, in percent for shares, where groups of samples are independent.

    Efron and Tibshirani (1993), section 8.3: what is drawn with replacement is what is independent.
    """
    if values.dtype == bool:
        share = float(values.mean())
        if len(groups) < 2:
            return 100 * share, None, None
        rare = values if share < 0.5 else ~values
        n = len(values) / design_effect(values.astype(np.float64), rare, groups)
        return _percent(wilson(share * n, n))
    known = ~np.isnan(values)
    sums, counts = sums_of(np.nan_to_num(values), groups), sums_of(known.astype(np.float64), groups)
    sums, counts = sums[counts > 0], counts[counts > 0]
    mean = float(sums.sum() / _some(int(counts.sum())))
    if len(sums) < 2:
        return mean, None, None
    return mean, *percentile(bootstrap(lambda rows: sums[rows].sum(1) / counts[rows].sum(1), len(sums), seed))


def _paired_roots(before: _Array, after: _Array, seed: int) -> _Paired:
    """The drop of a root mean square, which is no mean of differences."""
    value = float(np.sqrt(after.mean()) - np.sqrt(before.mean()))
    if len(before) < 2:
        return value, None, None, None
    draws = bootstrap(
        lambda rows: np.sqrt(after[rows].mean(1)) - np.sqrt(before[rows].mean(1)), len(before), seed
    )
    return value, *percentile(draws), _two_sided(draws)


def _paired_whole(first: Scores, second: Scores, seed: int) -> tuple[_Paired, str | None]:
    assert first.whole is not None
    assert second.whole is not None
    one, two = first.whole, second.whole
    sign = 1.0 if first.higher_is_better else -1.0

    def drop(rows: _Array) -> float:
        return sign * (one(rows) - two(rows))

    value = _finite(drop(np.arange(first.n)), first.metric)
    draws, reason = _draws(drop, first, seed, max(first.seconds, second.seconds))
    if draws is None:
        return (value, None, None, None), reason
    return (value, *_bounds(value, draws), _two_sided(draws)), None


def _of_whole(scores: Scores, seed: int) -> _Bounds:
    assert scores.whole is not None
    value = _finite(scores.whole(np.arange(scores.n)), scores.metric)
    draws, _ = _draws(scores.whole, scores, seed, scores.seconds)
    return (value, None, None) if draws is None else (value, *_bounds(value, draws))


def _draws(
    function: Callable[[_Array], float], of: Scores, seed: int, seconds: float
) -> tuple[_Array | None, str | None]:
    """A whole-set metric on resamples; None and why if more than one in twenty has no value.

    What is drawn are samples, or groups of them (Efron, Tibshirani 1993, section 8.3: what is independent).
    """
    groups, n = of.groups, len(of.groups) if of.groups else of.n
    failures: list[str] = []

    def each(picks: _Array) -> _Array:
        rows = (np.concatenate([groups[place] for place in pick]) if groups else pick for pick in picks)
        return np.array([_or_nan(function, row, failures) for row in rows])

    if n < 2:
        return None, "all its samples are of one group" if groups else None
    few = seconds * _WHOLE_RESAMPLES > _PATIENCE
    draws = bootstrap(each, n, seed, _FEW_RESAMPLES if few else _WHOLE_RESAMPLES)
    known = draws[np.isfinite(draws)]
    if len(known) >= 0.95 * len(draws):
        return known, None
    why = failures[0] if failures else "it gives NaN or infinity"
    missing = len(draws) - len(known)
    return None, f"the metric has no value on {missing} of {len(draws)} resamples of the samples ({why})"


def _bounds(value: float, draws: _Array) -> tuple[float, float]:
    """Percentiles of many draws, the normal interval of few. Efron, Tibshirani (1993), chapters 6 and 13."""
    if len(draws) > _FEW_RESAMPLES:
        return percentile(draws)
    half = Z * float(draws.std(ddof=1))
    return value - half, value + half


def _or_nan(function: Callable[[_Array], float], rows: _Array, failures: list[str]) -> float:
    """NaN where the metric fails, whose words go to `failures`."""
    try:
        return float(function(rows))
    except DataError as error:
        failures.append(str(error))
        return float("nan")


def _two_sided(draws: _Array) -> float:
    """Bootstrap p of no difference. Efron and Tibshirani (1993), section 15.4 (by inverting the interval)."""
    smaller = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    return min(1.0, 2 * (1 + smaller) / (1 + len(draws)))


def _percent(bounds: tuple[float, float, float]) -> _Bounds:
    value, low, high = bounds
    return 100 * value, 100 * low, 100 * high


def _root(value: float, root: bool) -> float:
    return max(value, 0.0) ** 0.5 if root else value


def _some(n: int) -> int:
    if not n:
        raise DataError("no sample has a score: every output is NaN or infinite, or there are no samples")
    return n


def _finite(value: float, metric: str) -> float:
    if not np.isfinite(value):
        raise DataError(f"metric {metric} gives {value}")
    return value
