"""Edits that several fixes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.quantization.lint.graph import QuantizedGraph, is_dequantizer, is_quantizer

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["remove_pairs", "sweep"]


def remove_pairs(graph: QuantizedGraph, quantizer: NodeProto) -> bool:
    """Let the readers of a quantizer's dequantizers read its float input; false where codes are used too."""
    source, codes = quantizer.input[0], quantizer.output[0]
    readers = list(graph.readers(codes))
    if codes in graph.outputs or codes in graph.captured or not all(map(is_dequantizer, readers)):
        return False
    for reader in readers:
        if not _bypass(graph, reader, source):
            return False
        graph.remove(reader)
    graph.remove(quantizer)
    return True


def _bypass(graph: QuantizedGraph, node: NodeProto, source: str) -> bool:
    """Let all that read the node's output read `source`; a graph's output keeps its name."""
    name = node.output[0]
    if name in graph.captured:
        return False
    if name not in graph.outputs:
        graph.redirect(name, source)
        return True
    maker = graph.producers.get(source)
    if maker is None or source in graph.outputs or source in graph.captured:
        return False
    place = list(maker.output).index(source)
    graph.remove(node)
    maker.output[place] = name
    graph.producers.pop(source, None)
    graph.producers[name] = maker
    graph.redirect(source, name)
    return True


def sweep(graph: QuantizedGraph) -> None:
    """Take out what nothing reads any more: nodes from the end on, then initializers."""
    for node in reversed(graph.nodes()):
        names = [name for name in node.output if name]
        alive = any(name in graph.outputs or name in graph.captured or graph.readers(name) for name in names)
        if names and not alive and (is_quantizer(node) or is_dequantizer(node) or node.op_type == "Constant"):
            graph.remove(node)
    graph.commit()
    coded = {name for node in graph.nodes("QuantizeLinear", "DequantizeLinear") for name in node.output}
    declared = [item for item in graph.graph.value_info if item.name not in coded]  # types may have changed
    del graph.graph.value_info[:]
    graph.graph.value_info.extend(declared)
    read = {name for node in graph.graph.node for name in node.input} | graph.outputs | graph.captured
    kept = [item for item in graph.graph.initializer if item.name in read]
    if len(kept) < len(graph.graph.initializer):
        copies = [type(item).FromString(item.SerializeToString()) for item in kept]
        del graph.graph.initializer[:]
        graph.graph.initializer.extend(copies)
