"""Channels of an activation that can be divided by a factor: the layer before and those after absorb it.

What a layer makes is divided channel by channel, by dividing its weights, and what the layers after it read
is multiplied again, in theirs. Between them stand only operators that let a positive factor through; the
bound of a Clip (ReLU6) does not, and clipping at a bound of each channel's own, where the samples end, was
measured to cost far more than the evener ranges bring. Both equalization (`equalize`) and smoothing
(`smooth`) choose such factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.layers import clip_bounds
from compressor.quantization.view import View, attribute

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["Consumer", "Link", "apply", "links"]

Floats = NDArray[np.float64]
_TRANSPARENT = {"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Identity", "Dropout"}


@dataclass(frozen=True)
class Consumer:
    """A weight that meets a link's channels. `index` [in its shape] says with which channel each element.

    `free`: each of its output channels reads one channel only, so a factor costs no precision.
    """

    node: str
    weight: str
    index: NDArray[np.intp]
    free: bool


@dataclass(frozen=True)
class Link:
    """`producer` makes `channels` channels, `tensor` is what the consumers read of them, along `axis`.

    `constants` are the producer's initializers with the axis of the channels.
    """

    producer: str
    tensor: str
    axis: int
    channels: int
    constants: tuple[tuple[str, int], ...]
    consumers: tuple[Consumer, ...]


def links(model: ModelProto) -> list[Link]:
    """Where factors can be moved in a prepared model, in graph order."""
    view = View(model)
    found = [_link(view, node) for node in model.graph.node]
    return [link for link in found if link is not None]


def apply(model: ModelProto, link: Link, factors: Floats) -> None:
    """Divide the channels by `factors` [channels], all positive, and multiply the weights that read them."""
    for name, axis in link.constants:
        _replace(model, name, lambda value, axis=axis: value / _along(factors, axis, value.ndim))
    for consumer in link.consumers:
        _replace(model, consumer.weight, lambda value, consumer=consumer: value * factors[consumer.index])


def _link(view: View, node: NodeProto) -> Link | None:
    constants = _constants(view, node)
    if not constants:
        return None
    tensor = _through(view, View.key(node))
    readers = view.consumers.get(tensor, [])
    if not readers or tensor in view.outputs or tensor in view.captured:
        return None
    first = view.array(constants[0][0])
    assert first is not None
    channels = first.shape[constants[0][1]]
    last = node.op_type == "LayerNormalization" or node.op_type == "Gemm"
    consumers = [_consumer(view, reader, tensor, channels, last=last) for reader in readers]
    if any(consumer is None for consumer in consumers):
        return None
    return Link(
        View.key(node), tensor, -1 if last else 1, channels, tuple(constants),
        tuple(consumer for consumer in consumers if consumer),
    )  # fmt: skip


def _constants(view: View, node: NodeProto) -> list[tuple[str, int]]:
    """The initializers that hold a producer's channels, with their axis; none if it is not a producer."""
    axes = {
        "Conv": (1, 0),
        "Gemm": (1, 0 if attribute(node, "transB", 0) else 1),
        "LayerNormalization": (1, 0),
    }
    if node.op_type not in axes or len(node.input) < 2:
        return []
    if node.op_type == "LayerNormalization" and attribute(node, "axis", -1) != -1:
        return []
    index, axis = axes[node.op_type]
    names = [(node.input[index], axis)]
    if len(node.input) > 2 and node.input[2]:
        names.append((node.input[2], 0))
    rows = [view.array(name) for name, _ in names]
    own = all(len(view.consumers[name]) == 1 and name not in view.captured for name, _ in names)
    if not own or any(value is None for value in rows) or (len(rows) > 1 and rows[1].ndim != 1):  # type: ignore[union-attr]
        return []
    return names if rows[0] is not None and rows[0].ndim > axis else []


def _through(view: View, name: str) -> str:
    """Follow a tensor through operators that let factors pass."""
    while True:
        reader = view.only_reader(name)
        if reader is None or len([item for item in reader.output if item]) != 1:
            return name
        if reader.op_type not in _TRANSPARENT and not _keeps_sign(view, reader):
            return name
        name = View.key(reader)


def _keeps_sign(view: View, node: NodeProto) -> bool:
    """Whether a node is a Clip to all values above 0: a Relu."""
    return node.op_type == "Clip" and clip_bounds(view, node) == (0.0, float("inf"))


def _consumer(view: View, node: NodeProto, tensor: str, channels: int, *, last: bool) -> Consumer | None:
    """How a reader meets the channels; None if it could not absorb a factor."""
    weight = node.input[1] if len(node.input) > 1 else ""
    value = view.array(weight)
    if value is None or node.input[0] != tensor or tensor in list(node.input)[1:]:
        return None
    if len(view.consumers[weight]) > 1 or weight in view.captured:
        return None
    index = _index(node, value.shape, channels, last=last)
    if index is None:
        return None
    free = node.op_type == "Conv" and value.shape[1] == 1
    return Consumer(View.key(node), weight, index, free)


def _index(node: NodeProto, shape: Sequence[int], channels: int, *, last: bool) -> NDArray[np.intp] | None:
    """The channel that each element of a weight meets."""
    if node.op_type == "Conv" and not last:
        groups = int(attribute(node, "group", 1))
        if groups * shape[1] != channels:
            return None
        group = np.arange(shape[0]) // (shape[0] // groups)
        index = group[:, None] * shape[1] + np.arange(shape[1])
        return np.asarray(np.broadcast_to(index.reshape(*index.shape, *[1] * (len(shape) - 2)), shape))
    if node.op_type in ("Gemm", "MatMul") and last and len(shape) == 2:
        if node.op_type == "Gemm" and attribute(node, "transA", 0):
            return None
        axis = 1 if node.op_type == "Gemm" and attribute(node, "transB", 0) else 0
        return _along_axis(channels, axis, shape) if shape[axis] == channels else None
    return None


def _along_axis(channels: int, axis: int, shape: Sequence[int]) -> NDArray[np.intp]:
    index = np.arange(channels).reshape([-1 if place == axis else 1 for place in range(len(shape))])
    return np.asarray(np.broadcast_to(index, shape))


def _along(factors: Floats, axis: int, rank: int) -> Floats:
    return factors.reshape([-1 if place == axis else 1 for place in range(rank)])


def _replace(model: ModelProto, name: str, change: Any) -> None:
    from onnx import numpy_helper

    item = next(item for item in model.graph.initializer if item.name == name)
    value = change(numpy_helper.to_array(item).astype(np.float64)).astype(np.float32)
    item.CopyFrom(numpy_helper.from_array(value, name))
