"""In which types an OpenVINO engine really computes.

A Q/DQ file promises integers; which kernels run is decided by the CPU plugin when it compiles the model. So
types and times are read from the compiled model, and multiply-accumulates (MACs) are counted on the
engine's own graph, in the shapes of the arrays that it is run on; the compiled model names the operators
that each of its kernels was made of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from serving.runtimes._precision import Kernel, summary

if TYPE_CHECKING:
    import openvino

__all__ = ["macs", "precision"]

_RUNS = 6
_SECONDS = 10.0
_FUSED = 4  # operators behind a product that may become part of its kernel
_INTEGERS = frozenset({"i8", "u8"})
_TYPES = {
    "i8": "int8",
    "u8": "int8",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
}
_CONVERSIONS = frozenset({"Reorder", "Convert", "FakeQuantize"})
_SILENT = frozenset({"Const", "Input", "Output"})
_PRODUCTS = frozenset(
    {
        *("Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNSeq", "RNNCell", "Subgraph"),
        *(
            "LLMMLP",
            "QKVProjection",
            "MHA",
            "ScaledDotProductAttention",
            "ScaledDotProductAttentionWithKVCache",
        ),
    }
)
Shape = tuple[int, ...]


def precision(
    model: openvino.Model,
    compiled: openvino.CompiledModel,
    call: Callable[[], Any],
    shapes: dict[str, Shape],
) -> dict[str, Any]:
    """Run `call` on `compiled` (with PERF_COUNT) a few times and summarise.

    `model` is what was compiled, `shapes` are those of the inputs. See `_precision.summary` for the
    result; times are means over the runs but the first. Operators whose kernel is not found count as type
    "unknown".
    """
    began = time.monotonic()
    call()
    first, runs = _nodes(compiled), 1
    while runs < _RUNS and (runs == 1 or time.monotonic() - began < _SECONDS):
        call()
        runs += 1
    counts = macs(model, shapes)
    found = _Finder(counts, _behind(model, counts))
    ran = [
        (node, node.kernel(found, _later(early, node, runs)))
        for early, node in zip(first, _nodes(compiled), strict=True)
        if node.layer not in _SILENT
    ]
    lost = [Kernel(_plain(name), "", "unknown", count, 0.0, False, False) for name, count in found.left()]
    quantized = any(kernel.integer or kernel.op == "FakeQuantize" for _, kernel in ran)
    islands: list[dict[str, Any]] = [
        {"name": kernel.name, "op": kernel.op, "macs": kernel.macs, "reason": node.reason}
        for node, kernel in ran
        if quantized and kernel.macs and not kernel.integer
    ]
    islands.sort(key=lambda island: -island["macs"])
    return summary([kernel for _, kernel in ran] + lost, islands)


def _nodes(compiled: openvino.CompiledModel) -> list[_Node]:
    return [_Node.of(node) for node in compiled.get_runtime_model().get_ordered_ops()]


def _later(first: _Node, node: _Node, runs: int) -> float:
    """Microseconds of the runs after the first, in which kernels are built; a node's time is a mean."""
    return max(0.0, (node.microseconds * runs - first.microseconds) / (runs - 1))


class _Finder:
    """Finds the operators that a kernel was made of; each belongs to one kernel.

    The plugin appends parts to names after a slash. Where it drops the name of an operator, that of the
    one `behind` it stands for both.
    """

    def __init__(self, counts: dict[str, int], behind: dict[str, str]) -> None:
        self._counts, self._behind = dict(counts), behind

    def take(self, origins: list[str]) -> dict[str, int]:
        """The names and MACs of the operators behind `origins`."""
        known = [name for name in map(self._known, origins) if name]
        known = (
            known or [self._behind[name] for name in origins if self._behind.get(name) in self._counts][:1]
        )
        return {name: self._counts.pop(name) for name in dict.fromkeys(known)}

    def left(self) -> list[tuple[str, int]]:
        return list(self._counts.items())

    def _known(self, name: str) -> str | None:
        while name and name not in self._counts:
            name = name.rpartition("/")[0]
        return name or None


@dataclass(frozen=True)
class _Node:
    """A node of the compiled model: `operands` are the types of its first two inputs as they arrive."""

    name: str
    layer: str
    type: str
    operands: list[str]
    origins: list[str]
    microseconds: float

    @classmethod
    def of(cls, node: Any) -> _Node:
        facts = {key: str(value.astype(str)) for key, value in node.get_rt_info().items()}
        spent = facts.get("execTimeMcs", "")
        return cls(
            name=node.get_friendly_name(),
            layer=facts["layerType"],
            type=facts["runtimePrecision"],
            operands=[port.get_element_type().get_type_name() for port in node.inputs()][:2],
            origins=facts.get("originalLayersNames", "").split(","),
            microseconds=float(spent) if spent.isdigit() else 0.0,  # "not_executed"
        )

    def kernel(self, found: _Finder, microseconds: float) -> Kernel:
        """What ran, with the MACs of the operators that it was made of."""
        made_of = found.take(self.origins) if self.layer in _PRODUCTS else {}
        integer = bool(made_of) and set(self.operands) <= _INTEGERS
        kind = self.type if integer or not made_of else next(iter({*self.operands} - _INTEGERS), self.type)
        return Kernel(
            name=_plain(next(iter(made_of), self.name)),
            op=self.layer,
            type=_TYPES.get(kind, kind),
            macs=sum(made_of.values()),
            microseconds=microseconds,
            integer=integer,
            conversion=self.layer in _CONVERSIONS,
        )

    @property
    def reason(self) -> str:
        """Why a product is not one of integers."""
        kinds = ["a quantized" if name in _INTEGERS else "a float" for name in self.operands]
        return f"it has {' input and '.join(kinds)} weight or second input"


def _plain(name: str) -> str:
    """The name that the operator had in the ONNX model."""
    return name.split("/WithoutBiases")[0]


# ------------------------------------------------------------------------------------------- counting


def macs(model: openvino.Model, shapes: dict[str, Shape]) -> dict[str, int]:
    """Multiply-accumulates of the operators of `model` that multiply matrices, by their names.

    Operators in the bodies of loops, and those whose shape depends on values, are not counted.
    """
    model.reshape({name: list(shape) for name, shape in shapes.items()})
    found = {}
    for node in model.get_ordered_ops():
        count = _MACS.get(node.get_type_name())
        if count and all(port.get_partial_shape().is_static for port in (*node.inputs(), *node.outputs())):
            operator = _Operator(
                [tuple(port.get_shape()) for port in node.inputs()],
                tuple(node.get_output_shape(0)),
                node.get_attributes(),
            )
            found[node.get_friendly_name()] = count(operator)
    return found


def _behind(model: openvino.Model, counts: dict[str, int]) -> dict[str, str]:
    """From the names of the operators that alone read a product, one after another, to its name."""
    found: dict[str, str] = {}
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if name not in counts:
            continue
        for _ in range(_FUSED):
            readers = [port.get_node() for port in node.output(0).get_target_inputs()]
            if len(readers) != 1 or readers[0].get_friendly_name() in counts:
                break
            node = readers[0]
            found.setdefault(node.get_friendly_name(), name)
    return found


@dataclass(frozen=True)
class _Operator:
    """Shapes and attributes of an operator of the engine's graph."""

    inputs: list[Shape]
    output: Shape
    attributes: dict[str, Any]


def _convolution(operator: _Operator) -> int:
    return prod(operator.output) * prod(operator.inputs[1][1:])  # weights (out, in, ...)


def _group_convolution(operator: _Operator) -> int:
    return prod(operator.output) * prod(operator.inputs[1][2:])  # weights (groups, out, in, ...)


def _backward_convolution(operator: _Operator) -> int:
    return prod(operator.inputs[0]) * prod(operator.inputs[1][1:])  # weights (in, out, ...)


def _backward_group_convolution(operator: _Operator) -> int:
    return prod(operator.inputs[0]) * prod(operator.inputs[1][2:])  # weights (groups, in, out, ...)


def _matmul(operator: _Operator) -> int:
    left = operator.inputs[0]
    transposed = bool(operator.attributes.get("transpose_a")) and len(left) > 1
    return prod(operator.output) * left[-2 if transposed else -1]


def _sequence(operator: _Operator) -> int:
    """Weights of input and state, (directions, gates x hidden, width), stand before the bias, the last."""
    batch, steps = operator.inputs[0][:2]
    return batch * steps * sum(prod(shape) for shape in operator.inputs[-3:-1])


def _cell(operator: _Operator) -> int:
    return operator.inputs[0][0] * sum(prod(shape) for shape in operator.inputs[-3:-1])


def _attention(operator: _Operator) -> int:
    query, key, value = operator.inputs[:3]
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_MACS: dict[str, Callable[[_Operator], int]] = {
    "Convolution": _convolution,
    "GroupConvolution": _group_convolution,
    "ConvolutionBackpropData": _backward_convolution,
    "GroupConvolutionBackpropData": _backward_group_convolution,
    "MatMul": _matmul,
    **dict.fromkeys(("LSTMSequence", "GRUSequence", "RNNSequence"), _sequence),
    **dict.fromkeys(("LSTMCell", "GRUCell", "RNNCell"), _cell),
    "ScaledDotProductAttention": _attention,
}
