"""Confidence intervals and tests, each as its paper gives it; shares are from 0 to 1 here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "RESAMPLES",
    "Z",
    "bca",
    "bootstrap",
    "design_effect",
    "mcnemar",
    "percentile",
    "sign_flip",
    "sums_of",
    "tango",
    "wilson",
]

Z = NormalDist().inv_cdf(0.975)
RESAMPLES = 2000
_CELLS = 4_000_000
_TELLING = 5  # groups from which the correlation within groups can be estimated
_Floats = NDArray[np.float64]


def wilson(successes: float, n: float) -> tuple[float, float, float]:
    """Share and 95 % score interval, without continuity correction.

    E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209; method 3 of R. G. Newcombe, Stat. Med. 17 (1998) 857.
    """
    share, z2 = successes / n, Z * Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else middle - half
    return share, low, 1.0 if successes == n else middle + half


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test: the discordant pairs against a fair coin.

    Q. McNemar, Psychometrika 12 (1947) 153; exact form by the binomial distribution.
    """
    total, less = only_first + only_second, min(only_first, only_second)
    logs = (
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) - total * math.log(2)
        for k in range(less + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def tango(only_first: float, only_second: float, n: float) -> tuple[float, float, float]:
    """Difference of two paired shares (first minus second) and its 95 % score interval.

    It keeps its coverage with few discordant pairs and has a width with none: z²/(n + z²) to each side.
    T. Tango, Stat. Med. 17 (1998) 891; recommended by M. W. Fagerland, S. Lydersen, P. Laake,
    Stat. Med. 33 (2014) 2850.
    """
    estimate = (only_first - only_second) / n

    def score(difference: float) -> float:
        top = only_first - only_second - n * difference
        spread = _tango_variance(only_first, only_second, n, difference)
        return top / math.sqrt(spread) if spread > 0 else math.copysign(math.inf, top) if top else 0.0

    return estimate, _root(score, Z, -1.0, estimate), _root(score, -Z, estimate, 1.0)


def _tango_variance(only_first: float, only_second: float, n: float, difference: float) -> float:
    """n times (2 q + d (1 - d)), q the share of `only_second` most likely under the difference d."""
    a = 2 * n
    b = -only_first - only_second + (2 * n - only_first + only_second) * difference
    c = -only_second * difference * (1 - difference)
    q = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    return n * (2 * q + difference * (1 - difference))


def _root(function: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Where a falling function takes `value`, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > value else (low, middle)
    return (low + high) / 2


def sums_of(values: _Floats, groups: Sequence[NDArray[np.intp]]) -> _Floats:
    """The sum of the values of each group; a group is the positions of its samples, one at least."""
    starts = np.cumsum([0, *(len(group) for group in groups[:-1])])
    return np.asarray(np.add.reduceat(values[np.concatenate(groups)], starts), np.float64)


def design_effect(values: _Floats, rare: NDArray[np.bool_], groups: Sequence[NDArray[np.intp]]) -> float:
    """How many times the variance of a mean is what it would be if the samples of a group were independent.

    Counts divided by it can be put into formulas for independent samples: J. N. K. Rao, A. J. Scott,
    Biometrics 48 (1992) 577. At least 1; where fewer than five groups hold one of the samples that
    decide (`rare`), there is nothing to estimate it from, and a group counts as one sample.
    """
    sizes = np.array([len(group) for group in groups], np.float64)
    deviations = values - values.mean()
    alone = np.square(deviations).sum()
    if not alone or (sums_of(rare.astype(np.float64), groups) > 0).sum() < _TELLING:
        return float(np.square(sizes).sum() / sizes.sum())
    between = np.square(sums_of(deviations, groups)).sum() * len(groups) / (len(groups) - 1)
    return max(1.0, float(between / alone))


def bootstrap(
    statistic: Callable[[NDArray[np.intp]], _Floats], n: int, seed: int, resamples: int = RESAMPLES
) -> _Floats:
    """The statistic on `resamples` draws of n positions with replacement, shape (resamples,).

    `statistic` takes positions of shape (k, n) and gives k values.
    """
    rng = np.random.default_rng(seed)
    chunk = max(1, _CELLS // n)
    sizes = [min(chunk, resamples - done) for done in range(0, resamples, chunk)]
    return np.concatenate([statistic(rng.integers(0, n, (size, n))) for size in sizes])


def percentile(draws: _Floats) -> tuple[float, float]:
    """The 95 % percentile interval. Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch. 13."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def bca(values: _Floats, seed: int = 0) -> tuple[float, float, float]:
    """Mean and its 95 % bootstrap interval, corrected for bias and acceleration; n of at least 2.

    Efron and Tibshirani (1993), section 14.3, equations 14.10 to 14.15.
    """
    mean = float(values.mean())
    deviations = values - mean
    squares = float((deviations**2).sum())
    if squares == 0:
        return mean, mean, mean
    draws = bootstrap(lambda rows: values[rows].mean(1), len(values), seed)
    below = float((draws < mean).mean() + (draws == mean).mean() / 2)
    normal = NormalDist()
    bias = normal.inv_cdf(min(max(below, 1 / len(draws)), 1 - 1 / len(draws)))
    acceleration = float((deviations**3).sum()) / (6 * squares**1.5)

    def level(z: float) -> float:
        return normal.cdf(bias + (bias + z) / (1 - acceleration * (bias + z)))

    low, high = np.quantile(draws, [level(-Z), level(Z)])
    return mean, float(low), float(high)


def sign_flip(differences: _Floats, seed: int = 0) -> float:
    """Two-sided p of the paired randomisation test: each difference's sign is a fair coin.

    R. A. Fisher, The Design of Experiments (1935), section 21; by `RESAMPLES` random flips, so at
    least 1 / (RESAMPLES + 1).
    """
    rng = np.random.default_rng(seed)
    seen = abs(float(differences.sum()))
    chunk = max(1, _CELLS // len(differences))
    reached = 0
    for done in range(0, RESAMPLES, chunk):
        signs = rng.integers(0, 2, (min(chunk, RESAMPLES - done), len(differences)), np.int8) * 2.0 - 1
        reached += int((np.abs(signs @ differences) >= seen * (1 - 1e-12)).sum())
    return (1 + reached) / (RESAMPLES + 1)
