"""First convolutions with more input channels: the same sums, and which ones get them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor.model import Model
from compressor.quantization.layers import widens
from compressor.quantization.scheme import SCHEMES
from compressor.quantization.widen import widen
from exporters import onnx as exporter

RNG = np.random.default_rng(5)
AVX2, VNNI, OPENVINO = (SCHEMES[name] for name in ("ort-x86-avx2", "ort-x86-vnni", "openvino-x86-avx2"))
X = RNG.uniform(-1, 2, (2, 3, 9, 9)).astype(np.float32)
STEM = ("Conv", "x w b", "c", {"strides": [2, 2], "pads": [0, 0, 1, 1]})
HEAD = ("Conv", "c v", "y")


def weight(*shape):
    return RNG.uniform(0.5, 1, shape).astype(np.float32)


WEIGHTS = {"w": weight(16, 3, 3, 3), "b": weight(16), "v": weight(8, 16, 1, 1)}


@pytest.fixture
def stem(build):
    return build([STEM, HEAD], {"x": ["N", 3, 9, 9]}, {"y": None}, WEIGHTS)


def codes(model, name="w_quantized"):
    found = {item.name: item for item in model.graph.initializer}
    return numpy_helper.to_array(found[name]).astype(int)


@pytest.mark.parametrize("scheme", [AVX2, VNNI])
def test_the_sums_stay_the_same(stem, quantize, run, scheme):
    made = quantize(stem, {"x": X}, scheme.name)
    before, plain = codes(made), run(made, {"x": X}, fused=False)["y"]
    assert widen(made, scheme) == 1
    onnx.checker.check_model(made, full_check=True)
    assert codes(made).shape == (16, 4, 3, 3)
    assert (codes(made)[:, :3] == before).all()
    assert not codes(made)[:, 3].any()
    np.testing.assert_allclose(run(made, {"x": X}, fused=False)["y"], plain, rtol=1e-5, atol=1e-5)
    assert widen(made, scheme) == 0


def test_the_padding_stands_for_zero(stem, quantize, run):
    made = quantize(stem, {"x": X})
    widen(made, AVX2)
    (name,) = (node.output[0] for node in made.graph.node if node.op_type == "Pad")
    made.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, None))
    wide = run(made, {"x": X}, fused=False)[name]
    assert wide.shape == (2, 4, 9, 9)
    assert (wide[:, 3] == codes(made, "x_zero_point")).all()
    assert codes(made, "x_zero_point") > 0


def test_it_runs_in_integers(stem, quantize, fused_operators):
    made = quantize(stem, {"x": X})
    widen(made, AVX2)
    assert fused_operators(made) >= Counter({"QLinearConv": 2, "Pad": 1})


def test_pairs_are_those_of_the_wide_kernel(stem, quantize):
    """Two weights of one place are neighbours, the third one has none, so that it keeps its full range."""
    found = codes(quantize(stem, {"x": X}))
    assert np.abs(found[:, 0] + found[:, 1]).max() <= 128
    rows = found.transpose(0, 2, 3, 1).reshape(16, -1)
    assert np.abs(rows[:, 1:-1:2] + rows[:, 2::2]).max() > 128


@pytest.mark.parametrize(
    ("scheme", "dims", "groups", "wanted"),
    [
        (AVX2, (16, 3, 3, 3), 1, True),
        (VNNI, (32, 1, 3, 3), 1, True),
        (AVX2, (16, 4, 3, 3), 1, False),
        (AVX2, (12, 3, 3, 3), 1, False),
        (AVX2, (8, 3, 3, 3), 1, False),
        (AVX2, (64, 3, 7, 7), 1, False),
        (AVX2, (16, 3, 3), 1, False),
        (AVX2, (16, 1, 3, 3), 16, False),
        (OPENVINO, (16, 3, 3, 3), 1, False),
    ],
)
def test_where_it_pays(scheme, dims, groups, wanted):
    assert widens(scheme, dims, groups) is wanted


def test_others_are_left_alone(build, quantize, stem):
    """A convolution behind another, two readers of the input, a layer in float."""
    behind = [("Conv", "x e", "d"), ("Conv", "d w b", "c"), HEAD]
    shared = [STEM, HEAD, ("Conv", "x e", "z")]
    extra = {**WEIGHTS, "e": weight(3, 3, 1, 1)}
    for nodes, outputs in ((behind, {"y": None}), (shared, {"y": None, "z": None})):
        made = quantize(build(nodes, {"x": [2, 3, 9, 9]}, outputs, extra), {"x": X})
        rows = codes(made).transpose(0, 2, 3, 1).reshape(16, -1)
        assert np.abs(rows[:, :-1:2] + rows[:, 1::2]).max() <= 128  # pairs run on over three channels
        assert widen(made, AVX2) == 0
    first = next(node.name for node in stem.graph.node)
    assert widen(quantize(stem, {"x": X}, exclude=(first,)), AVX2) == 0


@pytest.mark.parametrize(("scheme", "channels"), [("ort-x86-avx2", 4), ("ort-arm", 3), (None, 3)])
def test_an_engine_is_widened_by_its_scheme(tmp_path, stem, quantize, scheme, channels):
    made = quantize(stem, {"x": X}, scheme or "ort-x86-avx2")
    onnx.save(made, tmp_path / "m.onnx")
    facts = {"scheme": scheme} if scheme else {}
    source = Model("onnx", tmp_path / "m.onnx", (), (), "", 0, "onnx", facts=facts)
    exporter.export(source.json(), "int8:onnx:cpu", str(tmp_path))
    assert codes(onnx.load(tmp_path / "model.onnx")).shape[1] == channels
