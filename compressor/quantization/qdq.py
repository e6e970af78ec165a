"""Writes a placement into the graph: pairs around activations, int8 weights, int32 biases.

Names of nodes and tensors stay; what is new is named after the tensor it serves (`t_quantized`,
`t_dequantized`, `t_scale`, `t_zero_point`). A graph output keeps its name, type and place: where its
maker writes integers, the maker's own output is renamed to `t_unquantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.constants import drop_unused_initializers
from compressor.quantization.corrections import Corrections
from compressor.quantization.float_layers import keep_float
from compressor.quantization.layers import Use
from compressor.quantization.matmul_sums import keep_matmuls
from compressor.quantization.patches import RECURRENT
from compressor.quantization.placement import Placement
from compressor.quantization.scales import activation_scales, pad_value
from compressor.quantization.scheme import Scheme
from compressor.quantization.view import View, replace_nodes, unique
from compressor.quantization.weights import (
    QuantizedWeight,
    activation_parameters,
    quantize_bias,
    quantize_weight,
)

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["write"]

Range = tuple[float, float]


def write(
    view: View,
    placement: Placement,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    corrections: Corrections | None = None,
) -> ModelProto:
    """Change the view's model into its Q/DQ form and give it back."""
    if scheme.guards:
        keep_matmuls(view, placement.integer)
    writer = _Writer(view, placement, ranges, scheme, corrections or Corrections())
    for name in placement.pairs:
        writer.pair(name)
    for (key, name), root in placement.rescaled.items():
        writer.rescale(key, name, root)
    writer.constant_operands()
    writer.weights()
    writer.finish()
    return keep_float(view.model) if scheme.guards else view.model


@dataclass(frozen=True)
class _Parameters:
    """Scale and zero point, as numbers and as names of initializers."""

    scale: np.float32
    zero: int
    scale_name: str
    zero_name: str


class _Writer:
    """Holds the nodes to be inserted until `finish`; nodes are known by their keys before any renaming."""

    def __init__(
        self,
        view: View,
        placement: Placement,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        corrections: Corrections,
    ) -> None:
        self.view, self.placement, self.scheme = view, placement, scheme
        self.scales = activation_scales(view, placement, ranges, scheme)
        self.corrections = corrections
        self.nodes = {View.key(node): node for node in view.graph.node}
        self.makers = {name: View.key(node) for name, node in view.producers.items()}
        self.readers = {
            name: [(View.key(node), node) for node in nodes] for name, nodes in view.consumers.items()
        }
        self.data = {key: node.input[0] if node.input else "" for key, node in self.nodes.items()}
        self.names = {*view.initializers, *view.producers, *view.consumers, *view.outputs, *view.captured}
        self.node_names = {node.name for node in view.graph.node}
        self.parameters: dict[str, _Parameters] = {}
        self.dequantized: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        self.first: list[NodeProto] = []
        self.after: dict[str, list[NodeProto]] = {}

    # activations

    def pair(self, name: str) -> None:
        """Put QuantizeLinear and DequantizeLinear on tensor `name` and let its readers read them."""
        quantized, maker = unique(f"{name}_quantized", self.names), self.makers.get(name)
        parameters = self._parameters(self.placement.pairs[name])
        every = name in self.placement.replaced
        keeps_name = every and (name in self.view.outputs or name in self.view.captured)
        dequantized = name if keeps_name else unique(f"{name}_dequantized", self.names)
        self.dequantized[name] = dequantized
        readers = [
            (key, node)
            for key, node in self.readers.get(name, [])
            if every or key in self.placement.integer or key in self.placement.movers
        ]
        new = []
        if maker in self.placement.integer_forms:
            self._rename_output(maker, name, quantized)
        else:
            source = name
            if keeps_name and maker is not None:
                source = unique(f"{name}_unquantized", self.names)
                self._rename_output(maker, name, source)
            new.append(self._node("QuantizeLinear", [source, *_names(parameters)], quantized))
        floats = [node for key, node in readers if key not in self.placement.integer_forms]
        if floats or keeps_name:
            new.append(self._node("DequantizeLinear", [quantized, *_names(parameters)], dequantized))
        (self.first if maker is None else self.after.setdefault(maker, [])).extend(new)
        for key, node in readers:
            if key in self.placement.integer_forms:
                self._read_integers(node, quantized, parameters)
            else:
                node.input[:] = [dequantized if item == name else item for item in node.input]

    def rescale(self, key: str, name: str, root: str) -> None:
        """Let a node read tensor `name`, which has a pair, rounded once more to the scale of `root`."""
        names, source = _names(self._parameters(root)), self.dequantized[name]
        codes = unique(f"{name}_rescaled_quantized", self.names)
        target = unique(f"{name}_rescaled", self.names)
        maker, node = self.makers.get(name), self.nodes[key]
        (self.first if maker is None else self.after.setdefault(maker, [])).extend(
            [
                self._node("QuantizeLinear", [source, *names], codes),
                self._node("DequantizeLinear", [codes, *names], target),
            ]
        )
        node.input[:] = [target if item == source else item for item in node.input]

    def _parameters(self, root: str) -> _Parameters:
        if root not in self.parameters:
            self.parameters[root] = self._add_parameters(root, *self.scales[root])
        return self.parameters[root]

    def _add_parameters(self, name: str, scale: np.float32, zero: int) -> _Parameters:
        return _Parameters(
            scale,
            zero,
            self._add(f"{name}_scale", np.asarray(scale)),
            self._add(f"{name}_zero_point", np.asarray(zero, self.scheme.activation)),
        )

    def _read_integers(self, node: NodeProto, quantized: str, parameters: _Parameters) -> None:
        if node.op_type == "Pad":
            code = self._codes(np.asarray(pad_value(self.view, node)), parameters.scale, parameters.zero)
            while len(node.input) < 3:
                node.input.append("")
            node.input[2] = self._add(f"{View.key(node)}_value", code)
        node.input[0] = quantized

    def _codes(self, value: NDArray[Any], scale: np.float32, zero: int) -> NDArray[Any]:
        codes = np.clip(np.rint(value / np.float64(scale)) + zero, *self.scheme.codes)
        return np.asarray(codes.astype(self.scheme.activation))

    def constant_operands(self) -> None:
        """Constant operands of elementwise kernels, in the type of activations, one scale each."""
        done: dict[str, str] = {}
        for key, node in self.nodes.items():
            if key not in self.placement.integer or node.op_type in self.scheme.compute:
                continue
            for index, name in enumerate(node.input):
                value = self.view.array(name)
                if value is not None:
                    done[name] = done.get(name) or self._constant_operand(name, value)
                    node.input[index] = done[name]

    def _constant_operand(self, name: str, value: NDArray[Any]) -> str:
        scale, zero = activation_parameters(float(value.min()), float(value.max()), self.scheme)
        parameters = self._add_parameters(name, scale, zero)
        codes = self._add(f"{name}_quantized", self._codes(value, scale, zero))
        self.first.append(
            node := self._node("DequantizeLinear", [codes, *_names(parameters)], f"{name}_dequantized")
        )
        return str(node.output[0])

    # weights

    def weights(self) -> None:
        groups: dict[str, list[Use]] = {}
        for use in (*self.placement.uses, *self.placement.stored):
            groups.setdefault(use.weight, []).append(use)
        for name, uses in groups.items():
            self._weight(name, uses)

    def _weight(self, name: str, uses: list[Use]) -> None:
        value, integer = self.view.array(name), self.placement.integer
        assert value is not None
        layers = [use for use in uses if use.node in integer]
        quantize = self.corrections.quantizer(layers or self._recurrent(uses))
        weight = quantize_weight(value, uses, self._biases(layers), self.scheme, quantize)
        codes = self._add(f"{name}_quantized", weight.codes)
        scale = self._add(f"{name}_scale", weight.scale)
        for use in layers:
            self._layer(use, weight, codes, scale)
        stored = {(use.node, use.index) for use in uses if use.node not in integer}
        for key, node in self.readers[name]:
            for index, item in enumerate(node.input):
                if item != name or key in self.placement.excluded:
                    continue
                if (key, index) in stored and node.op_type == "Gather":
                    self._lookup(key, node, weight, codes, scale)
                elif not (node.op_type == "Transpose" and self._unread(node)):
                    node.input[index] = self._as_float(name, weight, codes)

    def _recurrent(self, uses: list[Use]) -> list[Use]:
        """Stored weights whose moments are in the order of `Use.order`."""
        return [use for use in uses if self.nodes[use.node].op_type in RECURRENT]

    def _biases(self, layers: list[Use]) -> list[tuple[NDArray[Any], float]]:
        integer = self.scheme.bias == "int32"
        found = [(use, self.view.array(use.bias)) for use in layers if use.bias and integer]
        return [(bias, float(self._input_scale(use))) for use, bias in found if bias is not None]

    def _input_scale(self, use: Use) -> np.float32:
        return self._parameters(self.placement.pairs[self.data[use.node]]).scale

    def _layer(self, use: Use, weight: QuantizedWeight, codes: str, scale: str) -> None:
        """Let an integer layer read the dequantized weight and bias."""
        node = self.nodes[use.node]
        name, axis = node.input[use.index], weight.channels[0] if weight.channels else None
        if use.transposed:
            axis = None if axis is None else 1 - axis
        target = f"{name}_dequantized"
        if target not in self.shared:
            if use.transposed:
                codes = self._transposed(codes, weight, f"{name}_quantized")
            self.shared[target] = self._dequantize(codes, scale, weight.scale, np.int8, axis, target)
        node.input[use.index] = self.shared[target]
        if use.bias is not None:
            value = self.view.array(use.weight)
            assert value is not None
            shift = self.corrections.shift(use, value, weight.codes * weight.broadcast_scale())
            integer = self.scheme.bias == "int32"
            scales = self._input_scale(use) * weight.scale if integer else None
            node.input[2] = self._bias(use.bias, scales, shift)

    def _transposed(self, codes: str, weight: QuantizedWeight, target: str) -> str:
        """The codes turned, in the file itself where no float operator shares them."""
        if not self.scheme.stores:
            return self._add(target, weight.codes.T)
        turned = self._node("Transpose", [codes], unique(target, self.names), perm=[1, 0])
        self.first.append(turned)
        return str(turned.output[0])

    def _dequantize(
        self, codes: str, scale: str, value: NDArray[np.float32], kind: Any, axis: int | None, target: str
    ) -> str:
        inputs = [codes, scale]
        if kind == np.int8:
            inputs.append(self._zeros(value.shape))
        attributes = {} if axis is None else {"axis": axis}
        node = self._node("DequantizeLinear", inputs, unique(target, self.names), **attributes)
        self.first.append(node)
        return str(node.output[0])

    def _zeros(self, shape: tuple[int, ...]) -> str:
        """One zero point for all weights with as many channels."""
        name = "_".join(["zero_point", *map(str, shape)])
        if name not in self.shared:
            self.shared[name] = self._add(name, np.zeros(shape, np.int8))
        return self.shared[name]

    def _bias(self, name: str, scale: NDArray[np.float32] | None, shift: NDArray[np.float64] | None) -> str:
        """The bias, shifted, as int32 codes of `scale`, or as float32 without one."""
        bias = self.view.array(name)
        assert bias is not None
        bias = bias if shift is None else bias + shift
        if scale is None:
            return name if shift is None else self._add(f"{name}_corrected", bias.astype(np.float32))
        key = f"{name} {scale.tobytes().hex()} {bias.tobytes().hex()}"
        if key not in self.shared:
            codes = self._add(f"{name}_quantized", quantize_bias(bias, scale))
            scales = self._add(f"{name}_scale", scale)
            axis = 0 if scale.ndim else None
            self.shared[key] = self._dequantize(codes, scales, scale, np.int32, axis, f"{name}_dequantized")
        return self.shared[key]

    def _as_float(self, name: str, weight: QuantizedWeight, codes: str) -> str:
        """The weight for float readers: Cast and Mul, which a runtime computes once when it loads."""
        target = f"{name}_float"
        if target not in self.shared:
            scale = self._add(f"{name}_factor", weight.broadcast_scale())
            cast = self._node("Cast", [codes], unique(f"{name}_codes", self.names), to=1)
            scaled = self._node("Mul", [cast.output[0], scale], unique(target, self.names))
            self.first += [cast, scaled]
            self.shared[target] = scaled.output[0]
        return self.shared[target]

    def _lookup(self, key: str, node: NodeProto, weight: QuantizedWeight, codes: str, scale: str) -> None:
        """A table's rows are looked up as int8 and scaled after, row by row."""
        output, ids = node.output[0], node.input[1]
        rows, wide = unique(f"{output}_quantized", self.names), unique(f"{output}_codes", self.names)
        node.input[0], node.output[0] = codes, rows
        new = [self._node("Cast", [rows], wide, to=1)]
        if weight.channels:
            row_scale = unique(f"{output}_scale", self.names)
            last = self.shared.get("last_axis") or self._add("last_axis", np.asarray([-1], np.int64))
            self.shared["last_axis"] = last
            column = unique(f"{output}_scale_column", self.names)
            new.append(self._node("Gather", [scale, ids], row_scale, axis=0))
            new.append(self._node("Unsqueeze", [row_scale, last], column))
            scale = column
        new.append(self._node("Mul", [wide, scale], output))
        self.after[key] = new + self.after.get(key, [])

    # the graph

    def _unread(self, node: NodeProto) -> bool:
        """Whether nothing reads the node's output any more."""
        name = node.output[0]
        if name in self.view.outputs or name in self.view.captured:
            return False
        return not any(name in reader.input for _, reader in self.readers.get(name, []))

    def finish(self) -> None:
        """Write the new nodes, each behind what it reads."""
        nodes = list(self.first)
        for key, node in self.nodes.items():
            if not (
                node.op_type == "Transpose" and node.input[0] in self.view.initializers and self._unread(node)
            ):
                nodes += [node, *self.after.get(key, [])]
        replace_nodes(self.view.model, nodes)
        drop_unused_initializers(self.view.model)

    def _add(self, name: str, value: NDArray[Any]) -> str:
        name = unique(name, self.names)
        return self.view.add(name, value)

    def _node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
        from onnx import helper

        return helper.make_node(op, inputs, [output], name=unique(output, self.node_names), **attributes)

    def _rename_output(self, key: str, old: str, new: str) -> None:
        node = self.nodes[key]
        node.output[:] = [new if name == old else name for name in node.output]


def _names(parameters: _Parameters) -> list[str]:
    return [parameters.scale_name, parameters.zero_name]
