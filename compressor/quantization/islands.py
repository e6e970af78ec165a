"""Computing in half precision, with float32 islands where a range or an operator needs them.

A node stays float32 if what it reads or makes exceeds the type's range (observed, with a margin), if a
constant operand does not fit, or if the operator has no such form in ONNX. Where nothing was observed,
operators that can leave any range stay float32: sums over long axes, powers, exponentials. Casts stand
where half and float32 meet; inputs, outputs and what subgraphs read keep their type and name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.quantization.constants import drop_unused_initializers
from compressor.quantization.half import Half
from compressor.quantization.view import View, attribute, replace_nodes, subgraphs, unique

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["Island", "activations", "find", "write"]

_FLOAT = 1
_MARGIN = 2.0  # data that come later may be that much larger than those observed
_LONG = 1024  # addends whose sum float16 cannot hold to its precision
_UNBOUNDED = frozenset({"Exp", "Pow", "CumSum", "ReduceProd", "ReduceLogSumExp", "Reciprocal", "Range"})
_SQUARES = frozenset({"ReduceL2", "ReduceSumSquare", "LpNormalization", "MeanVarianceNormalization"})
_SUMS = frozenset({"ReduceSum", "ReduceL1", "ReduceMean", "GlobalAveragePool"})
_BOUNDING = frozenset({"Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid", "Tanh", "Clip"})
_BFLOAT16 = frozenset(
    {
        "Add", "Cast", "Concat", "Div", "Erf", "Expand", "Flatten", "Gather", "Gelu", "Gemm", "Identity",
        "LayerNormalization", "MatMul", "Mul", "Relu", "Reshape", "Sigmoid", "Slice", "Softmax", "Split",
        "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Island:
    """A node that stays float32, and why."""

    name: str
    op: str
    reason: str


def activations(view: View) -> list[str]:
    """All float32 activations of a graph, in order."""
    made = [name for node in view.graph.node for name in node.output if name]
    names = [item.name for item in view.graph.input] + made
    return [name for name in names if view.is_float(name)]


def find(
    model: ModelProto,
    half: Half,
    observed: Mapping[str, tuple[float, float]],
    masked: Mapping[str, str],
    exclude: Sequence[str] = (),
) -> list[Island]:
    """The nodes of a prepared model that must stay float32.

    `observed` are ranges of activations, `masked` activations that held infinities or masks.
    """
    view, found = View(model), []
    finder = _Finder(view, half, observed, set(masked))
    for node in view.graph.node:
        if not any(view.is_float(name) for name in (*node.input, *node.output) if name):
            continue
        reason = "left in float on request" if node.name in exclude else finder.reason(node)
        if reason:
            found.append(Island(node.name, node.op_type, reason))
    return found


class _Finder:
    def __init__(
        self, view: View, half: Half, observed: Mapping[str, tuple[float, float]], masked: set[str]
    ) -> None:
        self.view, self.half, self.observed, self.masked = view, half, observed, set(masked)
        self.limit = half.largest / _MARGIN

    def reason(self, node: NodeProto) -> str | None:
        """Why a node stays float32, None if it does not; to be asked in the graph's order."""
        reason = _form_reason(self.view, node, self.half) or self._constant_reason(node)
        return reason or self._masked_reason(node) or self._range_reason(node) or self._rule_reason(node)

    def _constant_reason(self, node: NodeProto) -> str | None:
        for name in node.input:
            value = self.view.array(name) if name and self.view.is_float(name) else None
            misfit = None if value is None else self.half.misfit(value)
            if misfit and value is not None:
                if node.op_type not in _BOUNDING and not np.abs(value).max() <= self.half.largest:
                    self.masked.update(output for output in node.output if output not in self.observed)
                return f"its constant '{name}' does not fit: {misfit}"
        return None

    def _masked_reason(self, node: NodeProto) -> str | None:
        """A mask stays one until an operator bounds it."""
        hit = next((name for name in node.input if name in self.masked), None)
        hit = hit or next((name for name in node.output if name in self.masked), None)
        if hit is None:
            return None
        if node.op_type not in _BOUNDING:
            self.masked.update(name for name in node.output if name not in self.observed)
        return f"'{hit}' holds infinities or a mask"

    def _range_reason(self, node: NodeProto) -> str | None:
        for name in (*node.input, *node.output):
            low, high = self.observed.get(name, (0.0, 0.0))
            largest = max(abs(low), abs(high))
            if largest > self.limit:
                return f"'{name}' reaches {largest:.4g}, {self.half.name} ends at {self.half.largest:g}"
            if 0 < largest < self.half.least:
                return f"'{name}' stays below {largest:.1e}, where {self.half.name} loses its digits"
        return None

    def _rule_reason(self, node: NodeProto) -> str | None:
        if node.op_type in _SUMS and self._addends(node) > _LONG:
            return f"it sums {self._addends(node)} values"
        if node.op_type in _SQUARES:
            return "its squares leave the range that its result shows"
        seen = all(name in self.observed for name in node.output if name and self.view.is_float(name))
        if node.op_type in _UNBOUNDED and not seen:
            return "nothing bounds its result, and no data were given to observe it"
        return None

    def _addends(self, node: NodeProto) -> int:
        """How many values a reduction adds up, as far as the graph tells; an open length counts as 1."""
        shape = self.view.types.get(node.input[0], (0, None))[1] or ()
        given = self.view.array(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        axes = attribute(node, "axes", None) if given is None else given.reshape(-1).tolist()
        if node.op_type == "GlobalAveragePool":
            axes = range(2, len(shape))
        sizes = shape if axes is None else [shape[axis] for axis in axes if -len(shape) <= axis < len(shape)]
        return int(np.prod([size for size in sizes if isinstance(size, int)], dtype=np.int64))


def _form_reason(view: View, node: NodeProto, half: Half) -> str | None:
    if node.domain not in ("", "ai.onnx"):
        return "it is no standard operator"
    if any(True for _ in subgraphs(node)):
        return "it holds a subgraph"
    if unknown := next((name for name in (*node.input, *node.output) if not _typed(view, name)), None):
        return f"the type of '{unknown}' is not known"
    if half.name == "bfloat16" and node.op_type not in _BFLOAT16:
        return f"the runtime has no bfloat16 kernel for {node.op_type}"
    if node.op_type != "Cast" and any(item.name == "dtype" and item.i == _FLOAT for item in node.attribute):
        return "its type is an attribute"
    takes = _half_arguments(view, node, half)
    for name, allowed in zip((*node.input, *node.output), takes, strict=True):
        if name and view.is_float(name) and not allowed and name in node.output:
            return f"{node.op_type} has no {half.name} form"
    inputs = [name for name in node.input if name and view.is_float(name)]
    if inputs and not any(takes[place] for place, name in enumerate(node.input) if name in inputs):
        return f"{node.op_type} has no {half.name} form"
    return None


def _typed(view: View, name: str) -> bool:
    """Whether the type of a tensor is known, or there is none; operators of a runtime's own hide theirs."""
    return not name or name in view.initializers or view.types.get(name, (0, None))[0] != 0


def _half_arguments(view: View, node: NodeProto, half: Half) -> list[bool]:
    """For each input, then output, whether the operator takes or gives it in half."""
    import onnx

    opset = next(item.version for item in view.model.opset_import if item.domain in ("", "ai.onnx"))
    schema = onnx.defs.get_schema(node.op_type, opset)
    kinds = {item.type_param_str: set(item.allowed_type_strs) for item in schema.type_constraints}

    def allowed(parameters: Any, count: int) -> Iterator[bool]:
        for place in range(count):
            parameter = parameters[min(place, len(parameters) - 1)]
            yield f"tensor({half.name})" in kinds.get(parameter.type_str, {parameter.type_str})

    return [*allowed(schema.inputs, len(node.input)), *allowed(schema.outputs, len(node.output))]


def write(model: ModelProto, half: Half, islands: set[str]) -> tuple[int, dict[str, str]]:
    """Change the model in place; gives the elements stored in half and the large constants that are not."""
    writer = _Writer(View(model), half)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        touches = any(writer.view.is_float(name) for name in (*node.input, *node.output) if name)
        if touches and node.name not in islands:
            nodes += writer.halved(node)
        else:
            nodes += writer.island(node)
    nodes += writer.outputs()
    replace_nodes(model, nodes)
    del model.graph.value_info[:]
    drop_unused_initializers(model)
    return writer.count, writer.kept()


class _Writer:
    """Walks the nodes; `halves` and `floats` hold the name of each tensor in either type."""

    def __init__(self, view: View, half: Half) -> None:
        self.view, self.half = view, half
        self.types = view.types
        self.names = {node.name for node in view.graph.node}
        self.halves: dict[str, str] = {}
        self.floats: dict[str, str] = {item.name: item.name for item in view.graph.input}
        self.count = 0
        self.fixed = view.outputs | view.captured

    def halved(self, node: NodeProto) -> Iterator[NodeProto]:
        """The node in half, behind the casts that it needs."""
        takes = _half_arguments(self.view, node, self.half)
        made = type(node).FromString(node.SerializeToString())
        for place, name in enumerate(node.input):
            if name and self.view.is_float(name):
                if takes[place] and node.op_type != "Cast":
                    yield from self._need_half(name)
                    made.input[place] = self.halves[name]
                elif name in self.halves and node.op_type == "Cast":
                    made.input[place] = self.halves[name]
                else:
                    yield from self._need_float(name)
        for place, name in enumerate(node.output):
            if name and self.view.is_float(name):
                made.output[place] = self.halves[name] = self.view.new_name(f"{name}_{self.half.name}")
        self._retype(made)
        yield made
        for name in node.output:
            if name in self.view.captured and self.view.is_float(name):
                yield from self._need_float(name)

    def _retype(self, node: NodeProto) -> None:
        from onnx import helper, numpy_helper

        for item in node.attribute:
            if node.op_type == "Cast" and item.name == "to" and item.i == _FLOAT:
                item.i = self.half.kind
            if item.HasField("t") and item.t.data_type == _FLOAT:
                item.t.CopyFrom(numpy_helper.from_array(self.half.array(numpy_helper.to_array(item.t))))
        if node.op_type == "ConstantOfShape" and not node.attribute:  # zeros of float32 by default
            zero = numpy_helper.from_array(self.half.array(np.zeros(1, np.float32)))
            node.attribute.append(helper.make_attribute("value", zero))

    def island(self, node: NodeProto) -> Iterator[NodeProto]:
        """The node as it is, behind the casts that it needs."""
        for name in node.input:
            if name and self.view.is_float(name):
                yield from self._need_float(name)
        yield node
        self.floats.update({name: name for name in node.output if name})

    def outputs(self) -> Iterator[NodeProto]:
        for item in self.view.graph.output:
            if item.name in self.halves and item.name not in self.floats:
                yield from self._need_float(item.name)

    def _need_half(self, name: str) -> Iterator[NodeProto]:
        if name in self.halves:
            return
        value = self.view.array(name)
        self.halves[name] = self.view.new_name(f"{name}_{self.half.name}")
        if value is None:
            yield self._cast(name, self.halves[name], self.half.kind)
            return
        self.count += value.size
        stored = self.view.add(self.halves[name], self.half.array(value))
        self.halves[name] = stored

    def _need_float(self, name: str) -> Iterator[NodeProto]:
        if name not in self.floats and name not in self.view.initializers:
            self.floats[name] = name
            yield self._cast(self.halves[name], name, _FLOAT)

    def _cast(self, source: str, target: str, kind: int) -> NodeProto:
        from onnx import helper

        return helper.make_node(
            "Cast", [source], [target], name=unique(f"Cast_{target}", self.names), to=kind
        )

    def kept(self) -> dict[str, str]:
        """Large constants that an island still reads in float32."""
        read = {name for node in self.view.graph.node for name in node.input}
        found = {}
        for name in read & set(self.view.initializers):
            value = self.view.array(name)
            if (
                value is not None
                and name not in self.halves
                and value.size >= 256
                and value.dtype == np.float32
            ):
                found[name] = self.half.misfit(value) or "a float32 island reads it"
        return found
