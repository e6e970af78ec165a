"""Channels in another order: the same function, and less that pairs lose."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from compressor.quantization.pairs import quantize_rows
from compressor.quantization.reorder import best_order, reorder
from compressor.quantization.scheme import SCHEMES

RNG = np.random.default_rng(6)
SCHEME = SCHEMES["ort-x86-avx2"]


def array(*shape, scale=0.2):
    return (RNG.standard_t(4, shape) * scale).astype(np.float32)


WEIGHTS = {
    "w1": array(16, 4, 3, 3), "b1": array(16), "wd": array(16, 1, 3, 3), "bd": array(16),
    "w2": array(8, 16, 1, 1), "w3": array(8, 8, 3, 3), "lo": np.float32(0), "hi": np.float32(6),
    "m1": array(8, 12), "m2": array(12, 5),
}  # fmt: skip
DEPTHWISE = {"group": 16, "pads": [1, 1, 1, 1]}
CHAIN = [("Conv", "x w1 b1", "a"), ("Clip", "a lo hi", "b"), ("Conv", "b wd bd", "c", DEPTHWISE)]
CHAIN += [("Relu", "c", "d"), ("Conv", "d w2", "y")]


@pytest.mark.parametrize(
    ("nodes", "outputs", "gain"),
    [
        (CHAIN, ("y",), 1),
        (CHAIN, ("y", "d"), 0),  # an output keeps its order
        ([*CHAIN[:-1], ("Add", "d b", "e"), ("Conv", "e w2", "y")], ("y",), 0),
        ([*CHAIN[:-1], ("Softmax", "d", "e", {"axis": 1}), ("Conv", "e w2", "y")], ("y",), 0),
        ([("Conv", "x w1", "a"), ("Conv", "a w2", "b"), ("Conv", "b w3", "y")], ("y",), 2),
        (
            [("Conv", "x w1", "a"), ("Conv", "a w2", "b"), ("GlobalAveragePool", "b", "p"),
             ("Flatten", "p", "f"), ("Gemm", "f m1", "g"), ("Relu", "g", "h"), ("Gemm", "h m2", "y")],
            ("y",), 2,
        ),
    ],
)  # fmt: skip
def test_the_function_stays_and_free_channels_are_reordered(build, prepared, run, nodes, outputs, gain):
    used = {name for _, names, *_ in nodes for name in names.split()}
    given = {name: value for name, value in WEIGHTS.items() if name in used}
    model = prepared(build(nodes, {"x": ["N", 4, 8, 8]}, dict.fromkeys(outputs), given))
    x = array(3, 4, 8, 8, scale=1.0)
    before = run(model, {"x": x})
    assert reorder(model, SCHEME) == gain
    onnx.checker.check_model(model)
    for name, value in run(model, {"x": x}).items():
        np.testing.assert_allclose(value, before[name], rtol=1e-4, atol=1e-4 * np.abs(before[name]).max())


def test_nothing_moves_without_a_limit(build, prepared):
    model = prepared(build(CHAIN, {"x": ["N", 4, 8, 8]}, {"y": None}, WEIGHTS))
    before = model.SerializeToString()
    assert reorder(model, SCHEMES["ort-x86-vnni"]) == 0
    assert model.SerializeToString() == before


def test_shared_weights_keep_their_order(build, prepared):
    nodes = [("Conv", "x w1", "a"), ("Conv", "a w2", "y"), ("Conv", "x w1", "z")]
    given = {name: WEIGHTS[name] for name in ("w1", "w2")}
    assert reorder(prepared(build(nodes, {"x": ["N", 4, 8, 8]}, {"y": None, "z": None}, given)), SCHEME) == 0


def test_a_loud_channel_gets_a_quiet_or_opposite_partner():
    rows = np.array([[[100.0, 90.0, -80.0, 3.0]], [[127.0, 120.0, -90.0, 2.0]]], np.float32)
    order = best_order(rows, 128)
    assert order is not None
    assert {frozenset(order[:2]), frozenset(order[2:])} in (
        {frozenset({0, 2}), frozenset({1, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )
    assert best_order(rows[:, :, [0, 2, 1, 3]], 128) is None


def test_rounding_loses_less_in_the_new_order():
    rows = array(32, 9, 32)
    order = best_order(rows, 128)
    errors = []
    for found in (rows, rows[:, :, order]):
        flat = found.reshape(32, -1)
        codes, scale = quantize_rows(flat, np.full(32, 1e-9), 128)
        errors.append(np.square(flat - codes * scale[:, None]).sum())
    assert errors[1] < 0.95 * errors[0]
