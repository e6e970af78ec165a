"""Which weights form a pair is a matter of the runtime that runs a file, not of the scheme that made it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from compressor import compress
from compressor.proof import _pair_safe
from compressor.quantization.portability import portable
from compressor.quantization.scheme import SCHEMES
from compressor.target import Target

ONNX, OPENVINO = "ort-x86-avx2", "openvino-x86-avx2"
# Three channels at two places, in the kernels' order; ONNX Runtime adds places 2 and 3, OpenVINO 3 and 4.
ACROSS = [0.1, 0.1, 1.0, 1.0, 0.1, 0.1]
INSIDE = [0.1, 0.1, 0.1, 1.0, 1.0, 0.1]
X = np.tile(np.linspace(0, 1, 8, dtype=np.float32), (32, 3, 5, 1)) + np.float32(0.01)
NETS = pytest.mark.parametrize(
    ("row", "safe", "unsafe"), [(ACROSS, OPENVINO, ONNX), (INSIDE, ONNX, OPENVINO)], ids=["across", "inside"]
)


def model_of(build, row):
    weight = np.asarray(row, np.float32).reshape(1, 1, 2, 3).transpose(0, 3, 1, 2)
    return build([("Conv", "x w", "y")], {"x": ["N", 3, 5, 8]}, {"y": None}, {"w": weight})


@pytest.fixture
def task(build, quantize, tmp_path: Path):
    """The task for a net that was quantized by one scheme, and whose pairs are those of another."""

    def call(row, made_by: str, kernels: str):
        model = model_of(build, row)
        onnx.save(quantize(model, {"x": X}, made_by), tmp_path / "q.onnx")
        onnx.save(model, tmp_path / "m.onnx")
        np.savez(tmp_path / "d.npz", x=X)
        spec = [{"name": "x", "shape": ["N", 3, 5, 8], "dtype": "float32"}]
        data = {
            "source": str(tmp_path / "d.npz"), "preprocess": None, "binding": {"x": "x"}, "indices": None,
            "batch": 8, "inputs": spec, "sha256": "",
        }  # fmt: skip
        facts = {"scheme": made_by, "weights": "minmax", "rounding": "nearest", "bias_correction": None}
        quantized = {"path": str(tmp_path / "q.onnx"), "facts": facts}
        return portable({"path": str(tmp_path / "m.onnx")}, quantized, data, str(tmp_path), kernels)

    return call


@NETS
def test_the_runtimes_kernels_decide_whichever_scheme_made_the_file(task, row, safe, unsafe):
    """The weights of each net are safe for the walk of the scheme that quantized it, and keep their 127."""
    told = task(row, safe, unsafe)
    assert (told["layers"], told["of"], told["proven"]) == (1, 1, False)
    assert (told["scheme"], told["without"]) == (safe, unsafe)
    assert told["measured"]["saturated_sqnr_db"] < told["measured"]["sqnr_db"] - 10
    assert told["measured"]["outputs"] > 0.1
    assert task(row, safe, safe)["proven"]
    assert task(row, unsafe, unsafe)["proven"]  # rounded so that its own walk is safe


def test_only_a_place_whose_kernels_saturate_has_a_pair_safe_scheme():
    found = {place: _pair_safe(Target.parse(f"int8:{place}")) for place in ("onnx:cpu", "openvino:cpu")}
    assert found == {"onnx:cpu": ONNX, "openvino:cpu": OPENVINO}
    assert _pair_safe(Target.parse("int8:onnx:cuda")) is None
    assert all(SCHEMES[str(name)].pair_limit for name in found.values())


def test_the_report_claims_nothing_for_the_other_runtimes_walk(build, tmp_path: Path):
    """From the request to the row of the report: a file by OpenVINO's scheme that ONNX Runtime runs."""
    onnx.save(model_of(build, ACROSS), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X)
    found = {}
    for scheme in (OPENVINO, ONNX):
        report = compress(
            tmp_path / "m.onnx", "int8:onnx", data=tmp_path / "d.npz", scheme=scheme, calib=16, bench=0,
            out=tmp_path / scheme,
        )  # fmt: skip
        found[scheme] = SimpleNamespace(**report.engines[1]["portable"])
    assert (found[OPENVINO].proven, found[OPENVINO].without) == (False, ONNX)
    assert found[ONNX].proven
