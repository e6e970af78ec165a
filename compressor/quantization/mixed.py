"""Mixed precision of a quantized graph: which layers are worth their time in float, as measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.quantization.partition import Choice, Node, Problem, chain, costs

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from compressor.quantization.view import View

__all__ = ["attribute", "choices", "few", "reduced"]

Kernels = Sequence[Mapping[str, Any]]
_SUFFIX = re.compile(r"(_nchwc|_nhwc|_token_\d+|/duplicated|_per_channel|_quant|/[A-Za-z]+)$")
_PAIR = re.compile(r"_(de)?quantized$")
_KERNELS = 3  # what a crossing costs: quantize or dequantize, transpose, reorder
_LEAST = 0.003  # ms that any kernel takes
_RATE = 1e-7  # ms for each element, where no large enough conversion was seen
_TINY = 1e-6  # share of the compute that counts for a node without multiply-accumulates
_LARGE = 50_000  # elements from which on a conversion tells of the time for each


def choices(folder: str, **given: Any) -> dict[str, Any]:
    """The task: nested sets of layers to leave in float, fastest first (see `partition.chain`).

    Given are `model`, its form `quantized` with `scheme` that was made without the nodes in `exclude`, what
    the task `sensitivity` gave, and the profiled kernels of the float engine (`floats`) and the quantized
    one (`integers`). Returns {"choices": [{"exclude": names, "ms", "error"}], "integer_ms", "float_ms"}:
    times are predictions from the profiles. The last choice, all in float, is left out. Where float beats
    every mix, layers are ranked by error alone, since a small engine may be wanted all the same.
    """
    problem = _problem(**given)
    found = chain(problem)
    if len(found) == 1 and problem.error:
        found = [
            Choice(choice.exclude, *costs(problem, choice.exclude)) for choice in chain(_by_number(problem))
        ]
    nothing, _ = costs(problem, [])
    all_float, _ = costs(problem, [node.name for node in problem.nodes])
    return {"choices": list(map(_row, found[:-1])), "float_ms": all_float, "integer_ms": nothing}


def _by_number(problem: Problem) -> Problem:
    """Every layer costs the same in float: for graphs where integers save no time at all, only bytes."""
    nodes = [
        replace(node, float_ms=float(not node.free), integer_ms=None if node.integer_ms is None else 0.0)
        for node in problem.nodes
    ]
    return replace(problem, nodes=nodes, conversion={})


def reduced(folder: str, layers: list[str], **given: Any) -> dict[str, Any]:
    """The task: `choices` that leave one of `layers` less in float and should be faster.

    Those that add least error for the time that they save come first.
    """
    problem = _problem(**given)
    ms, error = costs(problem, layers)
    found = []
    for layer in layers:
        rest = [name for name in layers if name != layer]
        less, more = costs(problem, rest)
        if less < ms:
            found.append(((more - error) / (ms - less), Choice(tuple(rest), less, more)))
    return {"choices": [_row(choice) for _, choice in sorted(found)]}


def few(folder: str, share: float, error: float, **given: Any) -> dict[str, Any]:
    """The task: the smallest set of layers without which the rest errs at most by `error`, if it is cheap.

    Layers cost their share of the multiply-accumulates, so that no profile is needed; {"choices": []} where
    the set costs more than `share`. Given are the arguments of `choices` without kernels; "ms" is None.
    """
    problem = _problem(**given, floats=(), integers=())
    found = next((choice for choice in chain(problem) if choice.error <= error), None)
    if found is None or found.ms > share or not found.exclude:
        return {"choices": []}
    return {"choices": [{**_row(found), "ms": None}]}


def _row(choice: Choice) -> dict[str, Any]:
    return {"exclude": list(choice.exclude), "ms": choice.ms, "error": choice.error}


def _problem(
    model: dict[str, Any],
    quantized: dict[str, Any],
    scheme: str,
    sensitivity: dict[str, Any],
    floats: Kernels,
    integers: Kernels,
    exclude: list[str] | None = None,
) -> Problem:
    from compressor.quantization import graph, placement, work
    from compressor.quantization import scheme as schemes
    from compressor.quantization.view import View

    view = View(graph.prepare(Path(model["path"])))
    placed = placement.place(view, schemes.named(scheme), frozenset(exclude or []))
    left = {operator["name"] for operator in quantized["facts"].get("float", [])}
    if floats:
        slow, fast = attribute(view.model, floats), attribute(view.model, integers)
    else:
        slow, fast = {name: max(share, _TINY) for name, share in work.by_node(view).items()}, {}
    nodes = []
    for node in view.graph.node:
        key = view.key(node)
        unit = key in placed.integer and node.name not in left
        free = key in placed.movers or node.op_type in ("Relu", "Clip")
        nodes.append(
            Node(
                node.name,
                tuple(name for name in node.input if name and name not in view.initializers),
                tuple(filter(None, node.output)),
                slow.get(node.name, 0.0),
                fast.get(node.name, 0.0) if unit or free else None,
                sensitivity["weights"].get(node.name, 0.0) if unit else 0.0,
                free and not unit,
            )
        )
    conversions = _conversions(view, integers) if integers else {}
    return Problem(nodes, conversions, sensitivity["activations"], frozenset(view.outputs))


def _conversions(view: View, integers: Kernels) -> dict[str, float]:
    """What it costs to take each float activation from integers to floats or back (ms)."""
    sizes = {
        name: prod(size if isinstance(size, int) else 1 for size in shape or ())
        for name, (kind, shape) in view.types.items()
        if kind == 1 and name not in view.initializers
    }
    rates = [
        max(0.0, kernel["ms"] - _LEAST) / sizes[name]
        for kernel in integers
        if kernel["op"] in ("QuantizeLinear", "DequantizeLinear")
        and sizes.get(name := _PAIR.sub("", _plain(kernel["name"])), 0) >= _LARGE
    ]
    rate = max([_RATE, *rates])
    return {name: _KERNELS * (_LEAST + rate * size) for name, size in sizes.items()}


def attribute(model: ModelProto, kernels: Kernels) -> dict[str, float]:
    """Milliseconds of each node of a prepared graph, by the name of the node.

    Runtimes name a fused kernel after the node or the tensor of one of its parts. The time of a kernel that
    only rearranges values goes to the next one that belongs to a node; what quantizes a tensor at the
    border of the graph is left out, since it is counted as a conversion.
    """
    finder = _Finder(model)
    found: dict[str, float] = {}
    waiting = 0.0
    for kernel in kernels:
        if kernel["op"] in ("QuantizeLinear", "DequantizeLinear"):
            continue
        name = finder.node(kernel)
        if name is None:
            waiting += kernel["ms"]
        else:
            found[name] = found.get(name, 0.0) + kernel["ms"] + waiting
            waiting = 0.0
    return found


class _Finder:
    """Finds the node behind the name of a kernel."""

    def __init__(self, model: ModelProto) -> None:
        self.nodes = {node.name: node for node in model.graph.node}
        self.makers = {name: node for node in model.graph.node for name in node.output if name}

    def node(self, kernel: Mapping[str, Any]) -> str | None:
        """The name of the node, that of the layer where the kernel is one."""
        for name in _stripped(kernel["name"]):
            found = self.nodes.get(name) or self.makers.get(name)
            if found is not None:
                return str(self._layer(found, kernel["op"]).name)
        return None

    def _layer(self, node: NodeProto, op: str) -> NodeProto:
        """Up from an absorbed operator to the layer that a kernel is called after."""
        wanted = next((kind for kind in ("Conv", "Gemm", "MatMul") if kind in op), None)
        start = node
        for _ in range(4):
            if wanted is None or wanted in node.op_type or not node.input:
                return node
            maker = self.makers.get(node.input[0])
            if maker is None:
                break
            node = maker
        return start


def _plain(name: str) -> str:
    *_, last = _stripped(name)
    return last


def _stripped(name: str) -> Iterator[str]:
    """A kernel's name, then without one after the other of the endings that runtimes add."""
    yield name
    while (shorter := _SUFFIX.sub("", name)) != name:
        name = shorter
        yield name
