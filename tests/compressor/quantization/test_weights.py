"""Scales and integers of constants and activations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.quantization.corrections import Corrections
from compressor.quantization.layers import Use
from compressor.quantization.moments import Moments
from compressor.quantization.scheme import SCHEMES, for_machine, named
from compressor.quantization.weights import activation_parameters, quantize_bias, quantize_weight

AVX2, VNNI, ARM = (named(name) for name in ("ort-x86-avx2", "ort-x86-vnni", "ort-arm"))
CONV = Use("node", 1, "w", (0,), (0, 2, 3, 1), paired=True)
TINY = np.finfo(np.float32).tiny


def weight(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)


def restored(quantized):
    return quantized.codes * quantized.broadcast_scale()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_each_channel_is_within_half_a_step_or_a_moved_pair(scheme):
    value = weight(8, 6, 3, 3) * np.geomspace(0.01, 10, 8, dtype=np.float32)[:, None, None, None]
    quantized = quantize_weight(value, [CONV], [], scheme)
    assert quantized.scale.shape == (8,)
    error = np.square(restored(quantized) - value).sum((1, 2, 3)) / np.square(value).sum((1, 2, 3))
    assert (10 * np.log10(1 / error) > 37).all()


def test_plain_scale_is_absmax_over_127_without_pairs():
    value = weight(4, 3, 3, 3)
    quantized = quantize_weight(value, [CONV], [], VNNI)
    np.testing.assert_allclose(quantized.scale, np.abs(value).max((1, 2, 3)) / 127, rtol=1e-6)
    assert np.abs(quantized.codes).max((1, 2, 3)).tolist() == [127] * 4


def test_scales_of_transposed_conv_lie_on_axis_1():
    value = weight(8, 6, 3, 3) * np.geomspace(0.01, 1, 6, dtype=np.float32)[:, None, None]
    quantized = quantize_weight(value, [Use("n", 1, "w", (1,), (1, 0, 2, 3))], [], AVX2)
    assert quantized.broadcast_scale().shape == (1, 6, 1, 1)
    np.testing.assert_allclose(restored(quantized), value, atol=np.abs(value).max() / 200)


def test_two_channel_axes_have_a_scale_for_each_pair():
    value = weight(2, 12, 5)
    quantized = quantize_weight(value, [Use("n", 1, "w", (0, 1), (0, 1, 2))], [], AVX2)
    assert quantized.scale.shape == (24,)
    np.testing.assert_allclose(restored(quantized), value, atol=0.51 * np.abs(value).max() / 127)


def test_uses_that_disagree_on_the_channels_share_one_scale_without_bad_pairs():
    value = weight(30, 20)
    uses = [Use("a", 1, "w", (0,), (0, 1), paired=True), Use("b", 1, "w", (1,), (1, 0), paired=True)]
    quantized = quantize_weight(value, uses, [], AVX2)
    assert quantized.scale.shape == ()
    for rows in (quantized.codes.astype(int), quantized.codes.T.astype(int)):
        first, second = rows[:, 0::2], rows[:, 1::2]
        assert (np.abs(first) + np.abs(second))[first * second > 0].max() <= AVX2.pair_limit
    np.testing.assert_allclose(restored(quantized), value, atol=quantized.scale / 2)


@pytest.mark.parametrize("scheme", [AVX2, VNNI], ids=str)
def test_degenerate_channels_get_normal_scales(scheme):
    value = weight(4, 3, 3, 3)
    value[1], value[2] = 0, 1e-39
    scale = quantize_weight(value, [CONV], [], scheme).scale
    assert np.isfinite(scale).all()
    assert (scale >= TINY).all()
    nothing = quantize_weight(np.zeros_like(value), [CONV], [], scheme)
    assert not nothing.codes.any()
    assert (nothing.scale * 1e-18 >= TINY).all()


@settings(deadline=None, max_examples=60)
@given(
    size=st.floats(-12, 2), bias=st.floats(-6, 6), scale=st.floats(-9, 1), seed=st.integers(0, 1000)
)  # fmt: skip
def test_bias_always_fits_int32_and_comes_back(size, bias, scale, seed):
    value = weight(4, 3, 3, 3, seed=seed) * np.float32(10.0**size)
    biases = np.random.default_rng(seed).normal(0, 10.0**bias, 4).astype(np.float32)
    step = np.float32(10.0**scale)
    quantized = quantize_weight(value, [CONV], [(biases, float(step))], AVX2)
    product = step * quantized.scale
    codes = quantize_bias(biases, product)
    assert np.abs(codes.astype(np.float64)).max() <= 2**30 * 1.001
    np.testing.assert_allclose(codes * product.astype(np.float64), biases, atol=float(product.max()))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
@given(low=st.floats(-1e6, 1e6), width=st.floats(0, 1e6))
@settings(deadline=None, max_examples=60)
def test_range_holds_zero_exactly_and_its_ends_within_a_step(scheme, low, width):
    scale, zero = activation_parameters(low, low + width, scheme)
    least, most = scheme.codes
    assert least <= zero <= most
    assert TINY <= scale < np.inf
    bottom, top = (least - zero) * float(scale), (most - zero) * float(scale)
    slack = 0.51 * float(scale) + 1e-6 * (abs(low) + width)
    assert bottom <= min(low, 0) + slack
    assert top >= max(low + width, 0) - slack


@given(low=st.floats(-8, 0), high=st.floats(0.001, 8))
def test_codes_behind_a_clip_stay_inside_its_bounds(low, high):
    scale, zero = activation_parameters(low, high, AVX2, (low, high))
    assert -zero * float(scale) >= low * (1 + 1e-6)
    assert (255 - zero) * float(scale) <= high * (1 + 1e-6)


def test_constant_tensor_gets_a_scale():
    assert activation_parameters(0.0, 0.0, AVX2) == (np.float32(1 / 255), 0)
    assert activation_parameters(-1e-42, 0.0, AVX2)[0] >= TINY


def test_scheme_follows_the_instruction_set():
    assert for_machine("onnx", "cpu", {"avx2", "fma"}) == "ort-x86-avx2"
    assert for_machine("onnx", "cpu", {"avx2", "avx512_vnni"}) == "ort-x86-vnni"
    assert for_machine("onnx", "cpu", {"avx2", "avx_vnni"}) == "ort-x86-vnni"
    assert for_machine("onnx", "cpu", {"asimd", "fp"}) == "ort-arm"


def test_gptq_rounds_layers_whose_kernel_begins_pairs_anew():
    """OpenVINO on x86 without VNNI: three channels in, a new pair at each of nine places."""
    scheme, generator = named("openvino-x86-avx2"), np.random.default_rng(2)
    use = Use("node", 1, "w", (0,), (0, 2, 3, 1), paired=True, span=3)
    value, seen = weight(8, 3, 3, 3), Moments.empty(1, 27, 4608, 6)
    seen.add((generator.normal(0, 1, (1, 600, 27)) @ generator.normal(0, 1, (27, 27))).astype(np.float32))
    seen.flush()
    losses = []
    for rounding in ("nearest", "gptq"):
        chosen = Corrections(rounding=rounding, moments={"node": seen})
        made = quantize_weight(value, [use], [], scheme, chosen.quantizer([use]))
        rows = made.codes.transpose(0, 2, 3, 1).astype(int)
        assert np.abs(rows[..., 0] + rows[..., 1]).max() <= scheme.pair_limit
        error = (value - restored(made)).transpose(0, 2, 3, 1).reshape(8, 27)
        losses.append(((error @ seen.second()[0][0]) * error).sum())
    assert losses[1] < 0.8 * losses[0]
