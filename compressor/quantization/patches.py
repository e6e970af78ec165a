"""The vectors that a layer multiplies its weight with: patches of a Conv's input, rows, states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.view import attribute

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["RECURRENT", "pads_of", "patches", "places_of", "rows_of", "states_of"]

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})

Array = NDArray[Any]
_STRIDE = 2654435761  # Knuth's multiplier: spreads the picks of successive samples


def rows_of(node: NodeProto, kernel: Sequence[int], value: Array, count: int, ordinal: int) -> Array:
    """At most `count` vectors [groups, n, k] of a Conv's, Gemm's, MatMul's or recurrent layer's `value`.

    `kernel` is the Conv's spatial size. k is in the kernel's order: channels last. Vectors are spread
    evenly; `ordinal` shifts them.
    """
    if node.op_type == "Conv":
        return patches(node, kernel, value, count, ordinal)
    matrix = value.T if node.op_type == "Gemm" and attribute(node, "transA", 0) else value
    matrix = matrix.reshape(-1, matrix.shape[-1])
    return np.asarray(matrix[_picks(len(matrix), count, ordinal)][None])


def patches(node: NodeProto, kernel: Sequence[int], value: Array, count: int, ordinal: int) -> Array:
    """At most `count` patches [groups, n, spatial x channels of a group] of `value` [batch, c, ...]."""
    rank = len(kernel)
    strides, dilations = (list(attribute(node, key, [1] * rank)) for key in ("strides", "dilations"))
    begin, end = pads_of(node, kernel, value.shape[2:])
    padded = np.pad(value, [(0, 0), (0, 0), *zip(begin, end, strict=True)])
    _, *sizes = places_of(node, kernel, value.shape)
    picked = np.unravel_index(_picks(len(value) * int(np.prod(sizes)), count, ordinal), (len(value), *sizes))
    offsets = np.indices(kernel).reshape(rank, -1)
    places = [
        picked[axis + 1][:, None] * strides[axis] + offsets[axis] * dilations[axis] for axis in range(rank)
    ]
    found = np.moveaxis(padded, 1, -1)[(picked[0][:, None], *places)]  # n, spatial, channels
    groups = int(attribute(node, "group", 1))
    n, spatial, channels = found.shape
    found = found.reshape(n, spatial, groups, channels // groups).transpose(2, 0, 1, 3)
    return np.asarray(found.reshape(groups, n, -1))


def states_of(node: NodeProto, value: Array, count: int, ordinal: int) -> Array:
    """At most `count` states [directions, n, hidden] that R of a recurrent layer meets; `value` is its Y.

    They are the outputs of the step before (of the step after, where a direction runs backwards), but for the
    first step, whose state is given. The last gate of a GRU meets them times another gate; that is left out.
    """
    steps = value.transpose(1, 2, 0, 3) if attribute(node, "layout", 0) else value
    reverse = attribute(node, "direction", "forward") == "reverse"
    backwards = [reverse, True][: steps.shape[1]]
    parts = [steps[1:, place] if back else steps[:-1, place] for place, back in enumerate(backwards)]
    rows = np.stack([part.reshape(-1, part.shape[-1]) for part in parts])
    return np.asarray(rows[:, _picks(rows.shape[1], count, ordinal)])


def places_of(node: NodeProto, kernel: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """How many vectors an input of `shape` has: batch and spatial axes of a Conv, rows of a matrix."""
    if node.op_type != "Conv":
        turned = node.op_type == "Gemm" and attribute(node, "transA", 0)
        return (shape[1],) if turned else tuple(shape[:-1])
    rank = len(kernel)
    strides, dilations = (list(attribute(node, key, [1] * rank)) for key in ("strides", "dilations"))
    begin, end = pads_of(node, kernel, shape[2:])
    sizes = [
        (before + size + after - dilation * (window - 1) - 1) // stride + 1
        for before, size, after, dilation, window, stride in zip(
            begin, shape[2:], end, dilations, kernel, strides, strict=True
        )
    ]
    return shape[0], *sizes


def pads_of(node: NodeProto, kernel: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Zeros before and after each spatial axis (ONNX Conv, `pads` and `auto_pad`)."""
    rank = len(kernel)
    mode = attribute(node, "auto_pad", "NOTSET")
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        pads = list(attribute(node, "pads", [0] * 2 * rank)) if mode == "NOTSET" else [0] * 2 * rank
        return pads[:rank], pads[rank:]
    strides, dilations = (list(attribute(node, key, [1] * rank)) for key in ("strides", "dilations"))
    total = [
        max(0, (-(-size // stride) - 1) * stride + dilation * (window - 1) + 1 - size)
        for size, stride, dilation, window in zip(sizes, strides, dilations, kernel, strict=True)
    ]
    less, more = [item // 2 for item in total], [item - item // 2 for item in total]
    return (less, more) if mode == "SAME_UPPER" else (more, less)


def _picks(size: int, count: int, ordinal: int) -> NDArray[np.intp]:
    """At most `count` of `size` places, evenly spread, shifted from sample to sample."""
    if size <= count:
        return np.arange(size)
    step = size / count
    start = ordinal * _STRIDE % 2**32 / 2**32
    return ((np.arange(count) + start) * step).astype(np.intp)
