"""An ONNX graph seen through its names: who makes a tensor, who reads it, what type it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

__all__ = [
    "TensorType",
    "View",
    "attribute",
    "replace_nodes",
    "subgraphs",
    "tensor_types",
    "unique",
    "without_data",
]

TensorType = tuple[int, tuple[int | str | None, ...] | None]
_LARGE = 1024


class View:
    """Lookups over the top-level graph of `model`, kept true by the editing methods.

    Nodes that are removed leave the model with `commit`. `captured` holds names that a subgraph (If, Loop,
    Scan) reads from outside itself; `outputs` the graph's outputs. A node is known by its `key`, its first
    output that has a name.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.graph: GraphProto = model.graph
        self.initializers: dict[str, TensorProto] = {item.name: item for item in self.graph.initializer}
        self.outputs = {item.name for item in self.graph.output}
        self.producers: dict[str, NodeProto] = {}
        self.consumers: dict[str, list[NodeProto]] = {}
        self.captured: set[str] = set()
        for node in self.graph.node:
            self.producers.update({name: node for name in node.output if name})
            for name in filter(None, node.input):
                self.consumers.setdefault(name, []).append(node)
            for graph in subgraphs(node):
                self.captured |= _captured(graph)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._names = {*self.initializers, *self.producers, *self.consumers, *self.outputs, *self.captured}

    @staticmethod
    def key(node: NodeProto) -> str:
        return str(next(name for name in node.output if name))

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """Element type and shape (None: unknown rank) of every tensor that shape inference knows."""
        return tensor_types(self.model)

    def array(self, name: str) -> NDArray[Any] | None:
        """The value of an initializer, None for any other name."""
        from onnx import numpy_helper

        if name not in self.initializers:
            return None
        if name not in self._arrays:
            self._arrays[name] = numpy_helper.to_array(self.initializers[name])
        return self._arrays[name]

    def is_float(self, name: str) -> bool:
        """Whether the tensor is known to be float32."""
        if name in self.initializers:
            return bool(self.initializers[name].data_type == 1)
        return self.types.get(name, (0, None))[0] == 1

    def rank(self, name: str) -> int | None:
        if name in self.initializers:
            return len(self.initializers[name].dims)
        shape = self.types.get(name, (0, None))[1]
        return None if shape is None else len(shape)

    def remove(self, node: NodeProto) -> None:
        """Take a node out of the graph; it loses its operator until `commit` drops it."""
        node.op_type = ""
        for name in filter(None, node.output):
            self.producers.pop(name, None)
        for name in set(filter(None, node.input)):
            self.consumers[name] = [reader for reader in self.consumers[name] if reader is not node]

    def redirect(self, old: str, new: str) -> None:
        """Let all nodes that read `old` read `new`."""
        for reader in self.consumers.pop(old, []):
            if old in reader.input:
                reader.input[:] = [new if name == old else name for name in reader.input]
            self.consumers.setdefault(new, []).append(reader)

    def set_input(self, node: NodeProto, index: int, name: str) -> None:
        """Let input `index` of a node (appended if it is the next one) be `name`."""
        while len(node.input) <= index:
            node.input.append("")
        if old := node.input[index]:
            self.consumers[old].remove(node)
        node.input[index] = name
        self.consumers.setdefault(name, []).append(node)

    def set_output(self, node: NodeProto, name: str) -> None:
        """Let the first output of a node be `name`."""
        self.producers.pop(node.output[0], None)
        node.output[0] = name
        self.producers[name] = node

    def new_name(self, name: str) -> str:
        """`name`, made unique."""
        return unique(name, self._names)

    def insert_after(self, node: NodeProto, op: str, output: str) -> None:
        """Let a new node of one input read the first output of `node`, and make `output`."""
        from onnx import helper

        place = [self.key(item) for item in self.graph.node].index(self.key(node))
        name = unique(output, {item.name for item in self.graph.node})
        made = helper.make_node(op, [node.output[0]], [output], name=name)
        self.graph.node.insert(place + 1, made)
        self.producers[output] = self.graph.node[place + 1]
        self.consumers.setdefault(node.output[0], []).append(self.graph.node[place + 1])

    def insert(self, reader: NodeProto, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """A new node in front of `reader`, which is not changed; gives its output, `name` made unique."""
        from onnx import helper

        output = self.new_name(name)
        title = unique(output, {item.name for item in self.graph.node})
        made = helper.make_node(op, inputs, [output], name=title, **attributes)
        place = [self.key(item) for item in self.graph.node].index(self.key(reader))
        self.graph.node.insert(place, made)
        node = self.graph.node[place]
        self.producers[output] = node
        for item in filter(None, inputs):
            self.consumers.setdefault(item, []).append(node)
        return output

    def add(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer; gives its name, made unique."""
        from onnx import numpy_helper

        name = self.new_name(name)
        item = self.graph.initializer.add()
        item.CopyFrom(numpy_helper.from_array(np.asarray(value, order="C"), name))
        self.initializers[name] = item
        return name

    def replace(self, name: str, value: NDArray[Any]) -> None:
        """Let initializer `name` be `value`."""
        from onnx import numpy_helper

        self.initializers[name].CopyFrom(numpy_helper.from_array(np.asarray(value, order="C"), name))
        self._arrays.pop(name, None)

    def commit(self) -> None:
        """Write the removals to the model."""
        kept = [node for node in self.graph.node if node.op_type]
        if len(kept) < len(self.graph.node):
            replace_nodes(self.model, kept)

    def only_reader(self, name: str) -> NodeProto | None:
        """The single node that reads `name`, if nothing else (output, subgraph) does."""
        readers = self.consumers.get(name, [])
        if len(readers) != 1 or name in self.outputs or name in self.captured:
            return None
        return readers[0]


def replace_nodes(model: ModelProto, nodes: Iterable[NodeProto]) -> None:
    """Let the top-level graph hold exactly `nodes`, which may be its own."""
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of a node's attribute, strings decoded."""
    from onnx import helper

    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            return value.decode() if isinstance(value, bytes) else value
    return default


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that a node holds as attributes (not those inside them)."""
    for item in node.attribute:
        if item.HasField("g"):
            yield item.g
        yield from item.graphs


def unique(name: str, taken: set[str]) -> str:
    """`name`, or `name_2`, `name_3`, ... if taken; the answer is added to `taken`."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    taken.add(candidate)
    return candidate


def tensor_types(model: ModelProto) -> dict[str, TensorType]:
    """Infer types and shapes without copying large weights (protobuf cannot hold more than 2 GB)."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(without_data(model), data_prop=True).graph
    return {
        item.name: _type(item)
        for item in (*graph.value_info, *graph.input, *graph.output)
        if item.type.HasField("tensor_type")
    }


def _type(item: Any) -> TensorType:
    kind = item.type.tensor_type
    if not kind.HasField("shape"):
        return kind.elem_type, None
    sizes = (
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in kind.shape.dim
    )
    return kind.elem_type, tuple(sizes)


def without_data(model: ModelProto) -> ModelProto:
    """A copy whose large initializers have their dimensions but point to data elsewhere."""
    import onnx

    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(graph, field).extend(getattr(model.graph, field))
    for item in model.graph.initializer:
        if int(np.prod(item.dims)) <= _LARGE:
            graph.initializer.add().CopyFrom(item)
        else:
            stub = graph.initializer.add(name=item.name, data_type=item.data_type, dims=item.dims)
            stub.data_location = onnx.TensorProto.EXTERNAL
            stub.external_data.add(key="location", value="elsewhere")
    return light


def _captured(graph: GraphProto) -> set[str]:
    """Names that `graph` reads but does not make."""
    made = {item.name for item in (*graph.input, *graph.initializer)}
    read: set[str] = {item.name for item in graph.output}
    for node in graph.node:
        read.update(filter(None, node.input))
        made.update(filter(None, node.output))
        for inner in subgraphs(node):
            read |= _captured(inner)
    return read - made
