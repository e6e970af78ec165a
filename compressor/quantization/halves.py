"""float16 and bfloat16 models computed in float32, with inputs and outputs of their own type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.view import subgraphs, unique

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, TensorProto

__all__ = ["widen"]

_FLOAT, _HALVES = 1, (10, 16)


def widen(model: ModelProto) -> None:
    """Make all computing float32 in place; a Cast stands behind each half input and before each half output.

    Integer kernels take float32 scales, and the runtime has few half kernels on a CPU.
    """
    graph = model.graph
    if not _holds_halves(graph):
        return
    inputs = [(item, item.type.tensor_type.elem_type) for item in graph.input]
    outputs = [(item, item.type.tensor_type.elem_type) for item in graph.output]
    _widen_graph(graph)
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    for item, kind in inputs:
        if kind in _HALVES:
            _rename_reads(graph, item.name, wide := unique(f"{item.name}_float32", taken))
            _cast(graph, item.name, wide, _FLOAT, at=0)
    for item, kind in outputs:
        if kind in _HALVES:
            wide = unique(f"{item.name}_float32", taken)
            _rename_writes(graph, item.name, wide)
            _cast(graph, wide, item.name, kind, at=len(graph.node))


def _holds_halves(graph: GraphProto) -> bool:
    typed = (*graph.input, *graph.output, *graph.value_info)
    if any(item.data_type in _HALVES for item in graph.initializer):
        return True
    return any(item.type.tensor_type.elem_type in _HALVES for item in typed)


def _widen_graph(graph: GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    del graph.value_info[:]
    for node in graph.node:
        for item in node.attribute:
            if item.HasField("t"):
                _widen_tensor(item.t)
            if item.name in ("to", "dtype") and item.i in _HALVES:
                item.i = _FLOAT
        for inner in subgraphs(node):
            for value in (*inner.input, *inner.output):
                if value.type.tensor_type.elem_type in _HALVES:
                    value.type.tensor_type.elem_type = _FLOAT
            _widen_graph(inner)


def _widen_tensor(tensor: TensorProto) -> None:
    from onnx import numpy_helper

    if tensor.data_type in _HALVES:
        value = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def _rename_reads(graph: GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        for inner in subgraphs(node):
            _rename_reads(inner, old, new)


def _rename_writes(graph: GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
    _rename_reads(graph, old, new)


def _cast(graph: GraphProto, source: str, target: str, kind: int, at: int) -> None:
    from onnx import helper

    graph.node.insert(
        at,
        helper.make_node(
            "Cast",
            [source],
            [target],
            name=unique(f"{target}_cast", {node.name for node in graph.node}),
            to=kind,
        ),
    )
