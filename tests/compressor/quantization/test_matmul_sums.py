"""Integer MatMuls with a bias stay integer, whether the model's shape is free or fixed."""

from __future__ import annotations

import numpy as np
import pytest

RNG = np.random.default_rng(4)


def array(*shape, scale=0.2):
    return (RNG.normal(0, 1, shape) * scale).astype(np.float32)


@pytest.mark.parametrize("batch", ["N", 4])
@pytest.mark.parametrize("bias", ["b", "row", "full"])
def test_a_matmul_of_fixed_shape_stays_integer(build, quantize, run, fused_operators, batch, bias):
    constants = {"w": array(16, 32), "b": array(32), "row": array(1, 32), "full": array(1, 8, 32)}
    nodes = [("MatMul", "x w", "m"), ("Add", f"m {bias}", "a"), ("Relu", "a", "y")]
    model = build(
        nodes, {"x": [batch, 8, 16]}, {"y": [batch, 8, 32]}, {"w": constants["w"], bias: constants[bias]}
    )
    x = array(4, 8, 16, scale=1.0)
    made = quantize(model, {"x": x})
    assert fused_operators(made)["MatMulIntegerToFloat"] == 1
    wanted, got = run(model, {"x": x})["y"], run(made, {"x": x})["y"]
    assert np.square(wanted).sum() > 1000 * np.square(wanted - got).sum()
    assert [output.name for output in made.graph.output] == ["y"]
