"""A graph cut into pieces that run one after the other and give chosen tensors on the way.

A session that has to give a hundred inner tensors holds all of them at once. Cut after every few, only
those of one piece and what later pieces read are in memory, close to what the plain model needs. Cuts lie
right behind a chosen tensor, which no fusion could have removed, so the pieces compute what the whole does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.quantization.view import TensorType, subgraphs, tensor_types

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["names_read", "write_segments"]

_TENSORS = 4  # chosen tensors in a piece, or more where that would make too many
_PIECES = 32  # each is a session with threads of its own
_INLINE = 1 << 30  # bytes of weights that go into the file itself


def write_segments(
    model: ModelProto, tensors: Sequence[str], folder: Path, stem: str, few: int | None = None
) -> list[Path]:
    """Write the pieces as `folder/STEM-0.onnx` and so on; nodes that no chosen tensor needs are left out.

    Each piece has as inputs what it reads of the graph's inputs and of earlier pieces, and as outputs the
    chosen tensors that it makes, `few` of them, and what later pieces read. Weights above 1 GiB lie in a
    file beside.
    """
    nodes = _needed(model, set(tensors))
    types = tensor_types(model)
    few = few or max(_TENSORS, -(-len(set(tensors)) // _PIECES))
    cuts = _cuts(nodes, set(tensors), types, few)
    later: set[str] = set()
    segments = []
    for start, stop in reversed(list(zip([0, *cuts], [*cuts, len(nodes)], strict=True))):
        piece = nodes[start:stop]
        made = [name for node in piece for name in node.output if name in later or name in tensors]
        reads = {name for node in piece for name in names_read(node)}
        reads -= {name for node in piece for name in node.output}
        later |= reads
        if made:
            segments.append((piece, reads, made))
    paths = []
    for number, (piece, reads, made) in enumerate(reversed(segments)):
        paths.append(folder / f"{stem}-{number}.onnx")
        _save(_segment(model, piece, reads, made, types), paths[-1])
    return paths


def _needed(model: ModelProto, wanted: set[str]) -> list[NodeProto]:
    wanted = set(wanted)
    kept = []
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(names_read(node))
    return kept[::-1]


def _cuts(nodes: Sequence[NodeProto], chosen: set[str], types: dict[str, TensorType], few: int) -> list[int]:
    """Where to cut: after every few chosen tensors, where all that crosses the cut is of a known type."""
    last = {name: place for place, node in enumerate(nodes) for name in names_read(node)}
    cuts, count = [], 0
    alive: set[str] = set()
    for place, node in enumerate(nodes):
        alive.update(name for name in node.output if last.get(name, -1) > place)
        alive = {name for name in alive if last[name] > place}
        found = len(chosen.intersection(node.output))
        count += found
        if found and count >= few and place + 1 < len(nodes) and alive <= types.keys():
            cuts.append(place + 1)
            count = 0
    return cuts


def names_read(node: NodeProto) -> Iterator[str]:
    """Names that a node reads, those of its subgraphs included (and, harmlessly, their own)."""
    yield from filter(None, node.input)
    for graph in subgraphs(node):
        yield from (item.name for item in graph.output)
        for inner in graph.node:
            yield from names_read(inner)


def _segment(
    model: ModelProto,
    nodes: Sequence[NodeProto],
    reads: set[str],
    made: Sequence[str],
    types: dict[str, TensorType],
) -> ModelProto:
    import onnx

    piece = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    piece.functions.extend(model.functions)
    graph: GraphProto = piece.graph
    graph.name = model.graph.name or "graph"
    graph.node.extend(nodes)
    graph.initializer.extend(item for item in model.graph.initializer if item.name in reads)
    graph.sparse_initializer.extend(
        item for item in model.graph.sparse_initializer if item.values.name in reads
    )
    given = {item.name: item for item in model.graph.input}
    stored = {item.name for item in graph.initializer} | {i.values.name for i in graph.sparse_initializer}
    for name in sorted(reads - stored):
        if name in given:
            graph.input.append(given[name])
        elif name in types:
            kind, shape = types[name]
            free = None if shape is None else [None] * len(shape)
            graph.input.append(onnx.helper.make_tensor_value_info(name, kind, free))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(made))
    return piece


def _save(piece: ModelProto, path: Path) -> None:
    import onnx

    weights = sum(len(item.raw_data) for item in piece.graph.initializer)
    side = path.with_name(f"{path.name}.data")
    side.unlink(missing_ok=True)
    onnx.save_model(piece, path, save_as_external_data=weights > _INLINE, location=side.name)
