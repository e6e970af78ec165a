"""Weights in blocks: packing, HQQ and GPTQ against cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.quantization import gptq, hqq
from compressor.quantization.blocks import Blocks, nearest


def test_nearest_by_hand() -> None:
    made = nearest(np.array([[-3.0, 0.0, 12.0, 4.4]]), 4, 4)
    assert made.scale[0, 0] == 1
    assert made.zero[0, 0] == 3
    assert made.codes[0, 0].tolist() == [0, 3, 15, 7]
    assert made.values()[0].tolist() == [-3, 0, 12, 4]


def test_packing_puts_the_first_code_low_and_fills_rows() -> None:
    codes = np.array([[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]], np.uint8)
    zero = np.array([[1, 2, 3]], np.uint8)
    blocks = Blocks(codes, np.ones((1, 3), np.float32), zero, 4, 10)
    assert blocks.packed_codes()[0].tolist() == [[0x21, 0x43], [0x65, 0x87], [0xA9, 0xCB]]
    assert blocks.packed_zeros()[0].tolist() == [0x21, 0x03]
    assert blocks.values().shape == (1, 10)


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_and_zero_rows_are_exact(bits: int) -> None:
    for rows in (np.zeros((2, 32)), np.full((2, 32), -0.7), np.full((2, 32), 1e-30)):
        for made in (nearest(rows, bits, 16), hqq.round_rows(rows, bits, 16)):
            np.testing.assert_allclose(made.values(), rows, rtol=1e-6, atol=1e-18)


def test_shrinkage_by_hand() -> None:
    # |e| - |e|^(p-1) / beta with p = 0.7: 0.5 - 0.5^-0.3 / 10 = 0.3769; 0.1 - 0.1^-0.3 / 10 < 0
    found = hqq._shrink(np.array([0.5, -0.5, 0.1], np.float32), 10.0)
    np.testing.assert_allclose(found, [0.3769, -0.3769, 0], atol=1e-4)


def test_fit_by_hand() -> None:
    # codes 0..3 for -0.5, 0, 0.5, 1.2: zero = mean(0+1, 1-0, 2-1, 3-2.4) = 0.9 -> 1; the steps are -1..2,
    # scale = (0.5 + 0 + 0.5 + 2.4) / (1 + 0 + 1 + 4)
    aim, codes = np.array([[[-0.5, 0, 0.5, 1.2]]], np.float32), np.array([[[0, 1, 2, 3]]], np.uint8)
    scale, zero = hqq._fit(aim, codes, np.array([[0.5]], np.float32), 4)
    assert zero[0, 0] == 1
    assert scale[0, 0] == pytest.approx(3.4 / 6)


def test_hqq_lowers_the_error_of_its_norm() -> None:
    rows = np.random.default_rng(0).standard_t(4, size=(64, 128))
    errors = [
        (np.abs(made.values() - rows) ** 0.7).sum()
        for made in (nearest(rows, 4, 32), hqq.round_rows(rows, 4, 32))
    ]
    assert errors[1] < 0.97 * errors[0]


def test_gptq_by_hand() -> None:
    # Weights 1.4 and 1.4, scale 1, E[x xT] = (1, 0.5; 0.5, 1) and 1 % damping: 1.4 rounds to 1, its error
    # 0.4 moves the second weight to 1.4 + 0.4 x 0.5 / 1.01 = 1.598, which rounds to 2.
    spread = gptq._spread(np.array([[1, 0.5], [0.5, 1]]), 2, 0.01)
    one, zero = np.ones((1, 1), np.float32), np.full((1, 1), 8, np.uint8)
    values = np.array([[1.4, 1.4]])
    codes = gptq._round_block(values, spread, slice(0, 2), one, zero, 4)
    assert (codes[0, 0] - 8.0).tolist() == [1, 2]
    assert values[0, 1] == pytest.approx(1.4 + 0.4 * 0.5 / 1.01)


def test_gptq_with_independent_inputs_rounds_to_nearest() -> None:
    rows = np.random.default_rng(0).normal(size=(8, 64))
    made = gptq.round_rows(rows, np.eye(64), 10**6, 4, 32)
    np.testing.assert_array_equal(made.codes, hqq.round_rows(rows, 4, 32).codes)


def test_gptq_trusts_few_vectors_little() -> None:
    rng = np.random.default_rng(0)
    rows, mix = rng.normal(size=(32, 64)), rng.normal(size=(64, 64))
    few, other = rng.normal(size=(40, 64)) @ mix, rng.normal(size=(2000, 64)) @ mix

    def loss(made: Blocks) -> float:
        return float((((made.values() - rows) @ other.T) ** 2).sum())

    seen = few.T @ few / len(few)
    assert loss(gptq.round_rows(rows, seen, len(few), 4, 32)) < loss(hqq.round_rows(rows, 4, 32))
    assert loss(gptq.round_rows(rows, seen, len(few), 4, 32)) < loss(
        gptq.round_rows(rows, seen, 10**9, 4, 32)
    )


def test_gptq_takes_inputs_that_are_always_zero() -> None:
    rows, seen = np.ones((4, 32)), np.zeros((32, 32))
    made = gptq.round_rows(rows, seen, 100, 4, 32)
    assert np.isfinite(made.values()).all()
    assert np.abs(made.values() - 1).max() < 0.1
