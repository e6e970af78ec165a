"""Channels of an activation that can be divided by a factor: the layer before and those after absorb it.

What a layer makes is divided channel by channel, by dividing its weights, and what the layers after it read
is multiplied again, in theirs. Between them stand only operators that let a positive factor through; the
bound of a Clip (ReLU6) does not, and clipping at a bound of each channel's own, where the samples end, was
measured to cost far more than the evener ranges bring. Both equalization (`equalize`) and smoothing
(`smooth`) choose such factors.

What reads a link's tensor beside the layers (the residual stream behind a LayerNormalization), or makes it (a
GELU), may not know of factors. Where the tensor is computed in float anyway, a Mul before the layers then
divides it for them alone (`multiplied`); of 6 layers of a sentence encoder 22 such Muls took 1 % of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.layers import clip_bounds
from compressor.quantization.placement import place
from compressor.quantization.scheme import Scheme
from compressor.quantization.view import View, attribute, replace_nodes

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["Consumer", "Link", "apply", "links", "multiplied"]

Floats = NDArray[np.float64]
_POOLS = {"MaxPool", "AveragePool", "GlobalAveragePool"}
_TRANSPARENT = {"Relu", "LeakyRelu", "Identity", "Dropout"} | _POOLS


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

    `constants` are the producer's initializers with the axis of the channels; without any, factors are
    applied by a Mul that only the consumers read.
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


def multiplied(model: ModelProto, scheme: Scheme) -> list[Link]:
    """Where a Mul can divide channels for integer layers: float rows that a Gemm or MatMul quantizes.

    Tensors that a kernel writes as integers are left alone (a Mul would stand in their way), and so are
    those that `links` reaches.
    """
    view = View(model)
    placement = place(view, scheme)
    reached = {link.tensor for link in links(model)}
    found = (
        _multiplied(view, name, placement.integer)
        for name in placement.pairs
        if name not in placement.replaced | reached
    )
    return [link for link in found if link is not None]


def _multiplied(view: View, tensor: str, integer: set[str]) -> Link | None:
    readers = [node for node in view.consumers.get(tensor, []) if View.key(node) in integer]
    shape = view.types.get(tensor, (0, None))[1]
    weights = [view.array(node.input[1]) for node in readers if node.op_type in ("Gemm", "MatMul")]
    if not readers or len(weights) < len(readers) or weights[0] is None or (shape and len(shape) < 2):
        return None
    turned = readers[0].op_type == "Gemm" and attribute(readers[0], "transB", 0)
    channels = weights[0].shape[1 if turned else 0]
    consumers = [_consumer(view, node, tensor, channels, last=True) for node in readers]
    if any(consumer is None for consumer in consumers):
        return None
    known = tuple(consumer for consumer in consumers if consumer)
    return Link(View.key(readers[0]), tensor, -1, channels, (), known)


def apply(model: ModelProto, link: Link, factors: Floats) -> str:
    """Divide the channels by `factors` [channels], all positive, and multiply the weights that read them.

    Gives the name of the tensor that the consumers read now.
    """
    tensor = link.tensor if link.constants else _insert(model, link, factors)
    for name, axis in link.constants:
        _replace(model, name, lambda value, axis=axis: value / _along(factors, axis, value.ndim))
    for consumer in link.consumers:
        _replace(model, consumer.weight, lambda value, consumer=consumer: value * factors[consumer.index])
    return tensor


def _insert(model: ModelProto, link: Link, factors: Floats) -> str:
    """Let the consumers read the tensor through a Mul by the reciprocal of the factors."""
    from onnx import helper

    view = View(model)
    row = view.add(f"{link.tensor}_smoothing", (1 / factors).astype(np.float32))
    output = view.new_name(f"{link.tensor}_smoothed")
    keys = {consumer.node for consumer in link.consumers}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if View.key(node) in keys:
            if not any(output in made.output for made in nodes):
                nodes.append(helper.make_node("Mul", [link.tensor, row], [output], name=f"Mul_{output}"))
            node.input[0] = output
        nodes.append(node)
    replace_nodes(model, nodes)
    return output


def _link(view: View, node: NodeProto) -> Link | None:
    constants = _constants(view, node)
    if not constants:
        return None
    first = view.array(constants[0][0])
    assert first is not None
    channels = first.shape[constants[0][1]]
    last = node.op_type != "Conv"
    tensor = _through(view, View.key(node), last=last)
    tensor = _behind_attention(view, tensor, channels) if last else tensor
    readers = view.consumers.get(tensor, [])
    if not readers or tensor in view.outputs or tensor in view.captured:
        return None
    consumers = [_consumer(view, reader, tensor, channels, last=last) for reader in readers]
    if any(consumer is None for consumer in consumers):
        return None
    return Link(
        View.key(node), tensor, -1 if last else 1, channels, tuple(constants),
        tuple(consumer for consumer in consumers if consumer),
    )  # fmt: skip


def _constants(view: View, node: NodeProto) -> list[tuple[str, int]]:
    """The initializers that hold a producer's channels, with their axis; none if it is not a producer."""
    if node.op_type in ("Add", "Mul"):
        return _rows(view, node)
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
    ranks = [view.rank(name) if name in view.initializers else None for name, _ in names]
    if None in ranks or ranks[1:] not in ([], [1]) or not _own(view, [name for name, _ in names]):
        return []
    return names if (ranks[0] or 0) > axis else []


def _rows(view: View, node: NodeProto) -> list[tuple[str, int]]:
    """Constants of x * row, x * row + row (the end of a decomposed normalization) and x W + row."""
    row, source = _row_and_rest(view, node)
    if row is None:
        return []
    names = [(row, 0)]
    maker = view.producers.get(source) if node.op_type == "Add" else None
    if node.op_type == "Add":
        if maker is None or view.only_reader(source) is not node:
            return []
        inner = _row_and_rest(view, maker)[0] if maker.op_type == "Mul" else _matrix(view, maker)
        if inner is None:
            return []
        names.insert(0, (inner, 0 if maker.op_type == "Mul" else 1))
    width = {shape[axis] for name, axis in names for shape in [tuple(view.initializers[name].dims)]}
    return names if len(width) == 1 and _own(view, [name for name, _ in names]) else []


def _row_and_rest(view: View, node: NodeProto) -> tuple[str | None, str]:
    """The input that is a constant row of floats along the last axis, and the other one."""
    for row, rest in (node.input[:2], list(node.input[1::-1])):
        value = view.array(row)
        constant = value is not None and value.ndim == 1 and len(value) > 1 and view.is_float(row)
        if constant and rest not in view.initializers and (view.rank(rest) or 0) > 1:
            return row, rest
    return None, ""


def _matrix(view: View, node: NodeProto) -> str | None:
    """The constant matrix of a MatMul from the right."""
    value = view.array(node.input[1]) if node.op_type == "MatMul" else None
    return None if value is None or value.ndim != 2 else str(node.input[1])


def _own(view: View, names: Sequence[str]) -> bool:
    """Whether nothing else reads these initializers."""
    return all(len(view.consumers[name]) == 1 and name not in view.captured for name in names)


def _through(view: View, name: str, *, last: bool) -> str:
    """Follow a tensor through operators that let factors of axis 1, or of the last one, pass."""
    transparent = _TRANSPARENT - _POOLS if last else _TRANSPARENT
    while True:
        reader = view.only_reader(name)
        if reader is None or len([item for item in reader.output if item]) != 1:
            return name
        if reader.op_type not in transparent and not _keeps_sign(view, reader):
            return name
        name = View.key(reader)


def _behind_attention(view: View, name: str, channels: int) -> str:
    """The context that attention makes of values `name` [..., channels]: a mixture channel by channel.

    The values are split into heads, weighted over positions by a MatMul from the left, and put together
    again; `name` itself if anything else stands there.
    """
    way: list[NodeProto] = []
    for op in ("Reshape", "Transpose", "MatMul", "Transpose", "Reshape"):
        reader = view.only_reader(View.key(way[-1]) if way else name)
        if reader is None or reader.op_type != op:
            return name
        way.append(reader)
    split, first, product, second, merged = way
    sizes, whole = (view.types.get(View.key(node), (0, None))[1] or () for node in (split, merged))
    heads, width = sizes[2:] if len(sizes) == 4 else (0, 0)
    if not isinstance(heads, int) or not isinstance(width, int) or heads * width != channels:
        return name
    there, back = (list(attribute(node, "perm", [])) for node in (first, second))
    ordered = there[3:] == [3] and back[2:] == [there.index(2), 3]
    right = product.input[1] == View.key(first) != product.input[0]
    return View.key(merged) if ordered and right and whole[-1:] == (channels,) else name


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
