"""One graph that is both the float and the quantized network, with a switch at every place they differ.

A float graph and its Q/DQ form share their nodes' names. Where an input of a node differs between the
two, the merged graph chooses by one element of the boolean input `switches`. So the effect of any set of
layers is measured by running one session, not by building a graph for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.view import unique

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["SWITCHES", "Edge", "merge"]

SWITCHES = "layer_switches"


@dataclass(frozen=True)
class Edge:
    """Input `index` of the node named `reader` ("" for a graph output), which reads `tensor` in float."""

    reader: str
    index: int
    tensor: str


def merge(reference: ModelProto, quantized: ModelProto) -> tuple[ModelProto, list[Edge]]:
    """The merged graph and its edges; element i of `switches` (bool [edges]) quantizes edge i.

    Both models are used up. With all switches off the graph computes what `reference` does, with all on
    what `quantized` does, pairs simulated in float.
    """
    return _Merger(reference, quantized).merge()


class _Merger:
    """Takes the reference as it is, adds what only the quantized graph has, and joins them edge by edge."""

    def __init__(self, reference: ModelProto, quantized: ModelProto) -> None:
        self.model, self.other = reference, quantized
        self.nodes = {node.name: node for node in reference.graph.node}
        self.made = {name for node in reference.graph.node for name in node.output if name}
        self.initializers = {item.name: item for item in reference.graph.initializer}
        everything = (*reference.graph.node, *quantized.graph.node)
        self.names = {name for node in everything for name in (*node.input, *node.output)}
        self.names |= {*self.initializers, *(item.name for item in quantized.graph.initializer)}
        self.alias: dict[str, str] = {}
        self.edges: list[Edge] = []
        self.chosen: list[NodeProto] = []

    def merge(self) -> tuple[ModelProto, list[Edge]]:
        extra = self._extra()
        for node in self.other.graph.node:
            if node.name not in extra:
                self._join(self.nodes[node.name], node)
        self._outputs()
        added = [node for node in self.other.graph.node if node.name in extra]
        self._write(self._renamed(added))
        return self.model, self.edges

    def _extra(self) -> set[str]:
        """Nodes that only the quantized graph has, or has in a form that reads integers."""
        codes = {item.name for item in self.other.graph.initializer if item.data_type in (2, 3, 6)}
        for node in self.other.graph.node:
            if node.op_type == "QuantizeLinear" or (
                node.op_type not in ("DequantizeLinear", "Cast") and node.input and node.input[0] in codes
            ):
                codes.update(node.output)
        extra = {
            node.name
            for node in self.other.graph.node
            if node.name not in self.nodes or (node.input and node.input[0] in codes)
        }
        self._aliases(extra)
        return extra

    def _aliases(self, extra: set[str]) -> None:
        """New names for what both graphs call by one name though it differs, and the other way round."""
        for node in self.other.graph.node:
            if node.name in extra:
                self.alias |= {
                    name: unique(f"{name}_other", self.names) for name in node.output if name in self.made
                }
            else:
                pairs = zip(node.output, self.nodes[node.name].output, strict=True)
                self.alias |= {ours: theirs for ours, theirs in pairs if ours != theirs}
        for item in self.other.graph.initializer:
            mine = self.initializers.get(item.name)
            if mine is None or mine.SerializeToString() != item.SerializeToString():
                name = item.name if mine is None else unique(f"{item.name}_other", self.names)
                self.alias[item.name] = name
                added = self.model.graph.initializer.add()
                added.CopyFrom(item)
                added.name = name

    def _join(self, node: NodeProto, other: NodeProto) -> None:
        """Let a node read either form of each input that differs."""
        while len(node.input) < len(other.input):
            node.input.append(self._nothing(other.input[len(node.input)]))
        for index, (mine, theirs) in enumerate(zip(list(node.input), other.input, strict=True)):
            theirs = self.alias.get(theirs, theirs)
            if mine != theirs:
                node.input[index] = self._choice(Edge(node.name, index, mine), theirs)

    def _nothing(self, bias: str) -> str:
        """Zeros in the place of a bias that only the quantized layer has."""
        from onnx import numpy_helper

        codes = next(node.input[0] for node in self.other.graph.node if bias in node.output)
        like = next(item for item in self.other.graph.initializer if item.name == codes)
        name = unique(f"{bias}_zeros", self.names)
        zeros = numpy_helper.from_array(np.zeros(tuple(like.dims), np.float32), name)
        self.model.graph.initializer.add().CopyFrom(zeros)
        return name

    def _outputs(self) -> None:
        for index, item in enumerate(self.model.graph.output):
            theirs = self.alias.get(item.name, item.name)
            if theirs != item.name:
                item.name = self._choice(Edge("", index, item.name), theirs)

    def _choice(self, edge: Edge, other: str) -> str:
        from onnx import TensorProto, helper

        number = len(self.edges)
        self.edges.append(edge)
        place = unique(f"switch_{number}_place", self.names)
        self.model.graph.initializer.add().CopyFrom(
            helper.make_tensor(place, TensorProto.INT64, [], [number])
        )
        switch, value = unique(f"switch_{number}", self.names), unique(f"choice_{number}", self.names)
        self.chosen.append(helper.make_node("Gather", [SWITCHES, place], [switch], name=switch))
        self.chosen.append(helper.make_node("Where", [switch, other, edge.tensor], [value], name=value))
        return value

    def _renamed(self, nodes: Iterable[NodeProto]) -> list[NodeProto]:
        found = []
        for node in nodes:
            node.name = f"{node.name}_other" if node.name in self.nodes else node.name
            node.input[:] = [self.alias.get(name, name) for name in node.input]
            node.output[:] = [self.alias.get(name, name) for name in node.output]
            found.append(node)
        return found

    def _write(self, added: list[NodeProto]) -> None:
        """All nodes, each behind what it reads."""
        from onnx import TensorProto, helper

        graph = self.model.graph
        switches = helper.make_tensor_value_info(SWITCHES, TensorProto.BOOL, [len(self.edges)])
        waiting = [
            type(node).FromString(node.SerializeToString()) for node in (*added, *self.chosen, *graph.node)
        ]
        del graph.node[:]
        del graph.value_info[:]
        graph.input.append(switches)
        graph.node.extend(_sorted(waiting))


def _sorted(nodes: list[NodeProto]) -> list[NodeProto]:
    """Topological order (Kahn); what a subgraph reads from outside counts as read by its node."""
    from compressor.quantization.segments import names_read

    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    needs = [
        {makers[name] for name in names_read(node) if name in makers} - {place}
        for place, node in enumerate(nodes)
    ]
    readers: dict[int, list[int]] = {}
    for place, found in enumerate(needs):
        for maker in found:
            readers.setdefault(maker, []).append(place)
    ready = [place for place, found in enumerate(needs) if not found]
    order = []
    while ready:
        place = ready.pop()
        order.append(nodes[place])
        for reader in readers.get(place, []):
            needs[reader].discard(place)
            if not needs[reader]:
                ready.append(reader)
    return order
