from __future__ import annotations

from pathlib import Path

import pytest

from serving.profile import profile


def test_kernels_add_up_to_a_call(net: Path, tmp_path: Path) -> None:
    data = {
        "source": str(net / "data.npz"), "preprocess": None, "binding": {"image": "x"}, "indices": None,
        "batch": 32, "n": 120, "sha256": "0",
        "inputs": [{"name": "image", "dtype": "float32", "shape": ["N", 3, 12, 12]}],
    }  # fmt: skip
    found = profile(str(net / "net.onnx"), "onnx", "cpu", 1, data, str(tmp_path))
    assert sum(kernel["op"] in ("Conv", "FusedConv") for kernel in found["kernels"]) == 2
    assert all(kernel["ms"] >= 0 for kernel in found["kernels"])
    assert 0 < found["ms"] < 50
    assert sum(kernel["ms"] for kernel in found["kernels"]) == pytest.approx(found["ms"], rel=0.9)
