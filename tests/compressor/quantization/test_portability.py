"""Files of both kinds on the other kind of processor: proven, or computed and held against the kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest

from compressor.errors import DataError
from compressor.quantization.corrections import Corrections
from compressor.quantization.moments import Moments
from compressor.quantization.portability import pair_cost, portability, simulate
from compressor.quantization.scheme import SCHEMES
from compressor.quantization.widen import widen

RNG = np.random.default_rng(11)
AVX2, VNNI = SCHEMES["ort-x86-avx2"], SCHEMES["ort-x86-vnni"]
SAME = {"pads": [1, 1, 1, 1]}


def array(*shape, scale=0.2):
    return (RNG.normal(0, 1, shape) * scale).astype(np.float32)


X = np.abs(array(6, 3, 12, 12, scale=1.0))
WEIGHTS = {
    "w1": array(16, 3, 3, 3), "b1": array(16), "wd": array(16, 1, 3, 3), "w2": array(16, 16, 3, 3),
    "w3": array(12, 8, 3, 3), "wm": array(12, 10, scale=1.0), "wg": array(5, 10, scale=1.0), "bg": array(5),
}  # fmt: skip
NODES = [
    ("Conv", "x w1 b1", "c1", {"strides": [2, 2], "pads": [0, 0, 1, 1]}),
    ("Relu", "c1", "r1"),
    ("Conv", "r1 wd", "cd", {"group": 16, **SAME}),
    ("Conv", "cd w2", "c2", {"dilations": [2, 2], "pads": [2, 2, 2, 2]}),
    ("Add", "c2 r1", "a"),
    ("Conv", "a w3", "c3", {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("GlobalAveragePool", "c3", "p"),
    ("Flatten", "p", "f"),
    ("MatMul", "f wm", "m"),
    ("Gemm", "m wg bg", "y", {"transB": 1}),
]
ENGINE = """
import json, sys
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level, options.intra_op_num_threads = 4, 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print(json.dumps(session.run(None, {"x": np.load(sys.argv[2])})[0].tolist()))
"""


@pytest.fixture
def case(build, prepared, quantize):
    """The float graph and its quantized form for a scheme."""

    def make(scheme):
        model = build(NODES, {"x": ["N", 3, 12, 12]}, {"y": None}, WEIGHTS)
        return prepared(model), quantize(model, {"x": X}, scheme.name)

    return make


def batches():
    yield range(len(X)), {"x": X}


def test_what_is_computed_is_what_the_kernels_lose(case, run, without_vnni, tmp_path):
    reference, made = case(VNNI)
    found = portability(reference, made, AVX2)
    assert found == {"layers": 5, "of": 6, "proven": False}  # all but the depthwise one
    told = simulate(reference, made, batches(), tmp_path, AVX2, 6)
    assert not list(tmp_path.glob("saturated-*"))
    assert widen(made, VNNI) == 1
    onnx.save(made, tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "m.onnx"), str(tmp_path / "x.npy")]
    done = subprocess.run(command, env=without_vnni, check=True, capture_output=True, text=True)
    wanted, got = run(reference, {"x": X})["y"], np.array(json.loads(done.stdout.splitlines()[-1]))
    measured = 10 * np.log10(np.square(wanted).sum() / np.square(wanted - got).sum())
    assert told["saturated_sqnr_db"] == pytest.approx(measured, abs=0.3)
    assert told["sqnr_db"] > told["saturated_sqnr_db"] + 3
    assert told["samples"] == 6
    assert 0 < told["outputs"] < 1
    assert told["saturated_top1"] == (wanted.argmax(1) == got.argmax(1)).mean()


def test_a_pair_safe_file_is_proven(case):
    assert portability(*case(AVX2), AVX2) == {"layers": 0, "of": 6, "proven": True}


def test_a_layer_that_could_not_be_checked_is_not_proven(case):
    reference, made = case(AVX2)
    made.graph.node[[node.op_type for node in made.graph.node].index("Gemm")].name = "another"
    assert not portability(reference, made, AVX2)["proven"]


def test_the_limit_costs_what_rounding_without_it_would_save(case):
    reference, made = case(AVX2)
    cost = pair_cost(reference, made, AVX2, Corrections())
    assert 0 < cost["cost_db"] < cost["worst_db"] < 6
    free = pair_cost(*case(VNNI), AVX2, Corrections())
    assert free["worst_db"] == pytest.approx(0, abs=1e-3)


def test_the_cost_is_weighted_by_what_the_layer_reads(build, prepared, quantize):
    """One channel with two inputs: an error of the weight that always meets 0 costs nothing."""
    weight = np.array([[1.0, 0.6]], np.float32)
    model = build([("Gemm", "x w", "y", {"transB": 1})], {"x": ["N", 2]}, {"y": None}, {"w": weight})
    made = quantize(model, {"x": np.abs(array(4, 2, scale=1.0))}, AVX2.name)
    seen = Moments.empty(1, 2, 8)
    seen.add(np.array([[[1.0, 0.0]] * 4], np.float32))
    seen.flush()
    weighted = pair_cost(prepared(model), made, AVX2, Corrections(moments={"y": seen}))
    assert weighted != pair_cost(prepared(model), made, AVX2, Corrections())


def test_a_usable_sample_is_wanted(case, tmp_path):
    bad = ((range(1), {"x": X[:1] * np.nan}) for _ in range(1))
    with pytest.raises(DataError, match="no sample is free of NaN"):
        simulate(*case(VNNI), bad, tmp_path, AVX2, 6)
