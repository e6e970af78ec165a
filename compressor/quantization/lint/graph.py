"""A quantized graph of any tool seen through its quantizers: parameters, pairs, layers and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.view import TensorType, View, attribute, tensor_types

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = [
    "ACTIVATIONS",
    "INTEGER_OPERATORS",
    "LAYERS",
    "MOVERS",
    "Parameters",
    "QuantizedGraph",
    "is_dequantizer",
    "is_quantizer",
    "scaled",
]

LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
ACTIVATIONS = frozenset({"Relu", "Clip"})
MOVERS = frozenset(
    {"MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather", "Split", "Tile",
     "Identity", "DepthToSpace", "SpaceToDepth"}
)  # fmt: skip
INTEGER_OPERATORS = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"}
)
_UINT8 = 2


@dataclass(frozen=True)
class Parameters:
    """Scale and zero point of a QuantizeLinear or DequantizeLinear.

    None stands for values computed at run time. `kind` is the element type of the codes (0: unknown),
    `axis` the axis of the scales (None: one scale), `explicit` whether a zero point is given.
    """

    scale: NDArray[np.floating] | None
    zero: NDArray[Any] | None
    kind: int
    axis: int | None
    explicit: bool

    def __eq__(self, other: object) -> bool:
        """Whether both surely stand for the same mapping of codes to numbers."""
        if not isinstance(other, Parameters) or self.kind != other.kind:
            return False
        return _same(self.scale, other.scale) and _same(self.zero, other.zero)

    __hash__ = None  # type: ignore[assignment]


def scaled(codes: NDArray[Any], given: Parameters) -> NDArray[np.float32] | None:
    """The numbers that codes stand for; None where the parameters are not known or do not fit."""
    if given.scale is None or given.zero is None or given.scale.ndim > 1:
        return None
    shape = [1] * codes.ndim
    if given.axis is not None:
        if given.axis >= codes.ndim or codes.shape[given.axis] != given.scale.size:
            return None
        shape[given.axis] = -1
    scale, zero = (part.reshape(shape if part.size > 1 else ()) for part in (given.scale, given.zero))
    return np.asarray((codes.astype(np.float64) - zero) * scale, np.float32)


def _same(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    """Whether both are known and equal; one number stands for a row of it."""
    if one is None or other is None:
        return False
    fits = one.size == other.size or 1 in (one.size, other.size)
    return fits and bool((one.reshape(-1) == other.reshape(-1)).all())


def is_quantizer(node: NodeProto | None) -> bool:
    return node is not None and node.op_type == "QuantizeLinear"


def is_dequantizer(node: NodeProto | None) -> bool:
    return node is not None and node.op_type == "DequantizeLinear"


class QuantizedGraph(View):
    """Lookups over the top-level graph; what lies in subgraphs is not seen."""

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """As `View.types`; of a graph whose types contradict each other only what is declared."""
        import onnx

        try:
            return tensor_types(self.model)
        except (onnx.shape_inference.InferenceError, ValueError):
            return {}

    @property
    def opset(self) -> int:
        return next((item.version for item in self.model.opset_import if item.domain in ("", "ai.onnx")), 0)

    def nodes(self, *operators: str) -> list[NodeProto]:
        """The nodes of these operators, all of them without an argument."""
        return [
            node for node in self.graph.node if node.op_type and (not operators or node.op_type in operators)
        ]

    def constant(self, name: str) -> NDArray[Any] | None:
        """The value of an initializer or Constant, also behind Identity and Transpose."""
        from onnx import numpy_helper

        value = self.array(name)
        maker = self.producers.get(name)
        if value is not None or maker is None:
            return value
        if maker.op_type in ("Identity", "Transpose"):
            inner = self.constant(maker.input[0])
            turned = inner is not None and maker.op_type == "Transpose"
            return np.transpose(np.asarray(inner), attribute(maker, "perm")) if turned else inner
        tensor = attribute(maker, "value") if maker.op_type == "Constant" else None
        return None if tensor is None else numpy_helper.to_array(tensor)

    def is_constant(self, name: str) -> bool:
        """Whether a name is known before the graph runs, without reading its data."""
        maker = self.producers.get(name)
        if maker is not None and maker.op_type in ("Identity", "Transpose"):
            return self.is_constant(maker.input[0])
        return name in self.initializers or (maker is not None and maker.op_type == "Constant")

    def kind(self, name: str) -> int:
        """Element type of a tensor, 0 if unknown."""
        if name in self.initializers:
            return int(self.initializers[name].data_type)
        maker = self.producers.get(name)
        if is_quantizer(maker):
            assert maker is not None
            return self.parameters(maker).kind
        return self.types.get(name, (0, None))[0]

    def shape(self, name: str) -> tuple[int | str | None, ...] | None:
        if name in self.initializers:
            return tuple(self.initializers[name].dims)
        value = self.constant(name) if name in self.producers else None
        return value.shape if value is not None else self.types.get(name, (0, None))[1]

    def parameters(self, node: NodeProto) -> Parameters:
        """Of a quantizer or dequantizer."""
        scale = self.constant(node.input[1])
        explicit = len(node.input) > 2 and bool(node.input[2])
        kind = self._code_kind(node, explicit)
        zero = self.constant(node.input[2]) if explicit else None if scale is None else np.zeros(scale.shape)
        known = None if zero is None else np.asarray(zero).astype(np.float64)
        axis = None
        if scale is not None and scale.ndim and scale.size > 1:
            axis = self._axis(node)
        real = None if scale is None else np.asarray(scale).astype(np.float64)
        return Parameters(real, known, kind, axis, explicit)

    def _code_kind(self, node: NodeProto, explicit: bool) -> int:
        if explicit and self.kind(node.input[2]):
            return self.kind(node.input[2])
        if node.op_type == "QuantizeLinear":
            return int(attribute(node, "output_dtype", 0)) or _UINT8
        return self.kind(node.input[0])

    def _axis(self, node: NodeProto) -> int:
        axis, shape = int(attribute(node, "axis", 1)), self.shape(node.input[0])
        return axis + len(shape) if axis < 0 and shape is not None else axis

    # pairs

    def quantizer_behind(self, node: NodeProto) -> NodeProto | None:
        """The QuantizeLinear whose codes a dequantizer reads."""
        maker = self.producers.get(node.input[0])
        return maker if is_quantizer(maker) else None

    def dequantizer(self, name: str) -> NodeProto | None:
        """The DequantizeLinear that makes a tensor."""
        maker = self.producers.get(name)
        return maker if is_dequantizer(maker) else None

    def on_constant(self, node: NodeProto) -> bool:
        """Whether a quantizer or dequantizer stands on a weight, stored as codes or as float."""
        if self.is_constant(node.input[0]):
            return True
        behind = self.quantizer_behind(node) if is_dequantizer(node) else None
        return behind is not None and self.is_constant(behind.input[0])

    def readers(self, name: str) -> list[NodeProto]:
        return self.consumers.get(name, [])

    def read_by_quantizers_only(self, name: str) -> bool:
        readers = self.readers(name)
        outside = name in self.outputs or name in self.captured
        return bool(readers) and not outside and all(map(is_quantizer, readers))

    # layers

    def weighted(self) -> Iterator[tuple[NodeProto, NodeProto | None, NodeProto | None]]:
        """Conv, ConvTranspose, Gemm and MatMul with the dequantizers of their input and of their weight."""
        for node in self.nodes(*LAYERS):
            yield node, self.dequantizer(node.input[0]), self.weight_dequantizer(node)

    def weight_dequantizer(self, node: NodeProto) -> NodeProto | None:
        """Of the second input, also through a Transpose."""
        maker = self.producers.get(node.input[1])
        if maker is not None and maker.op_type == "Transpose":
            maker = self.producers.get(maker.input[0])
        return maker if is_dequantizer(maker) else None

    def codes(self, node: NodeProto) -> NDArray[Any] | None:
        """The integer weights that a dequantizer reads, rounded here where they are stored as float."""
        value = self.constant(node.input[0])
        behind = self.quantizer_behind(node)
        if value is not None or behind is None:
            return value
        return self.rounded(behind)

    def rounded(self, node: NodeProto) -> NDArray[Any] | None:
        """What a QuantizeLinear makes of a constant, by the ONNX standard; None where that is not plain."""
        from onnx import helper

        value, given = self.constant(node.input[0]), self.parameters(node)
        if value is None or given.scale is None or given.zero is None or given.kind not in (2, 3):
            return None
        shape = [1] * value.ndim
        if given.axis is not None:
            if given.scale.ndim != 1 or given.axis >= value.ndim:
                return None
            shape[given.axis] = -1
        scale, zero = (part.reshape(shape if part.size > 1 else ()) for part in (given.scale, given.zero))
        kind = helper.tensor_dtype_to_np_dtype(given.kind)
        limits = np.iinfo(kind)
        real = value.astype(np.float32) / scale.astype(np.float32)
        return np.asarray(np.clip(np.rint(real) + zero, limits.min, limits.max).astype(kind))

    def real(self, name: str) -> NDArray[Any] | None:
        """The numbers that a constant stands for, seen through dequantizers, Cast, Mul and Transpose."""
        value, maker = self.constant(name), self.producers.get(name)
        if value is not None or maker is None:
            return value
        if is_dequantizer(maker):
            codes, given = self.codes(maker), self.parameters(maker)
            return None if codes is None else scaled(codes, given)
        parts = [self.real(item) for item in maker.input]
        if not parts or any(part is None for part in parts):
            return None
        if maker.op_type == "Transpose":
            return np.transpose(np.asarray(parts[0]), attribute(maker, "perm"))
        if maker.op_type == "Cast":
            return np.asarray(parts[0]).astype(np.float32)
        return np.asarray(parts[0]) * np.asarray(parts[1]) if maker.op_type == "Mul" else None
