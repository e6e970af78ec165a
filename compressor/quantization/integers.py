"""Dynamic quantization: activations become uint8 while the engine runs, by the range that they then have.

Written are the patterns that onnxruntime fuses: one DynamicQuantizeLinear for each tensor that layers read,
then MatMulInteger, and its sum times both scales (DynamicQuantizeMatMul or MatMulIntegerToFloat); an LSTM
becomes `com.microsoft` DynamicQuantizeLSTM. Weights are int8, symmetric, one scale per output channel, with
pairs that cannot saturate where the scheme asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.quantization.constants import drop_unused_initializers
from compressor.quantization.layers import LAYERS, Use, weight_uses
from compressor.quantization.placement import FloatOperator
from compressor.quantization.scheme import Scheme
from compressor.quantization.view import View, attribute, replace_nodes, unique
from compressor.quantization.weights import QuantizedWeight, quantize_weight

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["OPERATORS", "Plan", "plan", "reads_input", "write"]

_MATRICES = frozenset({"MatMul", "Gemm"})
OPERATORS = _MATRICES | {"LSTM"}
_MOVERS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Identity"}


@dataclass(frozen=True)
class Plan:
    """Weights to be integers, of MatMul and Gemm and of LSTM (W, R), and why the other layers stay float."""

    matrices: list[Use]
    recurrent: list[tuple[Use, Use]]
    float: list[FloatOperator]

    def inputs(self, view: View) -> list[str]:
        """The tensors that will be quantized, each once."""
        uses = [*self.matrices, *(pair[0] for pair in self.recurrent)]
        return list(dict.fromkeys(str(view.producers[use.node].input[0]) for use in uses))


def plan(view: View, scheme: Scheme, exclude: Mapping[str, str]) -> Plan:
    """Decide for every layer of a prepared model; nodes named in `exclude` stay float for that reason."""
    chosen = replace(scheme, compute=_MATRICES)
    uses = {use.node: use for use in weight_uses(view, chosen)}
    matrices, recurrent, rest = [], [], []
    for node in view.graph.node:
        if node.op_type not in LAYERS:
            continue
        reason = _reason(view, node, uses) or exclude.get(node.name)
        if reason:
            rest.append(FloatOperator(node.name, node.op_type, reason))
        elif node.op_type == "LSTM":
            recurrent.append(_lstm_uses(view, node, scheme))
        else:
            matrices.append(uses[View.key(node)])
    return Plan(matrices, recurrent, rest)


def reads_input(view: View, node: NodeProto) -> bool:
    """Whether a layer's data are, up to moved axes, an input of the model."""
    name = node.input[0]
    while (maker := view.producers.get(name)) is not None and maker.op_type in _MOVERS:
        name = maker.input[0]
    return name not in view.producers and name not in view.initializers


def _reason(view: View, node: NodeProto, uses: dict[str, Use]) -> str | None:
    """Why a layer stays float; None: it can be an integer one."""
    if node.op_type == "LSTM":
        return _lstm_reason(view, node)
    if node.op_type not in _MATRICES:
        return f"the runtime has no dynamic int8 kernel for {node.op_type} that is faster than float"
    if node.input[0] in view.initializers:
        return "its weight is the left operand"
    use = uses.get(View.key(node))
    if use is None:
        return "its weight is not a constant matrix"
    if not (view.is_float(node.input[0]) and view.is_float(use.weight)):
        return "its operands are not float32"
    if node.op_type == "Gemm" and attribute(node, "transA", 0):
        return "its input is transposed"
    if node.op_type == "Gemm" and (attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1):
        return "alpha and beta cannot be folded into its constants"
    return None


def _lstm_reason(view: View, node: NodeProto) -> str | None:
    if not all(name in view.initializers and view.is_float(name) for name in node.input[1:3]):
        return "its weights are not constant float32"
    if attribute(node, "layout", 0):
        return "the kernel takes the batch in second place only (layout 0)"
    return None


def _lstm_uses(view: View, node: NodeProto, scheme: Scheme) -> tuple[Use, Use]:
    paired = scheme.pair_limit is not None
    first, second = (
        Use(View.key(node), index, node.input[index], (0, 1), (0, 1, 2), paired=paired) for index in (1, 2)
    )
    return first, second


def write(view: View, planned: Plan, scheme: Scheme) -> None:
    """Change the view's model; names of nodes and of their outputs stay."""
    writer = _Writer(view, scheme, [*planned.matrices, *(use for pair in planned.recurrent for use in pair)])
    matrices = {use.node: use for use in planned.matrices}
    recurrent = {pair[0].node: pair for pair in planned.recurrent}
    nodes: list[NodeProto] = []
    for node in view.graph.node:
        key = View.key(node)
        if key in matrices:
            nodes += writer.matrix(node, matrices[key])
        elif key in recurrent:
            nodes.append(writer.lstm(node, *recurrent[key]))
        else:
            nodes.append(node)
    replace_nodes(view.model, nodes)
    drop_unused_initializers(view.model)
    if recurrent and not any(item.domain == "com.microsoft" for item in view.model.opset_import):
        view.model.opset_import.add(domain="com.microsoft", version=1)


class _Writer:
    def __init__(self, view: View, scheme: Scheme, uses: list[Use]) -> None:
        self.view = view
        self.node_names = {node.name for node in view.graph.node}
        self.quantized: dict[str, list[str]] = {}
        self.added: dict[str, str] = {}
        self.weights: dict[str, QuantizedWeight] = {}
        for name in dict.fromkeys(use.weight for use in uses):
            value = view.array(name)
            assert value is not None
            readings = [use for use in uses if use.weight == name]
            self.weights[name] = quantize_weight(value, readings, [], scheme)

    def matrix(self, node: NodeProto, use: Use) -> Iterator[NodeProto]:
        """MatMul or Gemm in integers, the bias added in float."""
        codes, zero, scale = self._matrix_weight(use)
        output = str(node.output[0])
        bias = node.input[2] if len(node.input) > 2 else ""
        if node.input[0] not in self.quantized:
            names = [self.view.new_name(f"{node.input[0]}_{end}") for end in ("quantized", "scale", "zero")]
            self.quantized[node.input[0]] = names
            yield self._node("DynamicQuantizeLinear", [node.input[0]], *names)
        data, data_scale, data_zero = self.quantized[node.input[0]]
        total, real = self.view.new_name(f"{output}_integer"), self.view.new_name(f"{output}_float")
        factor = self.view.new_name(f"{output}_scale")
        yield self._node("MatMulInteger", [data, codes, data_zero, zero], total, name=node.name)
        yield self._node("Cast", [total], real, to=1)
        yield self._node("Mul", [data_scale, scale], factor)
        product = self.view.new_name(f"{output}_product") if bias else output
        yield self._node("Mul", [real, factor], product)
        if bias:
            yield self._node("Add", [product, bias], output)

    def _matrix_weight(self, use: Use) -> tuple[str, str, str]:
        """Names of codes [k, n], zero point [n] and scale [n], or of scalars."""
        weight = self.weights[use.weight]
        turned = weight.codes if use.order[0] == 1 else weight.codes.T
        codes = self._add(f"{use.weight}_{'int8' if use.order[0] == 1 else 'int8_transposed'}", turned)
        zero = self._add(
            "_".join(["zero_point", *map(str, weight.scale.shape)]), np.zeros_like(weight.scale, np.int8)
        )
        return codes, zero, self._add(f"{use.weight}_scale", weight.scale)

    def lstm(self, node: NodeProto, *uses: Use) -> NodeProto:
        """DynamicQuantizeLSTM: weights [directions, k, 4 hidden], scales [directions, 4 hidden]."""
        inputs = [*node.input, *[""] * (8 - len(node.input))]
        for use in uses:
            weight = self.weights[use.weight]
            scale = np.broadcast_to(weight.broadcast_scale(), (*weight.codes.shape[:2], 1))[..., 0]
            inputs[use.index] = self._add(f"{use.weight}_int8", weight.codes.transpose(0, 2, 1))
            zero = self._add("_".join(["zero_point", *map(str, scale.shape)]), np.zeros(scale.shape, np.int8))
            inputs += [self._add(f"{use.weight}_scale", scale), zero]
        made = type(node).FromString(node.SerializeToString())
        made.op_type, made.domain = "DynamicQuantizeLSTM", "com.microsoft"
        made.input[:] = inputs
        kept = [item for item in made.attribute if item.name != "layout"]
        del made.attribute[:]
        made.attribute.extend(kept)
        return made

    def _add(self, name: str, value: Any) -> str:
        if name not in self.added:
            self.added[name] = self.view.add(name, value)
        return self.added[name]

    def _node(
        self, op: str, inputs: list[str], *outputs: str, name: str = "", **attributes: Any
    ) -> NodeProto:
        from onnx import helper

        name = name or unique(f"{op}_{outputs[0]}", self.node_names)
        return helper.make_node(op, inputs, outputs, name=name, **attributes)
