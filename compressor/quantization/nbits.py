"""Weight-only layers: constant matrices in blocks of 4 or 8 bits, read by kernels of onnxruntime's own.

MatMul and Gemm become `com.microsoft` MatMulNBits, and with 4 bits table lookups become GatherBlockQuantized.
`accuracy_level` 4 lets the kernel round activations to int8, block by block: on x86 that is three times as
fast as level 0 with 4 bits, forty times with 8, and costs less than the weights' own rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.blocks import Blocks
from compressor.quantization.constants import drop_unused_initializers
from compressor.quantization.layers import LAYERS, Use, weight_uses
from compressor.quantization.placement import FloatOperator
from compressor.quantization.scheme import SCHEMES
from compressor.quantization.view import View, attribute, replace_nodes, unique

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["Layer", "Plan", "matrix", "plan", "write"]

_LEAST = 1024  # elements of a weight that is worth a kernel of its own
Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Layer:
    """A layer of constant weight to be packed; `name` is its node's."""

    name: str
    op: str
    use: Use


@dataclass(frozen=True)
class Plan:
    """`matrices` for MatMulNBits, `tables` for GatherBlockQuantized, and why other layers stay float."""

    matrices: list[Layer]
    tables: list[Layer]
    float: list[FloatOperator]


def plan(view: View, group: int, exclude: frozenset[str]) -> Plan:
    """Decide for every layer of a prepared model; nodes named in `exclude` stay float."""
    matrices, tables, rest = [], [], []
    uses = {use.node: use for use in weight_uses(view, SCHEMES["ort-x86-vnni"])}
    for node in view.graph.node:
        key = View.key(node)
        if node.op_type == "Gather" and _table(view, node, group) and node.name not in exclude:
            tables.append(Layer(node.name, node.op_type, Use(key, 0, node.input[0], (0,), (0, 1))))
        if node.op_type not in LAYERS:
            continue
        reason = "left in float on request" if node.name in exclude else _reason(view, node, uses.get(key))
        if reason:
            rest.append(FloatOperator(node.name, node.op_type, reason))
        else:
            matrices.append(Layer(node.name, node.op_type, uses[key]))
    return Plan(matrices, tables, rest)


def _reason(view: View, node: NodeProto, use: Use | None) -> str | None:
    """Why a layer gets no MatMulNBits; None: it gets one."""
    if node.op_type not in ("MatMul", "Gemm"):
        return f"the runtime has no weight-only kernel for {node.op_type}"
    if node.input[0] in view.initializers:
        return "its weight is the left operand"
    if use is None:
        return "its weight is not a constant matrix"
    if not (view.is_float(node.input[0]) and view.is_float(use.weight)):
        return "its operands are not float32"
    if np.prod(view.initializers[use.weight].dims) < _LEAST:
        return f"its weight has fewer than {_LEAST} elements"
    if node.op_type == "Gemm" and attribute(node, "transA", 0):
        return "its input is transposed"
    if node.op_type == "Gemm" and (attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1):
        return "alpha and beta cannot be folded into its constants"
    return None


def _table(view: View, node: NodeProto, group: int) -> bool:
    if node.input[0] not in view.initializers or attribute(node, "axis", 0) != 0:
        return False
    dims = view.initializers[node.input[0]].dims
    whole = len(dims) == 2 and dims[1] % group == 0
    return whole and np.prod(dims) >= _LEAST and view.is_float(node.input[0])


def matrix(view: View, layer: Layer) -> Matrix:
    """The weight as [outputs, inputs], or [rows, columns] of a table."""
    value = view.array(layer.use.weight)
    assert value is not None
    return np.asarray(value.transpose(layer.use.order), np.float32)


def write(
    view: View,
    planned: Plan,
    packed: Mapping[str, Blocks],
    accuracy_level: int,
) -> None:
    """Change the view's model; `packed` has the blocks of each layer by its `name`. Names of outputs stay."""
    layers = {layer.use.node: layer for layer in (*planned.matrices, *planned.tables)}
    writer = _Writer(view, accuracy_level)
    nodes: list[NodeProto] = []
    for node in view.graph.node:
        layer = layers.get(View.key(node))
        if layer is None:
            nodes.append(node)
        elif layer.op == "Gather":
            nodes.append(writer.table(node, layer, packed[layer.name]))
        else:
            nodes += writer.matrix(node, layer, packed[layer.name])
    replace_nodes(view.model, nodes)
    drop_unused_initializers(view.model)
    if layers and not any(item.domain == "com.microsoft" for item in view.model.opset_import):
        view.model.opset_import.add(domain="com.microsoft", version=1)


class _Writer:
    def __init__(self, view: View, accuracy_level: int) -> None:
        self.view, self.level = view, accuracy_level
        self.node_names = {node.name for node in view.graph.node}

    def matrix(self, node: NodeProto, layer: Layer, blocks: Blocks) -> Iterator[NodeProto]:
        """MatMulNBits, the bias added behind it (the runtime takes it in)."""
        from onnx import helper

        rows, output = len(blocks.codes), str(node.output[0])
        bias = node.input[2] if len(node.input) > 2 else ""
        product = self.view.new_name(f"{output}_product") if bias else output
        zeros = blocks.packed_zeros().reshape(-1)
        inputs = [node.input[0], *self._stored(layer, blocks, blocks.packed_codes(), zeros)]
        yield helper.make_node(
            "MatMulNBits",
            inputs,
            [product],
            name=node.name,
            domain="com.microsoft",
            K=blocks.width,
            N=rows,
            bits=blocks.bits,
            block_size=blocks.codes.shape[2],
            accuracy_level=self.level,
        )
        if bias:
            name = unique(f"Add_{output}", self.node_names)
            yield helper.make_node("Add", [product, bias], [output], name=name)

    def table(self, node: NodeProto, layer: Layer, blocks: Blocks) -> NodeProto:
        """GatherBlockQuantized over rows, each in blocks."""
        from onnx import helper

        codes = blocks.packed_codes().reshape(len(blocks.codes), -1)
        data, scale, zero = self._stored(layer, blocks, codes, blocks.packed_zeros())
        return helper.make_node(
            "GatherBlockQuantized",
            [data, node.input[1], scale, zero],
            list(node.output),
            name=node.name,
            domain="com.microsoft",
            bits=blocks.bits,
            block_size=blocks.codes.shape[2],
            gather_axis=0,
            quantize_axis=1,
        )

    def _stored(
        self, layer: Layer, blocks: Blocks, codes: NDArray[np.uint8], zeros: NDArray[np.uint8]
    ) -> tuple[str, str, str]:
        """Names of codes, scales and zero points; layers of one weight and the same codes share them."""
        scale = blocks.scale if layer.op == "Gather" else blocks.scale.reshape(-1)
        name = f"{layer.use.weight}_int{blocks.bits}"
        return (
            self.view.add(name, codes),
            self.view.add(f"{name}_scale", scale),
            self.view.add(f"{name}_zero_point", zeros),
        )
