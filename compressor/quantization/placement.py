"""Where quantization pairs stand, so that the runtime really runs integer kernels.

Nodes are sorted into those that compute in integers, those that only move or absorb values, and those that
stay float. From that follow the tensors that need a pair of QuantizeLinear and DequantizeLinear. A tensor
between a float producer and float readers gets none, so float chains (attention scores and their mask,
normalization, shape arithmetic, sums over a free length) are never clipped.

Facts about onnxruntime's CPU kernels behind the rules (seen in its optimized graphs): a Conv runs in
integers only if its output is quantized too, a Gemm or MatMul also with float output; Relu and Clip vanish
into a following QuantizeLinear if its range lies inside theirs; movers of values (Reshape, MaxPool, ...)
run on integers between two pairs of one scale, except Pad and DepthToSpace, which must be written on the
integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compressor.quantization.layers import LAYERS, Use, clip_bounds, float_reason, storage_uses, weight_uses
from compressor.quantization.residuals import skips
from compressor.quantization.scheme import Scheme
from compressor.quantization.sharing import join
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["STORED", "FloatOperator", "Placement", "place", "tensors"]

STORED = "; its weight is stored as int8"


@dataclass(frozen=True)
class FloatOperator:
    """A compute operator that stays float, and why."""

    name: str
    op: str
    reason: str


@dataclass
class Placement:
    """What becomes of every node and tensor.

    `integer` holds keys of nodes with an integer kernel; `pairs` maps each tensor that gets a pair to the
    tensor whose range it shares (itself, or where the values came from); of those, `replaced` are seen by
    all their readers through the pair, the others by integer readers only. `movers` hand integers on,
    `integer_forms` are those of them to be written on integers; `excluded` nodes are left alone on request.
    `written` maps kernels to the tensor their pair stands on, where that is not their own output. `joined`
    are the tensors whose ranges one root covers, where there are several; `rescaled` maps a node's key and
    input, which has another scale than the node asks for, to the root that it is rounded to.
    `uses` are weights of integer layers, `stored` weights that are only stored as int8.
    """

    integer: set[str] = field(default_factory=set)
    pairs: dict[str, str] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    movers: set[str] = field(default_factory=set)
    integer_forms: set[str] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rescaled: dict[tuple[str, str], str] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    stored: list[Use] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    float: list[FloatOperator] = field(default_factory=list)


def tensors(model: ModelProto, scheme: Scheme) -> list[str]:
    """The float activations of a prepared model whose ranges `place` needs, in graph order."""
    placement = place(View(model), scheme)
    roots = {name for root in placement.pairs.values() for name in placement.joined.get(root, (root,))}
    order = [item.name for item in model.graph.input]
    order += [name for node in model.graph.node for name in node.output]
    return [name for name in order if name in roots]


def place(
    view: View,
    scheme: Scheme,
    exclude: frozenset[str] = frozenset(),
    unusable: dict[str, str] | None = None,
) -> Placement:
    """Decide the placement; nodes named in `exclude` stay float.

    `unusable` maps tensors that must not be quantized to the reason (never observed, a range without
    meaning).
    """
    reasons = _reasons(view, scheme, exclude)
    while True:
        placement = _Solver(view, scheme, reasons).solve()
        blocked = _blocked(view, placement, unusable or {}, reasons)
        if not blocked:
            break
        reasons.update(blocked)
    integer = placement.integer
    placement.excluded = {View.key(node) for node in view.graph.node if node.name in exclude}
    placement.uses = [use for use in weight_uses(view, scheme) if use.node in integer]
    stores = storage_uses(view, scheme) if scheme.stores else ()
    placement.stored = [use for use in stores if use.node not in integer | placement.excluded]
    stored = {use.node for use in placement.stored}
    placement.float = [
        FloatOperator(
            node.name,
            node.op_type,
            reasons.get(key, "its input is not quantized") + (STORED if key in stored else ""),
        )
        for node in view.graph.node
        if node.op_type in LAYERS and (key := View.key(node)) not in integer
    ]
    return placement


def _reasons(view: View, scheme: Scheme, exclude: frozenset[str]) -> dict[str, str]:
    """Why nodes must stay float, by key."""
    reasons: dict[str, str] = {}
    for node in view.graph.node:
        reason = "left in float on request" if node.name in exclude else float_reason(view, node, scheme)
        if reason:
            reasons[View.key(node)] = reason
    return reasons


def _blocked(
    view: View, placement: Placement, unusable: dict[str, str], reasons: dict[str, str]
) -> dict[str, str]:
    """Integer nodes that touch a tensor without a usable range."""
    found = {}
    bad = {
        name: unusable[member]
        for name, root in placement.pairs.items()
        for member in placement.joined.get(root, (root,))
        if member in unusable
    }
    for key in placement.integer:
        node = view.producers[key]
        for name in (*node.input, *_written(view, node, placement)):
            if name in bad and key not in reasons:
                found[key] = bad[name]
    return found


def _written(view: View, node: NodeProto, placement: Placement) -> list[str]:
    """The tensor that a node writes, and the one behind an absorbed activation."""
    names = [View.key(node)]
    reader = view.only_reader(names[0])
    return [*names, View.key(reader)] if reader is not None else names


class _Solver:
    """Finds the largest consistent set of integer nodes, then the tensors that need pairs."""

    def __init__(self, view: View, scheme: Scheme, reasons: dict[str, str]) -> None:
        self.view, self.scheme = view, scheme
        self.nodes = list(view.graph.node)
        self.layers = {
            View.key(node) for node in self.nodes
            if node.op_type in scheme.compute and View.key(node) not in reasons
        }  # fmt: skip
        found = skips(view, scheme, self.layers)
        self.skips = {key: name for key, name in found.items() if key not in reasons}
        self.kernels = self.layers | self.skips.keys()
        self.integer = self.kernels | {
            View.key(node) for node in self.nodes
            if node.op_type in scheme.elementwise and View.key(node) not in reasons
        }  # fmt: skip
        self.movers = {
            View.key(node) for node in self.nodes
            if node.op_type in scheme.pass_through | scheme.on_integers and View.key(node) not in reasons
        }  # fmt: skip

    def solve(self) -> Placement:
        while True:
            self._flow()
            dropped = {key for key in self.integer - self.kernels if not self._pays(key)}
            if not dropped:
                break
            self.integer -= dropped
        placement = Placement(integer=self.integer)
        self._place_pairs(placement)
        join(self.view, self.scheme, placement)
        return placement

    def _flow(self) -> None:
        """`wanted`: an integer kernel reads it. `integral`: it comes from a kernel that gives integers."""
        self.wanted: set[str] = set(self.view.outputs) if self.scheme.outputs == "codes" else set()
        for node in reversed(self.nodes):
            key = View.key(node)
            if key in self.integer:
                self.wanted.update(self._data(node))
            elif self._moves(node) and self.wanted & set(node.output):
                self.wanted.add(node.input[0])
        self.integral: set[str] = set()
        for node in self.nodes:
            if self._feeds_integers(node) or (self._moves(node) and node.input[0] in self.integral):
                self.integral.update(filter(None, node.output))

    def _moves(self, node: NodeProto) -> bool:
        return View.key(node) in self.movers or (
            node.op_type in self.scheme.absorbed and self.view.is_float(node.input[0])
        )

    def _gives_integers(self, node: NodeProto) -> bool:
        """Kernels that may also give floats write integers only if all readers take them."""
        return View.key(node) in self.integer and node.op_type not in self.scheme.writes_float

    def _feeds_integers(self, node: NodeProto) -> bool:
        """Whether an elementwise kernel that reads the node's output has an integer source in it."""
        behind = self.scheme.where == "behind" and View.key(node) in self.integer
        return behind or self._gives_integers(node)

    def _data(self, node: NodeProto) -> list[str]:
        """The float activations that an integer kernel reads."""
        if View.key(node) in self.skips:
            return [self.skips[View.key(node)]]
        names = node.input[:1] if node.op_type in ("Conv", "Gemm", "MatMul") else node.input
        return [name for name in names if name and name not in self.view.initializers]

    def _pays(self, key: str) -> bool:
        """An integer source on one side, an integer reader on the other, as far as the scheme asks for it."""
        node = self.view.producers[key]
        sources = [name in self.integral for name in self._data(node)]
        if self.scheme.where == "behind":
            hidden = self.scheme.outputs != "float" or self._behind(node) not in self.view.outputs
            return all(sources) and hidden
        return key in self.wanted and (any(sources) if self.scheme.where == "between" else all(sources))

    def _place_pairs(self, placement: Placement) -> None:
        for item in self.view.graph.input:
            if self._read_by_kernel(item.name):
                self._pair(placement, item.name, replaced=False)
        for node in self.nodes:
            key = View.key(node)
            if key in self.integer and self._writes_integers(node):
                name = self._behind(node)
                placement.written |= {key: name} if name != key else {}
                self._pair(placement, name, replaced=True)
            elif key in self.movers and node.input[0] in placement.pairs and self._used(node):
                self._move(placement, node)
            for name in filter(None, node.output):
                if name not in placement.pairs and self._read_by_kernel(name):
                    self._pair(placement, name, replaced=False)

    def _writes_integers(self, node: NodeProto) -> bool:
        if self._gives_integers(node):
            return True
        name = self._behind(node)
        outside = name in self.view.outputs or name in self.view.captured
        return (
            name in self.wanted and not outside and all(map(self._takes, self.view.consumers.get(name, [])))
        )

    def _takes(self, reader: NodeProto) -> bool:
        key = View.key(reader)
        return key in self.integer or (key in self.movers and bool(self.wanted & set(reader.output)))

    def _behind(self, node: NodeProto) -> str:
        """What a kernel's pair stands on: its output, or that of the Relu or Clip it absorbs."""
        name = View.key(node)
        reader = self.view.only_reader(name)
        if reader is not None and reader.op_type in self.scheme.absorbed and clip_bounds(self.view, reader):
            return View.key(reader)
        return name

    def _used(self, node: NodeProto) -> bool:
        return bool(self.wanted & set(node.output))

    def _move(self, placement: Placement, node: NodeProto) -> None:
        root = placement.pairs[node.input[0]]
        placement.movers.add(View.key(node))
        if node.op_type in self.scheme.on_integers:
            placement.integer_forms.add(View.key(node))
        for name in filter(None, node.output):
            placement.pairs[name] = root
            placement.replaced.add(name)

    def _read_by_kernel(self, name: str) -> bool:
        return any(
            View.key(reader) in self.integer and name in self._data(reader)
            for reader in self.view.consumers.get(name, [])
        )

    @staticmethod
    def _pair(placement: Placement, name: str, *, replaced: bool) -> None:
        placement.pairs[name] = name
        if replaced:
            placement.replaced.add(name)
