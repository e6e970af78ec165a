"""From times per block to claims: paired ratios, quantiles, and their intervals.

Two sessions of the same engine differ by about 1 % for as long as they live (where their memory lies), and
calls close in time share the noise of the machine. So the unit that is resampled is the *cluster*: one set
of freshly opened sessions. Engine after engine, with single calls resampled, two identical engines are
called different nearly always.
"""

from __future__ import annotations

from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BAND", "MIN_CLUSTERS", "SAMPLES_FOR", "quantiles", "ratio", "verdict"]

Floats = NDArray[np.float64]

BAND = 0.02
MIN_CLUSTERS = 5
# Below so many calls MLPerf's early stopping makes no estimate of a percentile (MLPerf inference rules,
# "Early Stopping", confidence 99 %).
SAMPLES_FOR = {"p90": 64, "p99": 662}
_LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_RESAMPLES = 2000
_POINTS = 1000


def ratio(clusters: list[Floats], rng: np.random.Generator) -> dict[str, float | None]:
    """{"value", "low", "high"} of a ratio from paired log-ratios, one array for each cluster.

    The value is the median over clusters of the median within each. The 95 % interval is a cluster
    bootstrap of that median; null with fewer than `MIN_CLUSTERS` clusters, from which no interval
    could be trusted.
    """
    centres = np.array([np.median(pairs) for pairs in clusters])
    value = exp(float(np.median(centres)))
    if len(centres) < MIN_CLUSTERS:
        return {"value": value, "low": None, "high": None}
    picks = rng.integers(0, len(clusters), (_RESAMPLES, len(clusters)))
    low, high = np.quantile(np.median(centres[picks], axis=1), [0.025, 0.975])
    return {"value": value, "low": exp(float(low)), "high": exp(float(high))}


def verdict(speed: dict[str, float | None], noise: dict[str, float | None] | None) -> tuple[str, str | None]:
    """ "faster", "slower", "same" or "undecided", and why it is undecided.

    Faster and slower mean by more than `BAND`, same means within it, each with the whole interval; and
    a difference must also lie outside the interval of the A/A control.
    """
    low, high = speed["low"], speed["high"]
    if low is None or high is None:
        return (
            "undecided",
            f"fewer than {MIN_CLUSTERS} sets of fresh sessions fit into the time; allow more seconds",
        )
    spread = [abs(np.log(edge)) for edge in (noise or {}).values() if edge is not None]
    band = max([np.log1p(BAND), *spread])
    if np.log(low) > band:
        return "faster", None
    if np.log(high) < -band:
        return "slower", None
    if low >= 1 - BAND and high <= 1 + BAND:
        return "same", None
    if low > 1 + BAND or high < 1 - BAND:
        return "undecided", "the difference is no larger than the noise of the A/A control"
    return "undecided", f"the interval reaches over the edge of ±{BAND:.0%}; allow more seconds"


def quantiles(clusters: list[Floats], rng: np.random.Generator) -> dict[str, Any]:
    """Nearest-rank percentiles of all calls, in the unit given, each with its interval.

    {"p50", "p90", "p99": value or None, "p50_interval", ...: [low, high] or None, "p90_reason" and
    "p99_reason" beside a None}. The interval is a cluster bootstrap.
    """
    pooled = np.concatenate(clusters)
    intervals = _intervals(clusters, rng) if len(clusters) >= MIN_CLUSTERS else {}
    result: dict[str, Any] = {}
    for name, level in _LEVELS.items():
        needed = SAMPLES_FOR.get(name, 1)
        enough = len(pooled) >= needed
        result[name] = float(np.quantile(pooled, level, method="inverted_cdf")) if enough else None
        result[f"{name}_interval"] = intervals.get(name) if enough else None
        if not enough:
            result[f"{name}_reason"] = f"{len(pooled)} calls were timed; {name} is claimed from {needed}"
    return result


def _intervals(clusters: list[Floats], rng: np.random.Generator) -> dict[str, list[float]]:
    """Cluster bootstrap of the pooled quantiles, each cluster thinned to at most `_POINTS` of its own."""
    points, owner, weight = _thinned(clusters)
    order = np.argsort(points)
    points, owner, weight = points[order], owner[order], weight[order]
    found = np.empty((_RESAMPLES // 4, len(_LEVELS)))
    for row in found:
        times = np.bincount(rng.integers(0, len(clusters), len(clusters)), minlength=len(clusters))
        mass = np.cumsum(times[owner] * weight)
        places = np.searchsorted(mass, np.array(list(_LEVELS.values())) * mass[-1])
        row[:] = points[np.minimum(places, len(points) - 1)]
    edges = np.quantile(found, [0.025, 0.975], axis=0)
    return {name: [float(edges[0, at]), float(edges[1, at])] for at, name in enumerate(_LEVELS)}


def _thinned(clusters: list[Floats]) -> tuple[Floats, NDArray[np.intp], Floats]:
    points, owner, weight = [], [], []
    for index, times in enumerate(clusters):
        count = min(len(times), _POINTS)
        levels = (np.arange(count) + 0.5) / count
        points.append(np.quantile(times, levels, method="inverted_cdf"))
        owner.append(np.full(count, index))
        weight.append(np.full(count, len(times) / count))
    return np.concatenate(points), np.concatenate(owner), np.concatenate(weight)
