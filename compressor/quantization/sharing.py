"""Tensors that a runtime wants in one scale: inputs and outputs of operators that only carry values on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from compressor.quantization.scheme import Scheme
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import NodeProto

    from compressor.quantization.placement import Placement

__all__ = ["join"]


def join(view: View, scheme: Scheme, placement: Placement) -> None:
    """Let the pairs around operators of `scheme.equal` have one root, in place.

    A tensor whose scale is fixed joins none: an integer kernel that asks for another gets it rounded again.
    Operators without an integer kernel between two such pairs read the first one, so that the runtime may
    drop both.
    """
    groups = _Groups(list(dict.fromkeys(placement.pairs.values())))
    for node in view.graph.node:
        output = placement.written.get(View.key(node), View.key(node))
        if node.op_type not in scheme.equal or output not in placement.pairs:
            continue
        for reader, name in _sources(view, scheme, placement, node):
            if _fixed(view, scheme, placement.pairs[name]) or _fixed(view, scheme, placement.pairs[output]):
                if View.key(reader) in placement.integer:
                    placement.rescaled[View.key(reader), name] = placement.pairs[output]
                continue
            groups.unite(placement.pairs[output], placement.pairs[name])
            if View.key(reader) not in placement.integer:
                placement.movers.add(View.key(reader))
    placement.joined = groups.joined()
    placement.pairs = {name: groups.find(root) for name, root in placement.pairs.items()}
    placement.rescaled = {key: groups.find(root) for key, root in placement.rescaled.items()}


def _sources(
    view: View, scheme: Scheme, placement: Placement, node: NodeProto
) -> Iterator[tuple[NodeProto, str]]:
    """Tensors with a pair that a node carries on, also through others of its kind, and who reads each."""
    for name in dict.fromkeys(node.input):
        maker = view.producers.get(name)
        if name in placement.pairs:
            yield node, name
        elif maker is not None and maker.op_type in scheme.equal and view.is_float(name):
            yield from _sources(view, scheme, placement, maker)


def _fixed(view: View, scheme: Scheme, root: str) -> bool:
    maker = view.producers.get(root)
    return maker is not None and maker.op_type in scheme.fixed


class _Groups:
    """Disjoint sets of roots; the one that comes first stands for its set."""

    def __init__(self, roots: list[str]) -> None:
        self.order = {root: place for place, root in enumerate(roots)}
        self.parent = {root: root for root in roots}

    def find(self, root: str) -> str:
        while self.parent[root] != root:
            root = self.parent[root]
        return root

    def unite(self, one: str, other: str) -> None:
        first, second = sorted((self.find(one), self.find(other)), key=self.order.__getitem__)
        self.parent[second] = first

    def joined(self) -> dict[str, tuple[str, ...]]:
        """The members of every set with more than one."""
        sets: dict[str, list[str]] = {}
        for root in self.order:
            sets.setdefault(self.find(root), []).append(root)
        return {root: tuple(members) for root, members in sets.items() if len(members) > 1}
