"""Constant nodes become initializers; nodes that read only constants are computed once."""

from __future__ import annotations

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
    is stored once; so do all large weights of a model that would not fit into one protobuf, a node that
    makes a graph output, and a table that the graph makes from much less.
    """
    view = View(model)
    small = sum(len(item.raw_data) for item in model.graph.initializer) > _INLINE_BYTES
    stay: set[str] = set()
    while folded := _constant_nodes(view, small, stay):
        made = {name for node in folded.values() for name in node.output if name}
        wanted = sorted(name for name in made if _read_outside(name, folded, view))
        values = _evaluate(model, list(folded.values()), wanted)
        grown = {value.name for value in values if _outgrows(value, folded, view)}
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
    known = set(view.initializers)
    folded: dict[str, NodeProto] = {}
    for node in view.model.graph.node:
        if View.key(node) not in stay and _foldable(node, known, view, small):
            folded[View.key(node)] = node
            known.update(node.output)
    return folded


def _outgrows(value: TensorProto, folded: dict[str, NodeProto], view: View) -> bool:
    """Whether storing `value` takes much more than storing all that it is made from."""
    makers = {name: node for node in folded.values() for name in node.output if name}
    sources, waiting, seen = 0, [value.name], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in makers:
            waiting += makers[name].input
        elif name in view.initializers:
            sources += view.initializers[name].ByteSize()
    return bool(value.ByteSize() > 2 * sources + _TABLE_BYTES)


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
        shared = len(view.consumers[name]) > 1 or name in view.captured
        if item is not None and (shared or small) and np.prod(item.dims) > _SHARED_LIMIT:
            return False
    return True


def _read_outside(name: str, folded: dict[str, NodeProto], view: View) -> bool:
    return name in view.captured or any(
        View.key(reader) not in folded for reader in view.consumers.get(name, [])
    )


def _evaluate(model: ModelProto, nodes: list[NodeProto], wanted: list[str]) -> list[TensorProto]:
    """The values of `wanted`, made by `nodes` from initializers."""
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
