from __future__ import annotations

from pathlib import Path

import pytest

from serving.profile import _fitted, _overhead, profile


def test_kernels_add_up_to_a_call(net: Path, tmp_path: Path) -> None:
    data = {
        "source": str(net / "data.npz"), "preprocess": None, "binding": {"image": "x"}, "indices": None,
        "batch": 32, "n": 120, "sha256": "0",
        "inputs": [{"name": "image", "dtype": "float32", "shape": ["N", 3, 12, 12]}],
    }  # fmt: skip
    engine = str(net / "net.onnx")
    found, again = profile([engine, engine], "onnx", "cpu", 1, data, str(tmp_path))
    assert sum(kernel["op"] in ("Conv", "FusedConv") for kernel in found["kernels"]) == 2
    assert all(kernel["ms"] >= 0 for kernel in found["kernels"])
    assert 0 < found["ms"] < 50
    assert sum(kernel["ms"] for kernel in found["kernels"]) <= found["ms"] * 1.001
    assert again["ms"] == pytest.approx(found["ms"], rel=0.5)  # the same engine by turns


def test_what_the_profiler_costs_is_the_same_for_all_and_leaves_no_time_below_nothing() -> None:
    assert _overhead([5.0, 5.0, 1.0], 8.0) == pytest.approx(1.0)
    assert _overhead([5.0, 5.0, 1.0], 6.0) == pytest.approx(2.0)
    assert _overhead([5.0, 1.0], 9.0) == pytest.approx(0.0)
    assert _overhead([], 9.0) == 0.0


def test_a_kernel_that_was_held_up_does_not_take_the_time_of_the_short_ones() -> None:
    times = _fitted([5.0, 0.11, 0.21, 0.31], 3.0)  # the first one takes 0.6 on a quiet machine
    assert sum(times) == pytest.approx(3.0)
    assert times[2] == pytest.approx(2 * times[1])
    assert times[1] > 0.05
    assert _fitted([0.02, 0.03], 0.04) == pytest.approx([0.015, 0.025])
    assert _fitted([0.02, 0.03], 0.09) == pytest.approx([0.02, 0.03])
    assert _fitted([0.0, 0.0], 0.0) == [0.0, 0.0]
