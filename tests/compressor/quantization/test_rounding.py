"""Rounding by the layer's loss, with and without the pair constraint."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.quantization import pairs, rounding, weight_mse

FLOOR = np.full(8, 1e-9)


def problem(seed: int, k: int, channels: int = 8, groups: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Weights [channels, k] and second moments [groups, k, k] of correlated, non-negative inputs."""
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(groups, k, k)) * generator.lognormal(size=(groups, 1, k))
    inputs = np.maximum(generator.normal(size=(groups, 4 * k, k)) @ mixing, 0)
    second = inputs.transpose(0, 2, 1) @ inputs / (4 * k)
    return generator.standard_t(4, size=(channels, k)), second


def pair_sums(codes: np.ndarray) -> np.ndarray:
    wide = codes[:, : codes.shape[1] // 2 * 2].astype(int)
    first, second = wide[:, ::2], wide[:, 1::2]
    return np.where(first * second > 0, np.abs(first) + np.abs(second), 0)


def test_the_second_weight_makes_good_for_the_first() -> None:
    # Both inputs always equal: only the sum of the weights counts. 0.4 + 0.4 rounds to 0 + 0; the first one's
    # error of 0.4 is passed on, so the second becomes 0.4 + 0.4 / 1.03 (damping), rounded 1.
    second = np.ones((1, 2, 2))
    assert rounding.round_rows(np.array([[0.4, 0.4]]), [second], None).tolist() == [[0, 1]]
    assert rounding.round_rows(np.array([[0.4, 0.4]]), [np.eye(2)[None]], None).tolist() == [[0, 0]]


def test_a_pair_goes_to_the_cheapest_point_of_the_line() -> None:
    # Independent inputs, the first of 9 times the second's power: 9 (100 - t)^2 + (60 - 128 + t)^2 is least
    # at t = (900 + 68) / 10 = 96.8 (and at 96.7 with the damping of 0.15 on each): the second gives way.
    second = np.diag([9.0, 1.0])[None]
    found = rounding.round_rows(np.array([[100.0, 60.0], [-100.0, -60.0], [100.0, -60.0]]), [second], 128)
    assert found[0].sum() == 128
    assert found[0, 0] in (96, 97)
    assert found[1].tolist() == (-found[0]).tolist()
    assert found[2].tolist() == [100, -60]


def test_what_a_pair_loses_is_made_good_by_later_weights() -> None:
    # All three inputs equal: 100 + 60 + 0 must stay 160, of which the pair may hold 128.
    second = np.ones((1, 3, 3)) + 1e-3 * np.eye(3)
    found = rounding.round_rows(np.array([[100.0, 60.0, 0.0]]), [second], 128)
    assert found[0, :2].sum() == 128
    assert 28 <= found[0, 2] <= 32


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 37), limit=st.sampled_from([128, 200, None]))
def test_pairs_keep_the_limit(seed: int, k: int, limit: int | None) -> None:
    rows, second = problem(seed, k)
    rows[0] = np.abs(rows[0]) + 10  # all weights of a channel alike: every pair is at the limit
    codes, scales = rounding.quantize_rows(rows, [second], FLOOR, limit)
    assert pair_sums(codes).max(initial=0) <= (limit or 254)
    assert np.abs(codes.astype(int)).max() <= 127
    assert (scales > 0).all()


@pytest.mark.parametrize("limit", [None, 128])
def test_the_loss_is_below_that_of_the_nearest_codes(limit: int | None) -> None:
    for seed in range(5):
        rows, second = problem(seed, 24)
        loss = {}
        for name, (codes, scales) in {
            "gptq": rounding.quantize_rows(rows, [second], FLOOR, limit),
            "nearest": pairs.quantize_rows(rows, FLOOR, limit),
        }.items():
            loss[name] = rounding.losses(rows - codes * scales[:, None].astype(float), [second]).sum()
        assert loss["gptq"] < 0.7 * loss["nearest"]


def test_groups_are_rounded_each_with_its_own_moments() -> None:
    rows, second = problem(3, 9, channels=8, groups=4)
    together, scales = rounding.quantize_rows(rows, [second], FLOOR, 128)
    for group in range(4):
        part = slice(2 * group, 2 * group + 2)
        alone = rounding.quantize_rows(rows[part], [second[group : group + 1]], FLOOR[part], 128)
        assert np.array_equal(together[part], alone[0])
        assert np.array_equal(scales[part], alone[1])


def test_spans_are_independent() -> None:
    rows, second = problem(4, 12)
    parts = [second[:, :8, :8], second[:, 8:, 8:]]
    real = rows * 40
    found = rounding.round_rows(real, parts, 128)
    assert np.array_equal(found[:, :8], rounding.round_rows(real[:, :8], parts[:1], 128))
    assert np.array_equal(found[:, 8:], rounding.round_rows(real[:, 8:], parts[1:], 128))


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    rows, second = problem(5, 8)
    second[:, 2:4] = second[:, :, 2:4] = 0
    for matrix in (second, np.zeros_like(second)):
        codes, scales = rounding.quantize_rows(rows, [matrix], FLOOR, 128)
        assert np.isfinite(scales).all()
        assert np.abs(codes * scales[:, None] - rows).max() < 0.5 * np.abs(rows).max()


def test_scales_respect_the_floor() -> None:
    rows, second = problem(6, 8)
    floor = np.linspace(0.001, 1, 8)
    _, scales = rounding.quantize_rows(rows, [second], floor, 128)
    assert (scales >= floor.astype(np.float32)).all()


def test_an_outlier_is_clipped_where_that_pays() -> None:
    # n weights of 0.5 and one of 127. With a scale s all small ones get code 1, the large one 127: the error
    # n (s - 0.5)^2 + 127^2 (1 - s)^2 is least at s = (n / 2 + 127^2) / (n + 127^2). Steps of 0.02 are tried.
    for n, best in ((999, 0.98), (100_000, 0.56)):
        row = np.full((1, n + 1), 0.5)
        row[0, 0] = 127
        codes, scale = weight_mse.quantize_rows(row, np.full(1, 1e-9), None)
        assert (n / 2 + 127**2) / (n + 127**2) == pytest.approx(best, abs=0.01)
        assert scale[0] == pytest.approx(best)
        assert codes[0, :2].tolist() == [127, 1]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 33), limit=st.sampled_from([128, None]))
def test_mse_scales_are_never_worse_than_plain_ones(seed: int, k: int, limit: int | None) -> None:
    rows, _ = problem(seed, k)
    codes, scales = weight_mse.quantize_rows(rows, FLOOR, limit)
    assert pair_sums(codes).max(initial=0) <= (limit or 254)
    safe = np.maximum(
        np.abs(rows).max(axis=1) / 127, 0 if limit is None else pairs.worst_pair(rows) / limit
    ).astype(np.float32)
    plain = np.rint(rows / safe[:, None]) * safe[:, None].astype(float)
    errors = np.square(codes * scales[:, None].astype(float) - rows).sum(axis=1)
    assert (errors <= np.square(plain - rows).sum(axis=1) * (1 + 1e-6) + 1e-12).all()


def test_wide_layers_are_rounded_as_the_algorithm_says() -> None:
    # Column by column with the Cholesky factor of the damped inverse, of more columns than a block holds.
    real, second = problem(3, 150, channels=4)
    real, damped = real * 20, second[0] / np.diagonal(second[0]).mean() + 0.03 * np.eye(150)
    pair = -np.diagonal(second[0]).reshape(-1, 2).sum(axis=1)
    order = (2 * np.argsort(pair, kind="stable")[:, None] + [0, 1]).reshape(-1)
    factor = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    rest, codes = real[:, order].copy(), np.empty((4, 150))
    for column in range(150):
        codes[:, column] = np.clip(np.rint(rest[:, column]), -127, 127)
        error = (rest[:, column] - codes[:, column]) / factor[column, column]
        rest[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
    found = rounding.round_rows(real, [second], None)[:, order]
    assert (found == codes).mean() > 0.99


@pytest.mark.parametrize(("span", "places"), [(3, 9), (5, 4), (1, 6)])
def test_rows_with_gaps_are_rounded_as_well(span: int, places: int) -> None:
    """Kernels that begin a new pair at every place of the window: an odd last channel has no neighbour."""
    rows, second = problem(7, span * places)
    filled = rounding.spaced([second], span)
    gaps = np.insert(rows, np.arange(span, rows.shape[1] + 1, span), 0.0, axis=1)
    assert filled[0].shape == (1, gaps.shape[1], gaps.shape[1])
    codes, scales = rounding.quantize_rows(gaps, filled, FLOOR, 128)
    stretches = codes.reshape(len(rows), places, span + 1)
    assert not stretches[:, :, span].any()
    assert pair_sums(codes).max() <= 128
    kept = stretches[:, :, :span].reshape(len(rows), -1) * scales[:, None].astype(np.float64)
    nearest, coarse = pairs.quantize_rows(gaps, FLOOR, 128)
    plain = nearest.reshape(len(rows), places, span + 1)[:, :, :span].reshape(len(rows), -1) * coarse[:, None]
    ours, theirs = (rounding.losses(rows - found, [second]).sum() for found in (kept, plain))
    assert ours < 0.9 * theirs


def test_gaps_keep_what_is_known_of_groups_and_parts() -> None:
    second = np.arange(2 * 6 * 6.0).reshape(2, 6, 6)
    first, other = rounding.spaced([second, second], 3)
    assert np.array_equal(first, other)
    keep = [0, 1, 2, 4, 5, 6]
    assert np.array_equal(first[:, keep][:, :, keep], second)
    assert not first[:, [3, 7]].any()
    assert not first[:, :, [3, 7]].any()
