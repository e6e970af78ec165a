"""Rules about the file itself: versions, weights that are there twice or for nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from compressor.quantization.lint.base import Hit, Rule, everywhere
from compressor.quantization.lint.graph import QuantizedGraph
from compressor.quantization.segments import names_read
from compressor.quantization.view import replace_nodes

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

__all__ = ["RULES"]

_LARGE = 256  # bytes; smaller constants are not worth a finding


def _bytes(tensor: TensorProto) -> int:
    return int(tensor.ByteSize())


def _duplicates(graph: QuantizedGraph) -> Iterator[Hit]:
    first: dict[bytes, str] = {}
    for name, tensor in graph.initializers.items():
        if _bytes(tensor) < _LARGE:
            continue
        digest = _digest(graph, name, tensor)
        if digest in first:
            yield Hit(None, f"'{name}' repeats '{first[digest]}' ({_bytes(tensor):,} bytes)", name)
        else:
            first[digest] = name


def _digest(graph: QuantizedGraph, name: str, tensor: TensorProto) -> bytes:
    value = graph.array(name)
    assert value is not None
    head = f"{tensor.data_type} {list(tensor.dims)}".encode()
    return hashlib.sha256(head + value.tobytes()).digest()


def _share(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    first: dict[bytes, str] = {}
    wanted = {hit.tensor: hit for hit in hits}
    for name, tensor in graph.initializers.items():
        if _bytes(tensor) < _LARGE:
            continue
        kept = first.setdefault(_digest(graph, name, tensor), name)
        if kept != name and name in wanted and name not in graph.outputs | graph.captured:
            graph.redirect(name, kept)
            yield wanted[name]


def _unread(graph: QuantizedGraph) -> Iterator[Hit]:
    for name, tensor in graph.initializers.items():
        if not graph.readers(name) and name not in graph.outputs | graph.captured:
            yield Hit(None, f"nothing reads '{name}' ({_bytes(tensor):,} bytes)", name)


def _drop(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    """The sweep behind every fix takes them out."""
    yield from hits


def _unsorted(graph: QuantizedGraph) -> Iterator[Hit]:
    made: set[str] = set()
    for node in graph.nodes():
        early = [name for name in names_read(node) if name in graph.producers and name not in made]
        if early:
            yield Hit(node, f"it stands before '{early[0]}' is made")
        made.update(node.output)


def _sort(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    """Each node behind what it reads, else in the file's order; a graph with a cycle is left alone."""
    waiting, made = graph.nodes(), set[str]()
    order: list[NodeProto] = []
    while waiting:
        ready = []
        for node in waiting:
            if all(name in made or name not in graph.producers for name in names_read(node)):
                ready.append(node)
                made.update(node.output)
        if not ready:
            return
        order += ready
        waiting = [node for node in waiting if not made.issuperset(filter(None, node.output))]
    yield from hits
    replace_nodes(graph.model, order)


def _too_new(graph: QuantizedGraph) -> Iterator[Hit]:
    version = graph.model.ir_version
    failure = _refusal(version, graph.opset)
    if failure:
        yield Hit(None, failure)


def _refusal(version: int, opset: int) -> str | None:
    """What the onnxruntime here says to a model of one Identity with these versions."""
    import onnxruntime
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", values[:1], values[1:])
    for tried, told in (((version, 13), f"IR version {version}"), ((8, opset), f"opset {opset}")):
        probe = helper.make_model(
            graph, ir_version=tried[0], opset_imports=[helper.make_opsetid("", tried[1])]
        )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            onnxruntime.InferenceSession(
                probe.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception:  # onnxruntime has a class for each status, below Exception itself
            return f"{told} is newer than onnxruntime {onnxruntime.__version__} takes"
    return None


def _lower(graph: QuantizedGraph, hits: Sequence[Hit]) -> Iterator[Hit]:
    """The IR version only; another opset may mean other results."""
    from onnx import helper

    needed = helper.find_min_ir_version_for(
        [item for item in graph.model.opset_import if item.domain in ("", "ai.onnx")], ignore_unknown=True
    )
    old = graph.model.ir_version
    graph.model.ir_version = min(old, max(needed, 10))
    if _refusal(graph.model.ir_version, graph.opset) is None:
        yield from hits
    else:
        graph.model.ir_version = old


RULES = (
    Rule(
        "FILE001", "weight stored twice", everywhere("info"), "the file is larger than it must be",
        "let all read one", _duplicates, _share, "nothing: the values are the same",
    ),
    Rule(
        "FILE002", "weight that nothing reads", everywhere("info"),
        "often the float weights left behind by a quantizer",
        "drop it", _unread, _drop, "nothing: it is not read",
    ),
    Rule(
        "FILE003", "nodes out of order", everywhere("warning"),
        "ONNX standard: nodes are sorted topologically", "sort them", _unsorted, _sort,
        "nothing: only the order of the nodes in the file",
    ),
    Rule(
        "ORT001", "file newer than the runtime", {"ort": "error"},
        "NVIDIA/TensorRT#4710; tried on the onnxruntime here",
        "export with an older opset and IR version", _too_new, _lower, "nothing: only the IR version changes",
    ),
)  # fmt: skip
