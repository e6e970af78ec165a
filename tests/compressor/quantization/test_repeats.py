"""Pairs that repeat others of their scale: which are taken out, and that the values stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from compressor.quantization.repeats import drop_repeats

RNG = np.random.default_rng(3)
X = {"x": RNG.normal(size=(2, 4, 6, 6)).astype(np.float32)}
WEIGHTS = {
    "u": RNG.normal(size=(4, 4, 3, 3)).astype(np.float32),
    "v": RNG.normal(size=(4, 4, 3, 3)).astype(np.float32),
    "w": RNG.normal(size=(8, 4, 1, 1)).astype(np.float32),
    "apart": np.array([0, 2, 4, 6, 6], np.int64),
    "together": np.array([0, 8, 6, 6], np.int64),
    "halves": np.array([4, 4], np.int64),
}
SHUFFLE = [
    ("Conv", "x u", "a", {"pads": [1] * 4}),
    ("Conv", "x v", "b", {"pads": [1] * 4}),
    ("Concat", "a b", "c", {"axis": 1}),
    ("Reshape", "c apart", "d"),
    ("Transpose", "d", "e", {"perm": [0, 2, 1, 3, 4]}),
    ("Reshape", "e together", "f"),
    ("Split", "f halves", "g h", {"axis": 1}),
    ("Conv", "g w", "y"),
    ("Conv", "h w", "z"),
]


@pytest.fixture
def shuffle(build):

    return build(SHUFFLE, {"x": ["N", 4, 6, 6]}, {"y": None, "z": None}, WEIGHTS)


def pairs(model: onnx.ModelProto) -> Counter[str]:
    """By what makes the values of each pair."""
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    found = [node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    return Counter(makers.get(name, "input") for name in found)


def test_a_shuffle_of_channels_is_free_of_pairs(shuffle, quantize, run):
    made = quantize(shuffle, X, "openvino-x86-avx2")
    before = run(made, X, fused=False)
    assert pairs(made) == {"input": 1, "Conv": 4, "Concat": 1, "Reshape": 2, "Transpose": 1, "Split": 2}
    assert drop_repeats(made) == 6
    onnx.checker.check_model(made, full_check=True)
    assert pairs(made) == {"input": 1, "Conv": 4}
    after = run(made, X, fused=False)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-6, atol=1e-6)
    assert drop_repeats(made) == 0


def test_pairs_of_another_scale_stay(shuffle, quantize):
    made = quantize(shuffle, X, "ort-x86-avx2")  # whose two parts have a scale each
    assert drop_repeats(made) == 5
    assert pairs(made) == {"input": 1, "Conv": 4, "Concat": 1}


def test_the_pair_of_an_output_stays(build, quantize):
    steps = [("Conv", "x w", "c"), ("Transpose", "c", "y", {"perm": [0, 2, 3, 1]}), ("Conv", "c v", "z")]
    weights = {"w": WEIGHTS["w"], "v": RNG.normal(size=(4, 8, 1, 1)).astype(np.float32)}
    made = quantize(build(steps, {"x": ["N", 4, 6, 6]}, {"y": None, "z": None}, weights), X)
    names = [item.name for item in made.graph.output]
    drop_repeats(made)
    assert [item.name for item in made.graph.output] == names
    onnx.checker.check_model(made, full_check=True)
