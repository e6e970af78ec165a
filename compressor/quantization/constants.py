"""Constant nodes become initializers; nodes that read only constants are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.view import View, replace_nodes, subgraphs

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

__all__ = ["drop_unused_initializers", "fold_constants", "lift_constants"]

_INLINE_BYTES = 1 << 30
_NOT_PURE = {
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}
_TABLE_BYTES = 1 << 14  # what may be stored without asking from how little it is made
_SHARED_LIMIT = 4096  # elements; a larger constant that others read too is not copied into a changed form


def lift_constants(model: ModelProto) -> None:
    """Turn the Constant nodes of the top-level graph into initializers."""
    kept = []
    for node in model.graph.node:
        tensor = _value(node) if node.op_type == "Constant" else None
        if tensor is None:
            kept.append(node)
        else:
            tensor.name = node.output[0]
            model.graph.initializer.append(tensor)
    replace_nodes(model, kept)


def fold_constants(model: ModelProto) -> None:
    """Compute every node whose inputs are all constant, in one session of onnxruntime.

    A large weight that is also read elsewhere (a tied table and its transpose) stays as it is, so that it
    is stored once; one that only such nodes read (gates of an LSTM, cut apart and put together in another
    order) does not. All large weights stay of a model that would not fit into one protobuf; so do a node that
    makes a graph output, and a table that the graph makes from much less.
    """
    view = View(model)
    small = sum(len(item.raw_data) for item in model.graph.initializer) > _INLINE_BYTES
    stay: set[str] = set()
    while folded := _constant_nodes(view, small, stay):
        made = {name for node in folded.values() for name in node.output if name}
        wanted = sorted(name for name in made if _read_outside(name, folded, view))
        values = _evaluate(model, list(folded.values()), wanted)
        grown = _outgrown(values, folded, view)
        if not grown:
            break
        stay |= {key for key, node in folded.items() if grown & set(node.output)}
    if not folded:
        return
    model.graph.initializer.extend(values)
    replace_nodes(model, [node for node in model.graph.node if View.key(node) not in folded])
    drop_unused_initializers(model)


def _constant_nodes(view: View, small: bool, stay: set[str]) -> dict[str, NodeProto]:
    """The nodes that can be computed once and for all, by key, but for those that `stay`."""
    kept: set[str] = set()  # shared weights that a node reads which is not computed
    while True:
        known = set(view.initializers)
        folded: dict[str, NodeProto] = {}
        for node in view.model.graph.node:
            if View.key(node) not in stay and _foldable(node, known - kept, view, small):
                folded[View.key(node)] = node
                known.update(node.output)
        more = {name for node in folded.values() for name in node.input if _torn(name, folded, view)} - kept
        if not more:
            return folded
        kept |= more


def _torn(name: str, folded: dict[str, NodeProto], view: View) -> bool:
    """Whether a large weight would be stored twice, as some that read it are not computed."""
    item = view.initializers.get(name)
    if item is None or np.prod(item.dims) <= _SHARED_LIMIT:
        return False
    return name in view.outputs or _read_outside(name, folded, view)


def _outgrown(values: Sequence[TensorProto], folded: dict[str, NodeProto], view: View) -> set[str]:
    """Those of `values` that take much more to store than all that they are made from.

    Values that are made from one large weight are counted together.
    """
    makers = {name: node for node in folded.values() for name in node.output if name}
    sources = {value.name: _sources(value.name, makers, view) for value in values}
    sharing: dict[str, list[TensorProto]] = {}
    found = set()
    for value in values:
        size = sum(view.initializers[name].ByteSize() for name in sources[value.name])
        if value.ByteSize() > 2 * size + _TABLE_BYTES:
            found.add(value.name)
        for name in sources[value.name]:
            if np.prod(view.initializers[name].dims) > _SHARED_LIMIT:
                sharing.setdefault(name, []).append(value)
    for together in sharing.values():
        origin = set().union(*(sources[value.name] for value in together))
        size = sum(view.initializers[name].ByteSize() for name in origin)
        if len(together) > 1 and sum(value.ByteSize() for value in together) > size + _TABLE_BYTES:
            found |= {value.name for value in together}
    return found


def _sources(name: str, makers: dict[str, NodeProto], view: View) -> set[str]:
    """The initializers that a value is made from."""
    found, waiting, seen = set(), [name], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in makers:
            waiting += makers[name].input
        elif name in view.initializers:
            found.add(name)
    return found


def drop_unused_initializers(model: ModelProto) -> None:
    """Remove initializers that nothing reads."""
    view = View(model)
    used = set(view.consumers) | view.outputs | view.captured
    kept = [item for item in model.graph.initializer if item.name in used]
    if len(kept) < len(model.graph.initializer):
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)


def _value(node: NodeProto) -> TensorProto | None:
    from onnx import TensorProto, numpy_helper

    item = node.attribute[0]
    if item.name == "value":
        copy = TensorProto()
        copy.CopyFrom(item.t)
        return copy
    kinds = {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
    }
    if item.name not in kinds:
        return None
    value = {
        "value_float": item.f,
        "value_floats": list(item.floats),
        "value_int": item.i,
        "value_ints": list(item.ints),
    }
    return numpy_helper.from_array(np.asarray(value[item.name], kinds[item.name]))


def _foldable(node: NodeProto, known: set[str], view: View, small: bool) -> bool:
    if node.op_type in _NOT_PURE or node.domain not in ("", "ai.onnx") or any(True for _ in subgraphs(node)):
        return False
    if not node.input or view.outputs & set(node.output):
        return False
    for name in filter(None, node.input):
        if name not in known:
            return False
        item = view.initializers.get(name)
        if item is not None and small and np.prod(item.dims) > _SHARED_LIMIT:
            return False
    return True


def _read_outside(name: str, folded: dict[str, NodeProto], view: View) -> bool:
    return name in view.captured or any(
        View.key(reader) not in folded for reader in view.consumers.get(name, [])
    )


def _evaluate(model: ModelProto, nodes: list[NodeProto], wanted: list[str]) -> list[TensorProto]:
    """The values of `wanted`, made by `nodes` from initializers."""
    if not wanted:  # nothing reads what the nodes make
        return []
    import onnxruntime
    from onnx import ValueInfoProto, helper, numpy_helper

    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes, "constants", [], [ValueInfoProto(name=name) for name in wanted],
        [item for item in model.graph.initializer if item.name in read],
    )  # fmt: skip
    part = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        part.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in zip(wanted, session.run(wanted, {}), strict=True)
    ]
