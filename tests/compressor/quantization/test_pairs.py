"""No pair of neighbours may overflow int16, whatever the activations."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from compressor.quantization.pairs import project, quantize_rows, worst_pair

LIMIT = 128
MATRICES = arrays(
    np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-4, 4, width=32)
)


def saturating(activations, codes):
    """What VPMADDUBSW and the additions behind it give: pairs of products, added in saturating int16."""
    products = activations.astype(int) * codes.astype(int)
    padded = np.pad(products, ((0, 0), (0, products.shape[1] % 2)))
    pairs = padded.reshape(len(codes), -1, 2).sum(2)
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(1)


@settings(deadline=None, max_examples=200)
@given(rows=MATRICES, seed=st.integers(0, 2**32 - 1))
def test_saturating_sums_equal_exact_sums(rows, seed):
    codes, _ = quantize_rows(rows, np.full(len(rows), 1e-9), LIMIT)
    rng = np.random.default_rng(seed)
    for activations in (
        np.full(rows.shape, 255),
        rng.integers(0, 256, rows.shape),
        rng.choice([0, 255], rows.shape),
    ):
        exact = (activations.astype(int) * codes.astype(int)).sum(1)
        assert np.array_equal(saturating(activations, codes), exact)


@settings(deadline=None, max_examples=200)
@given(rows=MATRICES)
def test_error_is_never_above_that_of_the_enlarged_scale(rows):
    floor = np.full(len(rows), 1e-9)
    codes, scale = quantize_rows(rows, floor, LIMIT)
    wide = np.maximum.reduce([np.abs(rows).max(1) / 127.0, worst_pair(rows) / LIMIT, floor]).astype(
        np.float32
    )
    enlarged = project(rows / wide[:, None].astype(np.float64), LIMIT)

    def error(integers, step):
        return np.square(integers * step[:, None].astype(np.float64) - rows).sum(1)

    assert (error(codes, scale) <= error(enlarged, wide) * (1 + 1e-4) + 1e-12).all()


def test_projection_moves_only_bad_pairs_to_the_nearest_point():
    real = np.array([[127.0, 127.0, 100.0, 20.0, -90.0, -60.0, 127.0, -127.0, 80.4, 47.6, 99.0]])
    moved = project(real, LIMIT)[0].tolist()
    assert moved == [64, 64, 100, 20, -79, -49, 127, -127, 80, 48, 99]


def test_without_a_limit_nothing_is_moved():
    codes, scale = quantize_rows(np.full((1, 4), 2.0, np.float32), np.zeros(1), None)
    assert codes.tolist() == [[127] * 4]
    assert np.isclose(scale, 2 / 127)


def test_cost_of_safety_is_small_on_ordinary_weights():
    rows = np.random.default_rng(0).normal(0, 1, (64, 288)).astype(np.float32)
    errors = []
    for limit in (None, LIMIT):
        codes, scale = quantize_rows(rows, np.full(64, 1e-9), limit)
        errors.append(np.square(codes * scale[:, None] - rows).mean())
    assert errors[1] < 1.8 * errors[0]  # 7 bits would make it 4


def test_rows_are_independent_of_the_others(monkeypatch):
    rows = np.random.default_rng(1).normal(0, 1, (40, 33)).astype(np.float32)
    whole = quantize_rows(rows, np.full(40, 1e-9), LIMIT)
    monkeypatch.setattr("compressor.quantization.pairs._CHUNK", 100)
    parts = quantize_rows(rows, np.full(40, 1e-9), LIMIT)
    assert np.array_equal(whole[0], parts[0])
    assert np.array_equal(whole[1], parts[1])
