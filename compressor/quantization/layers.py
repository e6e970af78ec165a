"""What the quantizer knows of single operators: where their weights lie, and why one must stay float."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.scheme import Scheme
from compressor.quantization.view import View, attribute

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = [
    "LAYERS",
    "Use",
    "clip_bounds",
    "float_reason",
    "storage_uses",
    "thin_reason",
    "weight_uses",
    "widens",
]

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "Einsum"}
_SUMS = {"ReduceSum", "ReduceL1", "ReduceSumSquare", "CumSum"}
_WORTH_STORING = 1024  # elements
_WIDEST = 9  # places of a window


@dataclass(frozen=True)
class Use:
    """One reading of a constant weight.

    Input `index` of the node with key `node` is the initializer `weight`, or its transpose. `channels`
    are the axes of the initializer that have a scale of their own, `order` all its axes, channels first,
    then those that are summed over in the kernel's order. `paired`: the kernel adds products in pairs,
    beginning a new one after every `span` weights (0: never).
    """

    node: str
    index: int
    weight: str
    channels: tuple[int, ...]
    order: tuple[int, ...]
    transposed: bool = False
    bias: str | None = None
    paired: bool = False
    span: int = 0


def weight_uses(view: View, scheme: Scheme) -> Iterator[Use]:
    """The weights of all layers that have an integer kernel."""
    for node in view.graph.node:
        if node.op_type not in scheme.compute or len(node.input) < 2:
            continue
        weight, transposed = _weight(view, node.input[1])
        if weight is None or 0 in view.initializers[weight].dims:
            continue
        rank = len(view.initializers[weight].dims)
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
        paired = scheme.pair_limit is not None
        if node.op_type == "Conv":
            groups = attribute(node, "group", 1)
            depthwise = view.initializers[weight].dims[0] == groups
            single = depthwise and view.initializers[weight].dims[1] == 1
            order = (0, *range(2, rank), 1)  # kernels run channels last
            restarts = (scheme.pairs_restart and groups == 1) or _widened(view, node, scheme)
            span = view.initializers[weight].dims[1] if restarts else 0
            paired = paired and not single
            yield Use(View.key(node), 1, weight, (0,), order, bias=bias, paired=paired, span=span)
        elif rank == 2:
            rows_are_channels = transposed != bool(attribute(node, "transB", 0))
            order = (0, 1) if rows_are_channels else (1, 0)
            yield Use(View.key(node), 1, weight, order[:1], order, transposed, bias, paired)


def widens(scheme: Scheme, dims: Sequence[int], groups: int) -> bool:
    """Whether a convolution of the model's input with a weight of these sizes is given more channels.

    As the kernels for `Scheme.channels` want it (see `widen`), and only where it pays.
    """
    outputs, inputs, *window = dims
    fits = groups == 1 and len(window) == 2 and outputs >= 16 and outputs % 8 == 0
    return fits and inputs % scheme.channels != 0 and window[0] * window[1] <= _WIDEST


def _widened(view: View, node: NodeProto, scheme: Scheme) -> bool:
    data, weight = node.input[:2]
    alone = view.only_reader(data) is node and view.only_reader(weight) is node
    first = data in {item.name for item in view.graph.input} and weight in view.initializers
    return alone and first and widens(scheme, view.initializers[weight].dims, attribute(node, "group", 1))


def storage_uses(view: View, scheme: Scheme) -> Iterator[Use]:
    """Large weights that float operators read; they can be stored as int8 at no cost in speed."""
    for node in view.graph.node:
        for index, channels in _stored_inputs(view, node) if node.op_type in scheme.stores else ():
            name = node.input[index]
            dims = view.initializers[name].dims
            if len(dims) >= 2 and np.prod(dims) >= _WORTH_STORING and view.is_float(name):
                rest = tuple(axis for axis in range(len(dims)) if axis not in channels)
                yield Use(View.key(node), index, name, channels, (*channels, *rest))


def _stored_inputs(view: View, node: NodeProto) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(input, channel axes) of a node's constant weights."""

    def constant(index: int) -> bool:
        return index < len(node.input) and node.input[index] in view.initializers

    if node.op_type in ("LSTM", "GRU", "RNN"):
        yield from ((index, (0, 1)) for index in (1, 2) if constant(index))
    elif node.op_type == "Conv" and constant(1):
        yield 1, (0,)
    elif node.op_type == "ConvTranspose" and constant(1):
        yield 1, (1,)
    elif node.op_type == "Gemm" and constant(1):
        yield 1, (0,) if attribute(node, "transB", 0) else (1,)
    elif node.op_type == "MatMul":
        if constant(1):
            rank = len(view.initializers[node.input[1]].dims)
            yield 1, (*range(rank - 2), rank - 1)
        elif constant(0):
            yield 0, tuple(range(len(view.initializers[node.input[0]].dims) - 1))
    elif node.op_type == "Gather" and constant(0) and attribute(node, "axis", 0) == 0:
        yield from [(0, (0,))] if len(view.initializers[node.input[0]].dims) == 2 else []


def _weight(view: View, name: str) -> tuple[str | None, bool]:
    """The initializer behind a weight input, and whether a Transpose stands between."""
    if name in view.initializers:
        return name, False
    maker = view.producers.get(name)
    if maker is None or maker.op_type != "Transpose" or maker.input[0] not in view.initializers:
        return None, False
    matrix = len(view.initializers[maker.input[0]].dims) == 2
    turned = list(attribute(maker, "perm", [1, 0])) == [1, 0]
    return (maker.input[0], True) if matrix and turned else (None, False)


def clip_bounds(view: View, node: NodeProto) -> tuple[float, float] | None:
    """The constant bounds of a Relu or Clip that allows 0, None for anything else."""
    if node.op_type == "Relu":
        return 0.0, float("inf")
    if node.op_type != "Clip":
        return None
    bounds = [-float("inf"), float("inf")]
    for index, name in enumerate(node.input[1:3]):
        if name:
            value = view.array(name)
            if value is None:
                return None
            bounds[index] = float(value.reshape(-1)[0])
    return (bounds[0], bounds[1]) if bounds[0] <= 0 <= bounds[1] else None


def float_reason(view: View, node: NodeProto, scheme: Scheme) -> str | None:
    """Why a node cannot run in integers, None if it can or if it never does."""
    if node.op_type in scheme.compute:
        return _layer_reason(view, node) or _thin_reason(view, node, scheme)
    if node.op_type in LAYERS:
        return f"the scheme {scheme.name} has no int8 kernel for {node.op_type}"
    if node.op_type in scheme.elementwise:
        return _elementwise_reason(view, node)
    if node.op_type in scheme.pass_through | scheme.on_integers:
        return _mover_reason(view, node)
    return None


def _layer_reason(view: View, node: NodeProto) -> str | None:
    data = node.input[0]
    if data in view.initializers:
        return "its weight is the left operand"
    if not view.is_float(data):
        return "its input is not known to be float32"
    weight, _ = _weight(view, node.input[1])
    if weight is None:
        return "both operands are computed at run time"
    if not view.is_float(weight):
        return "its weight is not float32"
    if 0 in view.initializers[weight].dims:
        return "its weight has no elements"
    rank = len(view.initializers[weight].dims)
    if node.op_type != "Conv" and rank != 2:
        return f"its weight has {rank} dimensions"
    if node.op_type == "Gemm" and (attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1):
        return "alpha and beta cannot be folded into its constants"
    if len(node.input) > 2 and node.input[2]:
        bias = view.array(node.input[2])
        if bias is None or bias.ndim != 1:
            return "its bias is not a constant row"
    if _sums_free_length(view, data):
        return "its input is a sum over a free length, whose range depends on the length"
    return None


def _thin_reason(view: View, node: NodeProto, scheme: Scheme) -> str | None:
    """Why a layer is too thin for int8 to pay."""
    weight = _weight(view, node.input[1])[0]
    if scheme.thin is None or weight is None:
        return None
    return thin_reason(node, view.initializers[weight].dims, scheme.thin)


def thin_reason(node: NodeProto, dims: Sequence[int], thin: tuple[int, int]) -> str | None:
    """Why int8 does not pay for a layer with a weight of these sizes, by `Scheme.thin`; None: it does."""
    least, multiple = thin
    first, second, *kernel = dims
    if min(first, second) >= least:
        return None
    if node.op_type != "Conv":
        return f"int8 does not pay for a matrix of {first} x {second}"
    if attribute(node, "group", 1) == 1:
        fits = (first % multiple == 0 or second % multiple == 0) and len(set(kernel)) == 1
        return None if fits else f"int8 does not pay for {second} channels in and {first} out"
    if first % multiple == 0 and min(kernel) >= 3:
        return None
    return f"int8 does not pay for {first} channels in groups and a window of {min(kernel)}"


def _elementwise_reason(view: View, node: NodeProto) -> str | None:
    if not all(view.is_float(name) for name in node.input):
        return "not all inputs are float32"
    if all(name in view.initializers for name in node.input):
        return "all inputs are constant"
    constants = [view.array(name) for name in node.input if name in view.initializers]
    if not all(np.isfinite(value).all() for value in constants if value is not None):
        return "a constant operand is not finite"
    if node.op_type in ("AveragePool", "GlobalAveragePool") and view.rank(node.input[0]) != 4:
        return "only pools of images have an int8 kernel"
    if node.op_type == "AveragePool" and any(size != 1 for size in attribute(node, "dilations", [])):
        return "pools with dilations have no int8 kernel"
    return None


def _mover_reason(view: View, node: NodeProto) -> str | None:
    if not node.input or not view.is_float(node.input[0]) or node.input[0] in view.initializers:
        return "it does not move a float32 activation"
    if node.op_type == "Resize" and attribute(node, "mode", "nearest") != "nearest":
        return "it interpolates"
    if node.op_type == "MaxPool" and len([name for name in node.output if name]) > 1:
        return "it gives indices"
    if node.op_type == "Pad" and len(node.input) > 2 and node.input[2]:
        value = view.array(node.input[2])
        if value is None or not np.isfinite(value).all():
            return "its value is not a finite constant"
    return None


def _sums_free_length(view: View, name: str) -> bool:
    """Whether a tensor is, up to moved axes, a sum over an axis of no fixed length."""
    node = view.producers.get(name)
    if node is None or not node.input:
        return False
    if node.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Relu"):
        return _sums_free_length(view, node.input[0])
    if node.op_type not in _SUMS:
        return False
    shape = view.types.get(node.input[0], (0, None))[1]
    axes = view.array(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    if shape is None:
        return True
    if axes is None:
        axes = np.asarray(attribute(node, "axes", range(len(shape))))
    return any(not isinstance(shape[int(axis)], int) for axis in axes.reshape(-1))
