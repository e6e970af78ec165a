"""GPTQ-style rounding under the pair constraint."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.quantization.rounding import round_rows


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e12])
def test_rounding_does_not_depend_on_the_size_of_the_inputs(size: float) -> None:
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(40, 16)) @ rng.normal(size=(16, 16))
    inputs[:, 5] = inputs[:, 4]  # as dependent as can be
    second = (inputs.T @ inputs / 40)[None]
    real = rng.uniform(-100, 100, (4, 16))
    assert np.array_equal(round_rows(real, [second * size], 128), round_rows(real, [second], 128))


def test_inputs_that_are_always_zero_are_rounded_to_nearest() -> None:
    real = np.array([[1.4, -2.6, 3.2, 0.5]])
    assert round_rows(real, [np.zeros((1, 4, 4))], None).tolist() == [[1, -3, 3, 0]]


def test_a_covariance_that_is_not_definite_is_damped_until_it_is() -> None:
    second = np.diag([1.0, 1.0, 1.0, -0.5])[None]
    assert round_rows(np.array([[1.2, 2.8, -3.1, 4.4]]), [second], None).tolist() == [[1, 3, -3, 4]]
