"""In which types an ONNX engine computes: the optimized graph joined with what a profiled run executed.

A Q/DQ file promises integers; whether a kernel took them is decided by the runtime on the machine. So the
graph is read after ONNX Runtime's own optimizations, the shapes and times come from its profiler, and the
share is counted in multiply-accumulates (MACs).
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.runtimes._onnx_blocked import blocked_weight, convolution_weights
from serving.runtimes._precision import Kernel, summary

if TYPE_CHECKING:
    import onnx
    import onnxruntime

__all__ = ["INTEGER_OPERATORS", "Operator", "float_islands", "precision", "read_operators", "weights_by_type"]

INTEGER_OPERATORS = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulInteger16",
        "MatMulIntegerToFloat",
        "QAttention",
        "QEmbedLayerNormalization",
        "QGemm",
        "QLinearAdd",
        "QLinearAveragePool",
        "QLinearConcat",
        "QLinearConv",
        "QLinearConvTranspose",
        "QLinearGlobalAveragePool",
        "QLinearLeakyRelu",
        "QLinearMatMul",
        "QLinearMul",
        "QLinearReduceMean",
        "QLinearSigmoid",
        "QLinearSoftmax",
        "QLinearWhere",
    }
)
_TYPES = {"float": "float32", "double": "float64", "float32": "float32"}
_CONVERSIONS = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ReorderInput", "ReorderOutput"}
)
_CONTROL = frozenset({"If", "Loop", "Scan"})
_RESHAPED = frozenset(
    {"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "ReorderInput", "ReorderOutput"}
)

_PACKED = {"MatMulNBits": (1, 2, 3), "GatherBlockQuantized": (0, 2, 3)}  # data, scales, zero points

Shape = tuple[int, ...]


@dataclass
class Operator:
    """A node that ran, with the shapes that it really had (empty for an absent or unknown tensor)."""

    name: str
    type: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    shapes: list[Shape]
    output_shapes: list[Shape]
    output_type: str
    microseconds: float

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one execution; 0 for what is not a product of matrices."""
        count = _MACS.get(self.type)
        return count(self) if count else 0

    @property
    def integer(self) -> bool:
        """Whether the kernel computes on 8 bit integers."""
        if self.type == "MatMulNBits":
            return bool(self.attributes.get("accuracy_level") == 4)
        return self.type in INTEGER_OPERATORS

    @property
    def compute_type(self) -> str:
        """ "int8", or the name of the float type."""
        return "int8" if self.integer else _TYPES.get(self.output_type, self.output_type)


def precision(
    source: Path,
    options: onnxruntime.SessionOptions,
    profiled: Callable[[onnxruntime.SessionOptions], str],
    shapes: dict[str, Shape],
) -> dict[str, Any]:
    """Run the engine `source` once under the profiler and summarise; `shapes` are those of the inputs.

    `profiled` opens a session with the given options, runs it and returns the profile's path.
    See `_precision.summary` for the result.
    """
    with tempfile.TemporaryDirectory() as folder:
        graph_file = Path(folder, "optimized.onnx")
        options.optimized_model_filepath = str(graph_file)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", "weights.bin"
        )
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder, "profile"))
        events = json.loads(Path(profiled(options)).read_text())
        weights = convolution_weights(_load(source))
        operators = read_operators(_load(graph_file), events, shapes, weights)
    return _summary(operators)


def _load(path: Path) -> onnx.ModelProto:
    import onnx

    return onnx.load(str(path), load_external_data=False)


def weights_by_type(path: Path) -> dict[str, float]:
    """Share of an engine file's weights that is stored in each type ("float32", "int8", "int4", ...).

    Blocks of 4 bits count as what they stand for; their scales and zero points, and constants of other
    integer types (shapes, indices), count for nothing.
    """
    import onnx

    graph = _load(path).graph
    counts: dict[str, int] = defaultdict(int)
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in _PACKED:
            data, *parameters = (
                node.input[place] for place in _PACKED[node.op_type] if place < len(node.input)
            )
            bits = next((item.i for item in node.attribute if item.name == "bits"), 4)
            for name in parameters:
                initializers.pop(name, None)
            if packed := initializers.pop(data, None):
                counts[f"int{bits}"] += prod(packed.dims) * 8 // bits
    for tensor in initializers.values():
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        if "float" in kind or kind in ("double", "int8", "uint8", "int4", "uint4"):
            counts[_TYPES.get(kind, kind)] += prod(tensor.dims)
    total = sum(counts.values())
    return {name: count / total for name, count in sorted(counts.items()) if count}


def read_operators(
    model: onnx.ModelProto,
    events: list[dict[str, Any]],
    shapes: dict[str, Shape],
    weights: dict[str, Shape],
) -> list[Operator]:
    """What the profile's last run executed, in order, joined with the graph.

    `weights` are those of `convolution_weights`, for layers whose channels the runtime pads.
    """
    nodes = _NodeIndex(model.graph)
    known = {**shapes, **nodes.initializers}
    operators = []
    for event in _last_run(events):
        node = nodes.take(event["name"].removesuffix("_kernel_time"), event["args"]["op_name"])
        if node is None or node.op_type in _CONTROL:
            continue
        operator = _operator(node, event, known, blocked_weight(node, weights))
        known.update(zip(operator.outputs, operator.output_shapes, strict=False))
        operators.append(operator)
    return operators


def _last_run(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The node events of the last run, each with the lower quartile of its times over runs that went alike.

    Other processes only ever add to a time. The first run, which allocates memory, is left out unless it is
    the only one.
    """
    runs = _runs(events)
    runs = runs[1:] or runs
    names = [event["name"] for event in runs[-1]]
    alike = [run for run in runs if [event["name"] for event in run] == names]
    quarter = len(alike) // 4
    return [
        {**same[-1], "dur": sorted(event["dur"] for event in same)[quarter]}
        for same in zip(*alike, strict=True)
    ]


def _runs(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Node events, by run; a run's own event begins when it does."""
    starts = sorted(event["ts"] for event in events if event.get("name") == "model_run")
    runs: list[list[dict[str, Any]]] = [[] for _ in starts]
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs[bisect_right(starts, event["ts"]) - 1].append(event)
    return runs


class _NodeIndex:
    """All nodes and initializers of a graph and its subgraphs, to be taken by name and type in order."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.initializers: dict[str, Shape] = {}
        self._nodes: dict[tuple[str, str], deque[onnx.NodeProto]] = defaultdict(deque)
        self._add(graph)

    def _add(self, graph: onnx.GraphProto) -> None:
        self.initializers.update({tensor.name: tuple(tensor.dims) for tensor in graph.initializer})
        for node in graph.node:
            self._nodes[node.name, node.op_type].append(node)
            for attribute in node.attribute:
                for subgraph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                    self._add(subgraph)

    def take(self, name: str, op: str) -> onnx.NodeProto | None:
        """The next node of that name; the profiler calls a node without a name TYPE_INDEX.

        A node that runs more than once (in a loop) is given every time.
        """
        found = self._nodes.get((name, op)) or self._nodes.get(("", op))
        if not found:
            return None
        node = found[0]
        found.rotate(-1)
        return node


def _operator(
    node: onnx.NodeProto, event: dict[str, Any], known: dict[str, Shape], weight: Shape | None
) -> Operator:
    """A node that ran; `weight` is the true shape of the second input where the graph has a padded one."""
    import onnx

    outputs = [next(iter(item.items())) for item in event["args"]["output_type_shape"]]
    produced = [name for name in node.output if name]
    seen = {**_listed(node, event), **known}
    given = [tuple(shape) for _, shape in outputs]
    if weight is not None:
        seen[node.input[1]] = weight
        given[0] = (given[0][0], weight[0], *given[0][2:])
    return Operator(
        name=node.name or event["name"].removesuffix("_kernel_time"),
        type=node.op_type,
        inputs=list(node.input),
        outputs=produced,
        attributes={
            item.name: onnx.helper.get_attribute_value(item)
            for item in node.attribute
            if not item.HasField("g")
        },
        shapes=[seen.get(name, ()) for name in node.input],
        output_shapes=given,
        output_type=outputs[0][0] if outputs else "",
        microseconds=event["dur"],
    )


def _listed(node: onnx.NodeProto, event: dict[str, Any]) -> dict[str, Shape]:
    """Shapes of inputs as the profiler lists them: without absent ones and weights packed beforehand.

    They tell what comes from outside a subgraph. The first is the first input wherever that is no weight.
    """
    shapes = [tuple(shape) for item in event["args"]["input_type_shape"] for shape in item.values()]
    names = [name for name in node.input if name]
    return dict(zip(names if len(names) == len(shapes) else names[:1], shapes, strict=False))


def _conv(operator: Operator) -> int:
    weight = operator.shapes[3 if operator.type == "QLinearConv" else 1]
    return prod(operator.output_shapes[0]) * prod(weight[1:])


def _conv_transpose(operator: Operator) -> int:
    weight = operator.shapes[3 if operator.type.startswith("QLinear") else 1]
    return prod(operator.shapes[0]) * prod(weight[1:])


def _matmul(operator: Operator) -> int:
    left = operator.shapes[0]
    transposed = bool(operator.attributes.get("transA")) and len(left) > 1
    return prod(operator.output_shapes[0]) * (left[-2 if transposed else -1] if left else 0)


def _matmul_nbits(operator: Operator) -> int:
    return prod(operator.output_shapes[0]) * int(operator.attributes["K"])


def _recurrent(operator: Operator) -> int:
    steps, batch = operator.shapes[0][:2]
    return steps * batch * (prod(operator.shapes[1]) + prod(operator.shapes[2]))


def _einsum(operator: Operator) -> int:
    equation = operator.attributes["equation"].decode().replace(" ", "")
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.split("->")[0].split(","), operator.shapes, strict=False):
        letters = term.replace("...", "")
        rest = len(shape) - len(letters)
        ellipsis = [f".{axis}" for axis in range(rest)]
        at = term.find("...") if "..." in term else len(term)
        sizes.update(zip([*term[:at], *ellipsis, *letters[at:]], shape, strict=False))
    return prod(sizes.values()) if len(operator.shapes) > 1 else 0


def _projected_attention(operator: Operator) -> int:
    """`com.microsoft` Attention and QAttention: the projection of the input, then scores and their sum."""
    batch, length, width = operator.shapes[0]
    projected = operator.shapes[1][-1]
    hidden = operator.output_shapes[0][-1]
    return batch * length * width * projected + 2 * batch * length * length * hidden


def _attention(operator: Operator) -> int:
    """Attention of given queries and keys: (batch, length, width) or (batch, heads, length, width)."""
    query, key = operator.shapes[0], operator.shapes[1] or operator.shapes[0]
    return 2 * prod(query) * key[-2] if len(query) > 2 else 0


def _any_attention(operator: Operator) -> int:
    weights = operator.shapes[1] if len(operator.shapes) > 1 else ()
    return _projected_attention(operator) if len(weights) == 2 else _attention(operator)


_MACS: dict[str, Callable[[Operator], int]] = {
    **dict.fromkeys(("Conv", "FusedConv", "NhwcFusedConv", "ConvInteger", "QLinearConv"), _conv),
    **dict.fromkeys(("ConvTranspose", "QLinearConvTranspose"), _conv_transpose),
    **dict.fromkeys(
        (
            *("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulInteger", "MatMulInteger16", "QGemm"),
            *("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul"),
        ),
        _matmul,
    ),
    "MatMulNBits": _matmul_nbits,
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _recurrent),
    "Einsum": _einsum,
    **dict.fromkeys(("Attention", "QAttention"), _any_attention),
    **dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention"), _attention),
}


def _summary(operators: list[Operator]) -> dict[str, Any]:
    kernels = [
        Kernel(o.name, o.type, o.compute_type, o.macs, o.microseconds, o.integer, o.type in _CONVERSIONS)
        for o in operators
    ]
    return summary(kernels, float_islands(operators))


def float_islands(operators: list[Operator]) -> list[dict[str, Any]]:
    """Float operators with MACs in an engine that holds integers, largest first, and why they are float."""
    if not any(o.integer or o.type in ("QuantizeLinear", "DequantizeLinear") for o in operators):
        return []
    producer = {name: operator for operator in operators for name in operator.outputs}
    consumers: dict[str, list[Operator]] = defaultdict(list)
    for operator in operators:
        for name in operator.inputs:
            consumers[name].append(operator)
    islands = [
        {"name": o.name, "op": o.type, "macs": o.macs, "reason": _reason(o, producer, consumers)}
        for o in operators
        if o.macs and not o.integer
    ]
    return sorted(islands, key=lambda island: -int(island["macs"]))


def _reason(operator: Operator, producer: dict[str, Operator], consumers: dict[str, list[Operator]]) -> str:
    inputs = ["a quantized" if _dequantized(name, producer) else "a float" for name in operator.inputs[:2]]
    what = f"{inputs[0]} input" + (f" and {inputs[1]} weight or second input" if len(inputs) > 1 else "")
    if "a float" in inputs:
        return f"it has {what}"
    after = [consumer.type for name in operator.outputs for consumer in consumers[name]]
    if "QuantizeLinear" not in after:
        where = ", ".join(sorted(set(after))) or "an output"
        return f"its inputs are quantized, its output is not (it goes to {where})"
    return "inputs and output are quantized, but the runtime has no integer kernel for this combination"


def _dequantized(name: str, producer: dict[str, Operator]) -> bool:
    source = producer.get(name)
    while source is not None and source.type in _RESHAPED:
        source = producer.get(source.inputs[0])
    return source is not None and source.type == "DequantizeLinear"
