"""Observers against cases worked out by hand and against brute force on the values themselves."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from compressor.errors import UsageError
from compressor.quantization.observers import OBSERVERS, Grid, TensorStatistics, observer_named
from compressor.quantization.observers.entropy import divergence
from compressor.quantization.observers.mse import errors
from compressor.quantization.observers.record import Record
from compressor.quantization.observers.statistics import BINS, Bins

ALL = (*OBSERVERS, "percentile:99.9")
GRIDS = (Grid(), Grid(symmetric=True))
N = 40_000


def observed(values: NDArray, samples: int = 8) -> TensorStatistics:
    statistics = TensorStatistics()
    for ordinal, part in enumerate(np.array_split(np.asarray(values, np.float32), samples)):
        statistics.update(part, ordinal)
    return statistics


def mean_squared_error(values: NDArray, low: float, high: float, grid: Grid) -> float:
    """Of quantizing `values` as ONNX QuantizeLinear does."""
    scale, zero = (float(part[0]) for part in grid.place(np.array([low]), np.array([high])))
    codes = np.clip(np.rint(values / scale) + zero, grid.lowest, grid.highest)
    return float(np.mean((values - (codes - zero) * scale) ** 2))


def distributions() -> dict[str, NDArray]:
    rng = np.random.default_rng(5)
    normal = rng.normal(0, 1, N)
    return {
        "relu": np.maximum(normal, 0),
        "relu6": np.clip(normal * 4 + 2, 0, 6),
        "symmetric": normal,
        "silu": 2 * normal / (1 + np.exp(-2 * normal)),
        "laplace": rng.laplace(0, 1, N),
        "outliers": np.append(normal * 0.02, [9, -4]),
        "negative": -np.abs(normal),
        "heavy": rng.standard_t(3, N),
    }


DISTRIBUTIONS = distributions()


# ------------------------------------------------------------------------------- statistics


finite = st.floats(-(2.0**60), 2.0**60, width=32)


@given(hnp.arrays(np.float32, st.integers(1, 60), elements=finite), st.integers(0, 2**32 - 1))
def test_histogram_depends_on_neither_order_nor_grouping(values: NDArray, seed: int) -> None:
    at_once = observed(values, 1)
    shuffled = np.random.default_rng(seed).permutation(values)
    one_by_one = observed(shuffled, len(values))
    assert np.array_equal(at_once.counts, one_by_one.counts)
    for name in ("minimum", "maximum", "zeros", "exponent", "first"):
        assert getattr(at_once, name) == getattr(one_by_one, name)
    assert at_once.counts.sum() + at_once.zeros == len(values)
    assert len(at_once.counts) <= BINS


def test_bins_by_hand() -> None:
    # 0..4 in at most 4096 bins: the least power of two is 2**-9 (2049 bins; 2**-10 would need 4097).
    statistics = observed(np.array([0.0, 4.0, 2.0**-9, 1.5 * 2.0**-9, 0.0]), 2)
    assert statistics.exponent == -9
    assert len(statistics.counts) == 2049
    assert statistics.zeros == 2
    assert statistics.counts[[0, 1, 2048]].tolist() == [0, 2, 1]
    assert statistics.bins().edges[-1] == 4.0


def test_growing_range_merges_pairs_of_bins() -> None:
    values = np.random.default_rng(0).normal(0, 1, 999).astype(np.float32)
    grown = observed(np.concatenate([values, [-3e4, 7e5]]), 9)
    direct = np.floor(values.astype(np.float64) * 2.0**-grown.exponent) - grown.first
    assert np.bincount(direct.astype(int), minlength=len(grown.counts)).sum() == 999
    counts = np.bincount(direct.astype(int), minlength=len(grown.counts))
    counts[[0, -1]] += 1
    assert np.array_equal(grown.counts, counts)


def test_large_tensors_keep_exact_extremes_and_a_fair_histogram() -> None:
    values = np.random.default_rng(0).normal(0, 1, (3, 112, 112, 16)).astype(np.float32)
    values[1, 50, 50, 5] = 77
    statistics = TensorStatistics()
    statistics.update(values, 0)
    assert statistics.maximum == 77
    taken = statistics.counts.sum()
    assert 15_000 < taken < 18_000
    middle = (statistics.bins().edges[1:] + statistics.bins().edges[:-1]) / 2
    spread = np.sqrt(statistics.counts @ middle**2 / taken)
    assert spread == pytest.approx(1, abs=0.02)


def test_moving_average_by_hand() -> None:
    statistics = TensorStatistics()
    for ordinal, high in enumerate((4.0, 8.0, 3.0)):
        statistics.update(np.array([-1, high], np.float32), ordinal)
    assert observer_named("moving-average")(statistics, Grid()) == pytest.approx((-1, 5))
    for ordinal in range(97):
        statistics.update(np.array([-1, 5], np.float32), ordinal)
    statistics.update(np.array([-1, 105], np.float32), 100)
    assert statistics.average_high == pytest.approx(5 + 0.01 * 100)


def test_values_that_are_no_numbers_count_for_nothing() -> None:
    statistics = TensorStatistics()
    statistics.update(np.array([1, np.nan, -2, -np.inf, 3e38], np.float32), 0)
    statistics.update(np.array([np.nan], np.float32), 1)
    statistics.update(np.zeros((0, 3), np.float32), 2)
    assert (statistics.minimum, statistics.maximum) == (-2, 1)
    assert (statistics.nan, statistics.masked, statistics.samples) == (2, 1, 1)
    assert statistics.counts.sum() == 2


def test_a_record_comes_back_as_it_was(tmp_path) -> None:
    entries = {"a": observed(DISTRIBUTIONS["silu"]), "b": TensorStatistics(), "c": observed(np.zeros(3))}
    record = Record("key", Grid(8, True), entries, 9, 8, [(3, "NaN in input 'x'")], "f" * 64, False, False)
    record.save(tmp_path / "one.npz")
    loaded = Record.load(tmp_path / "one.npz")
    assert loaded is not None
    loaded.save(tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    assert (loaded.key, loaded.grid, loaded.done, loaded.units) == ("key", Grid(8, True), 9, 8)
    assert loaded.skipped == record.skipped
    assert Record.load(tmp_path / "none.npz") is None


# ---------------------------------------------------------------------------------- observers


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", [*DISTRIBUTIONS, "constant", "zero"])
def test_a_range_is_finite_holds_zero_and_stays_inside(name: str, kind: str, grid: Grid) -> None:
    values = {**DISTRIBUTIONS, "constant": np.full(99, 3.3), "zero": np.zeros(99)}[kind]
    low, high = observer_named(name)(observed(values), grid)
    step = (values.max() - values.min()) / 255
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert min(values.min(), 0) - step <= low <= 0 <= high <= max(values.max(), 0) + step
    assert high > low or kind == "zero"


def test_minmax() -> None:
    low, high = observer_named("minmax")(observed(np.array([2.0, 5.0, 3.0])), Grid())
    assert (low, high) == (0, 5)


def test_percentile_by_hand() -> None:
    """1..1000: 1 % cut at either end leaves 11..990, within a bin of 1/4 and half a value."""
    statistics = observed(np.arange(1, 1001))
    low, high = observer_named("percentile:98")(statistics, Grid())
    assert low == 0
    assert high == pytest.approx(990.5, abs=1)
    low, high = observer_named("percentile:98")(observed(np.arange(1, 1001) - 500.5), Grid())
    assert (low, high) == (pytest.approx(-490, abs=1), pytest.approx(490, abs=1))
    assert observer_named("percentile:98")(statistics, Grid(symmetric=True))[1] == pytest.approx(981, abs=1)


def test_percentile_counts_zeros() -> None:
    values = np.append(np.zeros(9900), np.arange(1, 101))
    assert observer_named("percentile:99.9")(observed(values), Grid())[1] == pytest.approx(95.5, abs=1)


def test_percentile_of_next_to_nothing_is_the_whole_range() -> None:
    values = np.append(np.zeros(10**6), [1.0])
    assert observer_named("percentile")(observed(values), Grid()) == (0, 1)


def test_percentile_of_all_is_minmax() -> None:
    statistics = observed(DISTRIBUTIONS["heavy"])
    minmax = observer_named("minmax")(statistics, Grid())
    assert observer_named("percentile:100")(statistics, Grid()) == minmax


def test_divergence_by_hand() -> None:
    """P = [1, 3, 2, 2 + 4] / 12; Q merges [1, 3] and [2, 2] into [2, 2, 2, 2] / 8."""
    found = divergence(np.array([1.0, 3, 2, 2, 1, 3]), 0, 4, 2)
    expected = (1 * math.log(1 / 3) + 3 * math.log(1) + 2 * math.log(2 / 3) + 6 * math.log(2)) / 12
    assert found == pytest.approx(expected)


def test_divergence_spreads_over_bins_in_use_only() -> None:
    # [4, 0] merges into 4 and comes back as [4, 0]: nothing is lost
    assert divergence(np.array([4.0, 0, 2, 2]), 0, 4, 2) == pytest.approx(0)


def test_entropy_keeps_a_flat_distribution_whole_and_cuts_a_tail() -> None:
    flat = np.linspace(0, 1, 100_001)[1:]
    assert observer_named("entropy")(observed(flat), Grid())[1] == pytest.approx(1, rel=0.01)
    tailed = np.append(np.abs(DISTRIBUTIONS["symmetric"]), np.linspace(4, 40, 12))
    assert observer_named("entropy")(observed(tailed), Grid())[1] < 12


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_expected_error_is_that_of_the_values(kind: str, grid: Grid) -> None:
    values = DISTRIBUTIONS[kind].astype(np.float32).astype(np.float64)
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    for share in (1.0, 0.7, 0.3):
        lows, highs = np.array([low * share]), np.array([high * share])
        got = errors(observed(values).bins(), lows, highs, grid)[0] / len(values)
        assert got == pytest.approx(mean_squared_error(values, lows[0], highs[0], grid), rel=0.03)


def test_expected_error_by_hand() -> None:
    """Scale 1, codes 0..255: 4 values spread over [1, 2) err by 1/12 each, 2 over [256, 257) by 7/3."""
    bins = Bins(np.array([4.0, 0.0, 2.0]), np.array([1.0, 2.0, 256.0, 257.0]), 5)
    found = errors(bins, np.array([0.0]), np.array([255.0]), Grid())
    assert found[0] == pytest.approx(4 / 12 + 2 * 7 / 3)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_mse_is_as_good_as_brute_force(kind: str, grid: Grid) -> None:
    values = DISTRIBUTIONS[kind].astype(np.float32).astype(np.float64)
    statistics = observed(values)
    found = mean_squared_error(values, *observer_named("mse")(statistics, grid), grid)
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    shares = np.linspace(0.02, 1, 25)
    pairs = {(low * a, high * b) for a in shares for b in shares}
    best = min(mean_squared_error(values, *pair, grid) for pair in pairs)
    assert found <= 1.03 * best


def test_mse_ends_are_codes_and_the_zero_point_is_exact() -> None:
    low, high = observer_named("mse")(observed(DISTRIBUTIONS["silu"]), Grid())
    zero = -low / ((high - low) / 255)
    assert zero == pytest.approx(round(zero), abs=1e-9)


def test_mse_clips_less_the_more_bits_there_are() -> None:
    statistics = observed(DISTRIBUTIONS["laplace"])
    reach = [observer_named("mse")(statistics, Grid(bits))[1] for bits in (4, 6, 8, 16)]
    assert all(fewer < more for fewer, more in pairwise(reach))


@pytest.mark.parametrize("text", ["median", "percentile:abc", "percentile:20", "percentile:nan", "minmax:3"])
def test_an_observer_that_is_not_understood(text: str) -> None:
    with pytest.raises(UsageError, match=text.split(":")[1] if ":" in text else "known are"):
        observer_named(text)(observed(np.arange(9)), Grid())
