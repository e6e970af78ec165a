"""Pieces of a graph compute what the whole graph does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import DataError
from compressor.quantization.activations import Activations, Sample
from compressor.quantization.segments import write_segments

X = np.random.default_rng(3).normal(0, 1, (2, 6)).astype(np.float32)


def chain(length: int, extra: list[onnx.NodeProto] = (), domain: str = "") -> onnx.ModelProto:
    """x -> t0 -> t1 ...; every third layer adds what the layer two before it gave."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.4, (6, 6)).astype(np.float32) for _ in range(length)]
    nodes = []
    for i in range(length):
        given = "x" if i == 0 else f"t{i - 1}"
        nodes.append(helper.make_node("MatMul", [given, f"w{i}"], [f"m{i}"]))
        other = f"t{i - 2}" if i % 3 == 2 else f"b{i}"
        nodes.append(helper.make_node("Add", [f"m{i}", other], [f"t{i}"]))
    values = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    values += [numpy_helper.from_array(w[0], f"b{i}") for i, w in enumerate(weights)]
    graph = helper.make_graph(
        [*nodes, *extra],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])],
        [helper.make_tensor_value_info(f"t{length - 1}", TensorProto.FLOAT, ["N", 6])],
        values,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def whole(model: onnx.ModelProto, tensors: list[str]) -> dict[str, NDArray]:
    declared = {item.name for item in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in declared)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip(tensors, session.run(tensors, {"x": X}), strict=True))


def test_pieces_give_what_the_whole_gives(tmp_path: Path) -> None:
    tensors = [f"t{i}" for i in range(30)]
    paths = write_segments(chain(30), tensors, tmp_path, "piece")
    assert len(paths) == 8
    found = dict(Activations(paths, tensors).run(Sample(0, {"x": X})))
    assert list(found) == tensors
    for name, value in whole(chain(30), tensors).items():
        assert np.array_equal(found[name], value), name


def test_a_deep_graph_has_a_bounded_number_of_pieces(tmp_path: Path) -> None:
    tensors = [f"t{i}" for i in range(200)]
    assert len(write_segments(chain(200), tensors, tmp_path, "piece")) == 29


def test_nodes_behind_the_last_tensor_are_left_out(tmp_path: Path) -> None:
    (path,) = write_segments(chain(30), ["x", "t3"], tmp_path, "piece")
    assert len(onnx.load(path).graph.node) == 8
    assert [name for name, _ in Activations([path], ["x", "t3"]).run(Sample(0, {"x": X}))] == ["x", "t3"]


def test_inputs_alone_need_no_piece(tmp_path: Path) -> None:
    assert write_segments(chain(3), ["x"], tmp_path, "piece") == []
    ((name, value),) = Activations([], ["x"]).run(Sample(0, {"x": X}))
    assert name == "x"
    assert np.array_equal(value, X)


def _branch() -> list[onnx.NodeProto]:
    """If(true) that reads t1 and t25 from outside of its subgraphs."""

    def side(name: str) -> onnx.GraphProto:
        node = helper.make_node("Add", [name, "t25"], [f"{name}_out"])
        return helper.make_graph(
            [node], name, [], [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)]
        )

    return [
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["y"], then_branch=side("t1"), else_branch=side("t2")),
    ]


def test_what_a_subgraph_reads_crosses_the_cuts(tmp_path: Path) -> None:
    tensors = [*(f"t{i}" for i in range(30)), "y"]
    paths = write_segments(chain(30, _branch()), tensors, tmp_path, "piece")
    assert len(paths) > 1
    found = dict(Activations(paths, tensors).run(Sample(0, {"x": X})))
    assert np.array_equal(found["y"], found["t1"] + found["t25"])


def test_no_cut_where_a_type_is_unknown(tmp_path: Path) -> None:
    """A contrib operator's result, of a type that shape inference cannot tell, is alive to the end."""
    model = chain(20)
    first = model.graph.node[0]
    first.output[0] = "raw"
    model.graph.node.insert(1, helper.make_node("Gelu", ["raw"], ["m0"], domain="com.microsoft"))
    model.graph.node.append(helper.make_node("Add", ["m0", "t19"], ["y"]))
    tensors = [*(f"t{i}" for i in range(20)), "y"]
    assert len(write_segments(model, tensors, tmp_path, "piece")) == 1


def test_a_sample_that_does_not_fit_names_itself(tmp_path: Path) -> None:
    paths = write_segments(chain(3), ["t2"], tmp_path, "piece")
    with pytest.raises(DataError, match="sample 7"):
        list(Activations(paths, ["t2"]).run(Sample(7, {"x": X[:, :4]})))
