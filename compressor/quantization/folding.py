"""Rewrites that fold constant work into the layer beside it, each of them exact in real arithmetic.

A mean over an image becomes a pool; sizes and pads for some axes become those for all. Batch normalization
and channel-wise Mul/Add/Sub/Div go into the Conv, ConvTranspose or Gemm before them, zero padding into the
Conv after it, alpha and beta into a Gemm's constants, and MatMul + bias on matrices becomes Gemm. A float
runtime does these itself; with quantization pairs in between it no longer can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.constants import drop_unused_initializers
from compressor.quantization.view import View, attribute

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["fold"]

Array = NDArray[np.float64]
_AFFINE = {"BatchNormalization", "Mul", "Add", "Sub", "Div"}
_LAYERS = {"Conv", "ConvTranspose", "Gemm"}


def fold(model: ModelProto) -> None:
    """Apply all rewrites, each as often as it fits."""
    for rewrite in (
        _drop_identity,
        _sum_to_add,
        _mean_to_pool,
        _pad_every_axis,
        _resize_every_axis,
        _pad_into_conv,
        _matmul_to_gemm,
        _gemm_constants,
        _affine_into_layer,
    ):
        view = View(model)
        for node in list(model.graph.node):
            rewrite(view, node)
        view.commit()
    drop_unused_initializers(model)


def _drop_identity(view: View, node: NodeProto) -> None:
    """Identity, and Dropout outside training, where only its first output is read and not handed out."""
    source, target = node.input[0] if node.input else "", node.output[0] if node.output else ""
    if node.op_type == "Dropout":
        training = node.input[2] if len(node.input) > 2 else ""
        mask = node.output[1] if len(node.output) > 1 else ""
        if (training and view.array(training) is None) or mask in view.outputs | set(view.consumers):
            return
        if training and np.any(view.array(training)):
            return
    elif node.op_type != "Identity":
        return
    if target in view.outputs or target in view.captured:
        return
    view.remove(node)
    view.redirect(target, source)


def _sum_to_add(view: View, node: NodeProto) -> None:
    """A Sum of two is an Add, which has an integer kernel."""
    if node.op_type == "Sum" and len(node.input) == 2:
        node.op_type = "Add"


def _mean_to_pool(view: View, node: NodeProto) -> None:
    """The mean over both axes of an image is a GlobalAveragePool, and a Flatten if it drops them."""
    if node.op_type != "ReduceMean" or view.rank(node.input[0]) != 4:
        return
    given = view.array(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    axes = attribute(node, "axes", []) if given is None else given.reshape(-1).tolist()
    if sorted(axis % 4 for axis in axes) != [2, 3]:
        return
    keeps = attribute(node, "keepdims", 1)
    _drop_inputs(view, node, 1)
    for name in ("axes", "keepdims", "noop_with_empty_axes"):
        _set_attribute(node, name, None)
    node.op_type = "GlobalAveragePool"
    if not keeps:
        output = node.output[0]
        view.set_output(node, view.new_name(f"{output}_pooled"))
        view.insert_after(node, "Flatten", output)


def _pad_every_axis(view: View, node: NodeProto) -> None:
    """Pads for some axes become pads for all of them.

    onnxruntime's layout optimizer, which int8 convolutions call up, takes them for pads of all axes.
    """
    rank = view.rank(node.input[0]) if node.op_type == "Pad" and len(node.input) > 3 else None
    pads = view.array(node.input[1]) if rank else None
    axes = view.array(node.input[3]) if rank else None
    if rank is None or pads is None or axes is None:
        return
    full = np.zeros((2, rank), np.int64)
    full[:, axes] = pads.reshape(2, -1)
    view.set_input(node, 1, view.add(f"{node.input[1]}_of_all", full.reshape(-1)))
    _drop_inputs(view, node, 3)


def _resize_every_axis(view: View, node: NodeProto) -> None:
    """Sizes or scales for some axes become those for all of them, for the reason that pads do."""
    axes = attribute(node, "axes") if node.op_type == "Resize" else None
    rank = None if axes is None else view.rank(node.input[0])
    stretched = attribute(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
    if rank is None or not stretched or node.input[1]:
        return
    places = np.asarray(axes, np.int64) % rank
    if len(node.input) > 3 and node.input[3]:
        view.set_input(node, 3, _all_sizes(view, node, places))
    else:
        scales = view.array(node.input[2])
        if scales is None:
            return
        full = np.ones(rank, np.float32)
        full[places] = scales
        view.set_input(node, 2, view.add(f"{node.input[2]}_of_all", full))
    _set_attribute(node, "axes", None)


def _all_sizes(view: View, node: NodeProto, places: NDArray[np.int64]) -> str:
    """The name of the output's sizes, of which input 3 gives those of the axes `places`."""
    data, name = node.input[0], f"{node.input[3]}_of_all"
    shape, sizes = view.types[data][1] or (), view.array(node.input[3])
    rest = [size for axis, size in enumerate(shape) if axis not in places]
    if sizes is not None and all(isinstance(size, int) for size in rest):
        full = np.array([size if isinstance(size, int) else 0 for size in shape], np.int64)
        full[places] = sizes
        return view.add(name, full)
    whole = view.insert(node, "Shape", [data], f"{data}_shape")
    axes = view.add(f"{node.input[3]}_axes", places)
    return view.insert(node, "ScatterElements", [whole, axes, node.input[3]], name, axis=0)


def _drop_inputs(view: View, node: NodeProto, start: int) -> None:
    """Take away the inputs from number `start` on."""
    for name in filter(None, node.input[start:]):
        view.consumers[name].remove(node)
    del node.input[start:]


def _pad_into_conv(view: View, node: NodeProto) -> None:
    """Constant zero padding of the spatial axes becomes the Conv's own."""
    conv = view.only_reader(node.output[0]) if node.op_type == "Pad" else None
    if conv is None or conv.op_type != "Conv" or conv.input[0] != node.output[0]:
        return
    pads = _spatial_pads(view, node)
    own = list(attribute(conv, "pads", [0] * len(pads)))
    if not pads or len(own) != len(pads) or attribute(conv, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return
    _set_attribute(conv, "auto_pad", None)
    _set_attribute(conv, "pads", [a + b for a, b in zip(own, pads, strict=True)])
    view.remove(node)
    view.set_input(conv, 0, node.input[0])


def _spatial_pads(view: View, node: NodeProto) -> list[int]:
    """The pads of a Pad node over its spatial axes as Conv writes them; [] if it pads otherwise."""
    pads = view.array(node.input[1]) if len(node.input) > 1 else None
    value = view.array(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
    plain = attribute(node, "mode", "constant") == "constant" and len(node.input) < 4
    if pads is None or value is None or not plain or value.any() or (pads < 0).any() or len(pads) < 6:
        return []
    rank = len(pads) // 2
    if pads[[0, 1, rank, rank + 1]].any():
        return []
    return [int(size) for size in (*pads[2:rank], *pads[rank + 2 :])]


def _matmul_to_gemm(view: View, node: NodeProto) -> None:
    """MatMul of a matrix with a constant matrix, then + bias: one Gemm."""
    add = view.only_reader(node.output[0]) if node.op_type == "MatMul" else None
    if add is None or add.op_type != "Add" or view.rank(node.input[0]) != 2:
        return
    weight = view.array(node.input[1])
    other = next(name for name in (*add.input, "") if name != node.output[0])
    bias = view.array(other)
    if weight is None or weight.ndim != 2 or bias is None or not view.is_float(other):
        return
    if bias.size != weight.shape[1] or bias.shape[-1:] != weight.shape[1:] or bias.ndim > 2:
        return
    view.remove(add)
    node.op_type = "Gemm"
    view.set_input(node, 2, view.add(f"{other}_row", bias.reshape(-1)) if bias.ndim > 1 else other)
    view.set_output(node, add.output[0])


def _gemm_constants(view: View, node: NodeProto) -> None:
    """alpha goes into a constant matrix of its own, beta into the bias, which becomes a row of N."""
    if node.op_type != "Gemm":
        return
    alpha, beta = attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)
    weight = view.array(node.input[1])
    if weight is None or (alpha != 1 and view.only_reader(node.input[1]) is None):
        return
    columns = weight.shape[0 if attribute(node, "transB", 0) else 1]
    if len(node.input) > 2 and node.input[2]:
        bias = view.array(node.input[2])
        if bias is None or bias.size not in (1, columns) or (bias.ndim == 2 and bias.shape[0] != 1):
            return
        if beta != 1 or bias.shape != (columns,):
            row = np.broadcast_to(bias.reshape(-1) * np.float32(beta), (columns,)).astype(bias.dtype)
            view.set_input(node, 2, view.add(f"{node.input[2]}_row", row))
    if alpha != 1:
        scaled = (weight * np.float32(alpha)).astype(weight.dtype)
        view.set_input(node, 1, view.add(f"{node.input[1]}_scaled", scaled))
    _set_attribute(node, "alpha", None)
    _set_attribute(node, "beta", None)


def _affine_into_layer(view: View, node: NodeProto) -> None:
    """y = a x + b per output channel goes into the layer that makes x, if only it is read from there."""
    source = next((name for name in node.input if name in view.producers), "")
    layer = view.producers.get(source)
    if node.op_type not in _AFFINE or layer is None or layer.op_type not in _LAYERS:
        return
    weight = view.array(layer.input[1])
    bias = view.array(layer.input[2]) if len(layer.input) > 2 and layer.input[2] else np.zeros(1)
    if (
        view.only_reader(source) is None
        or weight is None
        or bias is None
        or not view.is_float(layer.input[1])
    ):
        return
    channels = _channels(layer, weight)
    affine = _affine(view, node, source, channels, weight.ndim)
    if affine is None or (layer.op_type == "Gemm" and not _plain(layer)):
        return
    gain, shift = affine
    _scale_weight(view, layer, weight, gain)
    moved = (np.broadcast_to(bias, (channels,)) * gain + shift).astype(np.float32)
    name = layer.input[2] if len(layer.input) > 2 and layer.input[2] else f"{layer.input[1]}_bias"
    view.set_input(layer, 2, view.add(f"{name}_folded", moved))
    output = str(node.output[0])
    view.remove(node)
    view.set_output(layer, output)


def _channels(layer: NodeProto, weight: NDArray[Any]) -> int:
    if layer.op_type == "ConvTranspose":
        return int(weight.shape[1]) * int(attribute(layer, "group", 1))
    return int(weight.shape[1 if layer.op_type == "Gemm" and not attribute(layer, "transB", 0) else 0])


def _plain(gemm: NodeProto) -> bool:
    return bool(attribute(gemm, "alpha", 1.0) == 1 and attribute(gemm, "beta", 1.0) == 1)


def _affine(view: View, node: NodeProto, source: str, channels: int, rank: int) -> tuple[Array, Array] | None:
    """(gain, shift) per channel, float64 [channels]; None if the node is not of that form."""
    if node.op_type == "BatchNormalization":
        return _normalization(view, node)
    other = next((name for name in node.input if name != source), "")
    value = view.array(other)
    if value is None or not view.is_float(other):
        return None
    shape = (1,) * (rank - value.ndim) + value.shape
    axis = 1 if rank > 2 else rank - 1
    if len(shape) != rank or value.size not in (1, channels) or (value.size > 1 and shape[axis] != channels):
        return None
    row = np.broadcast_to(value.reshape(-1).astype(np.float64), (channels,))
    if node.op_type in ("Sub", "Div") and node.input[0] != source:
        return None
    if node.op_type == "Div" and not row.all():
        return None
    one, zero = np.ones(channels), np.zeros(channels)
    if node.op_type in ("Mul", "Div"):
        return (row if node.op_type == "Mul" else 1 / row), zero
    return one, (row if node.op_type == "Add" else -row)


def _normalization(view: View, node: NodeProto) -> tuple[Array, Array] | None:
    found = [view.array(name) for name in node.input[1:5]]
    values = [value.astype(np.float64) for value in found if value is not None]
    if len(values) < 4 or attribute(node, "training_mode", 0):
        return None
    scale, offset, mean, variance = values
    gain = scale / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
    return gain, offset - mean * gain


def _scale_weight(view: View, layer: NodeProto, weight: NDArray[Any], gain: Array) -> None:
    """Multiply the weight's output channels by `gain`; a weight that others read too is copied."""
    if (gain == 1).all():
        return
    if layer.op_type == "ConvTranspose":  # [in, out / group, ...]; the inputs of a group lie together
        group = int(attribute(layer, "group", 1))
        table = np.repeat(gain.reshape(group, -1), weight.shape[0] // group, axis=0)
        factor = table.reshape(table.shape + (1,) * (weight.ndim - 2))
    elif layer.op_type == "Gemm":
        factor = gain[:, None] if attribute(layer, "transB", 0) else gain
    else:
        factor = gain.reshape((-1,) + (1,) * (weight.ndim - 1))
    scaled = (weight.astype(np.float64) * factor).astype(np.float32)
    view.set_input(layer, 1, view.add(f"{layer.input[1]}_folded", scaled))


def _set_attribute(node: NodeProto, name: str, value: Any) -> None:
    """Set an attribute, or remove it (None)."""
    from onnx import helper

    kept = [item for item in node.attribute if item.name != name]
    if value is not None:
        kept.append(helper.make_attribute(name, value))
    copies = [type(item).FromString(item.SerializeToString()) for item in kept]
    del node.attribute[:]
    node.attribute.extend(copies)
