"""Integers for constants: int8 weights, one scale per output channel, and int32 biases that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.corrections import RowQuantizer
from compressor.quantization.layers import Use
from compressor.quantization.pairs import quantize_rows, worst_pair
from compressor.quantization.scheme import Scheme

__all__ = ["QuantizedWeight", "activation_parameters", "quantize_bias", "quantize_weight"]

_BIAS_LIMIT = 2.0**30  # leaves half of int32 to the sum of products
_LEAST_SHARE = 2.0**-24  # of the tensor's largest scale: smaller channels are zero beside the others


@dataclass(frozen=True)
class QuantizedWeight:
    """int8 `codes` in the layout of the weight; `scale` [channels] for the axes `channels`, or a scalar."""

    codes: NDArray[np.int8]
    scale: NDArray[np.float32]
    channels: tuple[int, ...]

    def broadcast_scale(self) -> NDArray[np.float32]:
        """The scale in a shape that multiplies `codes`."""
        shape = [size if axis in self.channels else 1 for axis, size in enumerate(self.codes.shape)]
        return self.scale.reshape(shape if self.channels else [])


def quantize_weight(
    weight: NDArray[Any],
    uses: Sequence[Use],
    biases: Sequence[tuple[NDArray[Any], float]],
    scheme: Scheme,
    quantize: RowQuantizer = quantize_rows,
) -> QuantizedWeight:
    """Quantize one constant for all its uses; `quantize` turns rows into codes and scales.

    `biases` are the (bias [channels], input scale) of the integer layers among `uses`: a channel's scale is
    raised until its bias fits an int32 with scale (input scale x weight scale), and is never zero,
    denormal or not finite. Uses that disagree on the channel axes share one scale.
    """
    agreed = len({use.channels for use in uses}) == 1
    channels = uses[0].channels if agreed else ()
    floor = _floor(weight, channels, biases, scheme.least_scale)
    paired = [use for use in uses if use.paired]
    limit = scheme.pair_limit if paired else None
    order = (paired or uses)[0].order if agreed else tuple(range(weight.ndim))
    span = paired[0].span if agreed and paired else 0
    if not agreed and limit is not None:
        # no pair may exceed the limit in any reading; rounding adds at most one to a sum
        rows = [_spaced(_rows(weight, use.order, len(use.channels)), use.span) for use in paired]
        worst = max(worst_pair(part).max() for part in rows)
        floor, limit = np.maximum(floor, worst / (limit - 1)), None
    quantize = quantize if agreed else quantize_rows
    codes, scale = quantize(_spaced(_rows(weight, order, len(channels)), span), floor, limit)
    codes = codes.reshape(len(codes), -1, span + 1)[:, :, :span] if span % 2 else codes
    shape = [weight.shape[axis] for axis in order]
    codes = codes.reshape(shape).transpose(np.argsort(order))
    return QuantizedWeight(np.ascontiguousarray(codes), scale if channels else scale.reshape(()), channels)


def quantize_bias(bias: NDArray[Any], scale: NDArray[np.float32]) -> NDArray[np.int32]:
    """round(bias / scale) [channels]; `scale` is input scale x weight scale, which keeps it in int32."""
    return np.rint(bias.astype(np.float64) / scale.astype(np.float64)).astype(np.int32)


def activation_parameters(
    low: float, high: float, scheme: Scheme, bounds: tuple[float, float] = (-np.inf, np.inf)
) -> tuple[np.float32, int]:
    """Scale and zero point of an activation with values in [low, high], widened to include 0.

    `bounds` are those of a Relu or Clip in front: every code then stands for a value inside them, so that
    the runtime may drop the operator (with symmetric codes, it cannot). A range of zero width gets a scale
    of 1/255 (1/127 if symmetric).
    """
    least, most = scheme.codes
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    if scheme.symmetric:
        reach = max(-low, high)
        return np.float32(max(reach, scheme.least_scale * most) / most if reach > 0 else 1 / most), 0
    low, high = max(low, min(bounds[0], 0.0)), min(high, max(bounds[1], 0.0))
    width = high - low
    scale = max(width, scheme.least_scale * 255) / 255 if width > 0 else 1 / 255
    zero = int(np.clip(np.rint(least - low / scale), least, most))
    below, above = zero - least, most - zero
    if below and np.isfinite(bounds[0]):
        scale = min(scale, -bounds[0] / below)
    if above and np.isfinite(bounds[1]):
        scale = min(scale, bounds[1] / above)
    return np.float32(scale), zero


def _floor(
    weight: NDArray[Any],
    channels: tuple[int, ...],
    biases: Sequence[tuple[NDArray[Any], float]],
    least_scale: float,
) -> NDArray[np.float64]:
    """The least scale allowed, [channels] (one value if there are none)."""
    count = int(np.prod([weight.shape[axis] for axis in channels])) if channels else 1
    least = max(least_scale, float(np.abs(weight).max(initial=0.0)) / 127 * _LEAST_SHARE)
    floor = np.full(count, least)
    for bias, scale in biases:
        need = np.abs(bias.astype(np.float64)) / (scale * _BIAS_LIMIT)
        floor = np.maximum(floor, need if channels else need.max(initial=0.0))
    return floor


def _rows(weight: NDArray[Any], order: tuple[int, ...], channels: int) -> NDArray[Any]:
    moved = weight.transpose(order)
    return moved.reshape(int(np.prod(moved.shape[:channels])), -1)


def _spaced(rows: NDArray[Any], span: int) -> NDArray[Any]:
    """`rows` with a zero after every `span` weights if that is odd, as neighbour of the last one."""
    if span % 2 == 0:
        return rows
    spans = rows.reshape(len(rows), -1, span)
    return np.pad(spans, [(0, 0), (0, 0), (0, 1)]).reshape(len(rows), -1)
