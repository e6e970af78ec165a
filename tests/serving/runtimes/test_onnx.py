"""ONNX Runtime: sessions, errors, and in which types an engine really computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compressor.errors import DataError, ModelFileError, UnsupportedError
from compressor.model import TensorSpec
from serving.runtimes import onnx as runtime


def feeds(n: int = 2) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(n, 3, 16, 16)).astype(np.float32)}


def macs(path: Path, **arrays: np.ndarray) -> dict[str, int]:
    """Multiply-accumulates by name of the operator, without those that have none."""
    found = runtime.precision(path, arrays, device="cpu")
    return {row["name"]: row["macs"] for row in found["operators"] if row["macs"]}


BLOCKED = [  # of 20, 24 and 1 channels, none of which fills its blocks
    ("Conv", "x w0", "c0"), ("Relu", "c0", "r0"), ("Conv", "r0 w1", "c1"), ("Conv", "r0 w2", "c2"),
    ("Add", "c1 c2", "a"), ("Relu", "a", "ra"), ("Conv", "ra wd", "d", 20), ("Mul", "d s", "ds"),
    ("Conv", "ds wg", "g", 2), ("MaxPool", "g", "p"), ("Conv", "p wh", "h"), ("Sigmoid", "h", "y"),
]  # fmt: skip


@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_padded_channels_of_the_blocked_layout_are_not_counted(tmp_path: Path, stored: type) -> None:
    """Multiply-accumulates by hand; weights may lie in the file in another type."""
    helper, rng = onnx.helper, np.random.default_rng(0)
    shapes = {
        "w0": (20, 3, 3, 3), "w1": (20, 20, 3, 3), "w2": (20, 20, 3, 3), "wd": (20, 1, 3, 3),
        "wg": (24, 10, 3, 3), "wh": (1, 24, 3, 3), "s": (20, 1, 1),
    }  # fmt: skip
    arrays = {f"{name}_": rng.normal(0, 0.1, shape).astype(stored) for name, shape in shapes.items()}
    nodes = [helper.make_node("Cast", [f"{name}_"], [name], to=1) for name in shapes]
    for op, given, made, *groups in BLOCKED:
        more = {"pads": [1, 1, 1, 1], "group": (groups or [1])[0]} if op == "Conv" else {}
        more |= {"kernel_shape": [2, 2], "strides": [2, 2]} if op == "MaxPool" else {}
        nodes.append(helper.make_node(op, given.split(), [made], name=f"{op}_{made}", **more))
    ends = [helper.make_tensor_value_info(name, 1, size) for name, size in (("x", [1, 3, 8, 8]), ("y", None))]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "blocked", ends[:1], ends[1:], constants)
    path = tmp_path / "blocked.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    wide, narrow = 64 * 9, 16 * 9
    counts = [wide * 20 * 3, wide * 20 * 20, wide * 20 * 20, wide * 20, wide * 24 * 10, narrow * 24]
    found = macs(path, x=zeros(1, 3, 8, 8))
    assert sorted(found.values()) == sorted(counts)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_session_gives_specs_and_outputs_by_name(mixed_engine: Path) -> None:
    session = runtime.open_session(mixed_engine, device="cpu", threads=1)
    assert session.inputs == (TensorSpec("x", "float32", ("N", 3, 16, 16)),)
    assert session.outputs == (TensorSpec("y", "float32", ("N", 10)),)
    outputs = session.run(feeds())
    assert list(outputs) == ["y"]
    assert outputs["y"].shape == (2, 10)
    np.testing.assert_array_equal(session.bind(feeds())()[0], outputs["y"])


def test_simulation_runs_the_pairs_as_they_are_written(mixed_engine: Path, tmp_path: Path) -> None:
    import onnxruntime

    options = runtime.session_options(1, simulate=True)
    options.optimized_model_filepath = str(tmp_path / "ran.onnx")
    onnxruntime.InferenceSession(str(mixed_engine), options, providers=["CPUExecutionProvider"])
    ran = [node.op_type for node in onnx.load(tmp_path / "ran.onnx").graph.node]
    assert sorted(ran) == sorted(node.op_type for node in onnx.load(mixed_engine).graph.node)
    fused = runtime.open_session(mixed_engine, device="cpu").run(feeds())["y"]
    simulated = runtime.open_session(mixed_engine, device="cpu", simulate=True).run(feeds())["y"]
    assert np.abs(fused - simulated).max() < 0.1 * np.abs(simulated).max()


def test_arrays_are_checked_before_the_runtime_sees_them(mixed_engine: Path) -> None:
    session = runtime.open_session(mixed_engine, device="cpu")
    with pytest.raises(DataError, match="must have the shape"):
        session.run({"x": zeros(1, 4, 16, 16)})
    with pytest.raises(DataError, match="missing x"):
        session.bind({"y": zeros(1)})


def test_files_that_are_no_engines(tmp_path: Path, mixed_engine: Path) -> None:
    with pytest.raises(ModelFileError, match="no such engine"):
        runtime.open_session(tmp_path / "none.onnx", device="cpu")
    (tmp_path / "junk.onnx").write_bytes(b"abc" * 30)
    (tmp_path / "cut.onnx").write_bytes(mixed_engine.read_bytes()[:500])
    for name in ("junk.onnx", "cut.onnx"):
        with pytest.raises(ModelFileError, match="not a whole ONNX file") as caught:
            runtime.open_session(tmp_path / name, device="cpu")
        assert "\n" not in str(caught.value)


def test_an_operator_that_the_runtime_lacks(graph: Any, tmp_path: Path) -> None:
    graph.node("Nonesuch", ["x"], "y")
    path = graph.save(tmp_path / "odd.onnx", {"x": [2]}, {"y": [2]})
    with pytest.raises(UnsupportedError, match=r"cannot load odd\.onnx: .*Nonesuch"):
        runtime.open_session(path, device="cpu")


def test_a_run_that_fails_is_one_line(graph: Any, tmp_path: Path) -> None:
    graph.node("Gather", ["x", graph.constant("i", np.array([3, 9]))], "y", axis=1)
    path = graph.save(tmp_path / "fails.onnx", {"x": ["N", 4]}, {"y": ["N", 2]})
    session = runtime.open_session(path, device="cpu")
    with pytest.raises(UnsupportedError, match="fails on this input") as caught:
        session.run({"x": zeros(1, 4)})
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there_is_an_error(mixed_engine: Path) -> None:
    with pytest.raises(UnsupportedError, match="no device 'npu'"):
        runtime.open_session(mixed_engine, device="npu")
    if "cuda" not in runtime.devices():
        with pytest.raises(UnsupportedError, match="'cuda' was asked, but this machine has: cpu"):
            runtime.open_session(mixed_engine, device="cuda")


def test_a_device_that_the_runtime_could_not_start_is_an_error(
    mixed_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime goes back to the CPU in silence where the CUDA libraries cannot be loaded."""
    if "cuda" in runtime.devices():
        pytest.skip("CUDA works here")
    monkeypatch.setattr(runtime, "devices", lambda: ("cpu", "cuda"))
    with pytest.raises(UnsupportedError, match=r"would run on the CPU|cannot load"):
        runtime.open_session(mixed_engine, device="cuda")


def test_precision_tells_integer_from_float_compute(mixed_engine: Path) -> None:
    found = runtime.precision(mixed_engine, feeds(), device="cpu")
    n, pixels = 2, 16 * 16
    integer = n * (pixels * 8 * 27 + pixels * 8 * 72 + 16 * 10)
    float_ = n * (pixels * 16 * 8 + 10 * 10)
    assert found["macs"] == integer + float_
    assert found["share_int8"] == pytest.approx(integer / (integer + float_))
    assert found["share_by_type"]["float32"] == pytest.approx(float_ / (integer + float_))
    assert found["fused_integer_ops"] == 4
    assert sum(row["time_share"] for row in found["operators"]) == pytest.approx(1)
    assert sum(row["share"] for row in found["operators"]) == pytest.approx(1)


def test_float_islands_have_a_reason(mixed_engine: Path) -> None:
    islands = runtime.precision(mixed_engine, feeds(), device="cpu")["float_islands"]
    assert [island["op"] for island in islands] == ["Conv", "MatMul"]
    assert "its output is not (it goes to Erf)" in islands[0]["reason"]
    assert "float weight" in islands[1]["reason"]


def test_nodes_without_names_are_counted_too(mixed_engine: Path, tmp_path: Path) -> None:
    model = onnx.load(mixed_engine)
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, tmp_path / "unnamed.onnx")
    named = runtime.precision(mixed_engine, feeds(), device="cpu")
    unnamed = runtime.precision(tmp_path / "unnamed.onnx", feeds(), device="cpu")
    assert [row["macs"] for row in unnamed["operators"]] == [row["macs"] for row in named["operators"]]
    assert unnamed["share_int8"] == named["share_int8"]


def test_a_float_engine_has_no_islands(make_mlp: Any) -> None:
    found = runtime.precision(make_mlp("mlp.onnx", 2), {"x": zeros(3, 64)}, device="cpu")
    assert found["share_int8"] == 0
    assert found["share_by_type"] == {"float32": 1.0}
    assert found["float_islands"] == []
    assert found["macs"] == 3 * 2 * 64 * 64


def test_an_engine_without_products_has_no_share(graph: Any, tmp_path: Path) -> None:
    graph.node("Relu", ["x"], "y")
    found = runtime.precision(
        graph.save(tmp_path / "r.onnx", {"x": ["N"]}, {"y": ["N"]}), {"x": zeros(3)}, device="cpu"
    )
    assert found["share_int8"] is None
    assert found["share_by_type"] == {}


def test_macs_of_convolutions(graph: Any, tmp_path: Path) -> None:
    graph.node("Conv", ["x", graph.floats("w", 8, 2, 3, 3)], "grouped", group=2, strides=[2, 2])
    graph.node("ConvTranspose", ["x", graph.floats("v", 4, 5, 2, 2)], "up", strides=[2, 2])
    path = graph.save(
        tmp_path / "c.onnx", {"x": [1, 4, 9, 9]}, {"grouped": [1, 8, 4, 4], "up": [1, 5, 18, 18]}
    )
    assert macs(path, x=zeros(1, 4, 9, 9)) == {"grouped": 8 * 16 * 2 * 9, "up": 4 * 81 * 5 * 4}


def test_macs_of_products(graph: Any, tmp_path: Path) -> None:
    graph.node("MatMul", ["a", "b"], "batched")
    graph.node("Gemm", ["c", graph.floats("w", 7, 5)], "turned", transA=1, transB=1)
    graph.node("Einsum", ["a", "b"], "sum", equation="bik,bkj->ij")
    inputs = {"a": [3, 4, 6], "b": [3, 6, 2], "c": [5, 8]}
    outputs = {"batched": [3, 4, 2], "turned": [8, 7], "sum": [4, 2]}
    found = macs(
        graph.save(tmp_path / "p.onnx", inputs, outputs), **{n: zeros(*s) for n, s in inputs.items()}
    )
    assert found == {"batched": 3 * 4 * 6 * 2, "turned": 8 * 5 * 7, "sum": 3 * 4 * 6 * 2}


def test_macs_of_recurrent_and_attention_operators(graph: Any, tmp_path: Path) -> None:
    weights = [graph.floats("w", 1, 4 * 6, 3), graph.floats("r", 1, 4 * 6, 6)]
    graph.node("LSTM", ["x", *weights], "lstm", hidden_size=6)
    projection = [graph.floats("p", 8, 24), graph.floats("b", 24)]
    graph.node("Attention", ["q", *projection], "attention", domain="com.microsoft", num_heads=2)
    path = graph.save(
        tmp_path / "r.onnx",
        {"x": [5, 2, 3], "q": [2, 7, 8]},
        {"lstm": [5, 1, 2, 6], "attention": [2, 7, 8]},
    )
    found = macs(path, x=zeros(5, 2, 3), q=zeros(2, 7, 8))
    assert found["lstm"] == 5 * 2 * 4 * 6 * (3 + 6)
    assert found["attention"] == 2 * 7 * 8 * 24 + 2 * (2 * 7 * 7 * 8)


def test_dynamic_quantization_is_integer_compute(graph: Any, tmp_path: Path) -> None:
    weight = graph.constant("w", np.ones((16, 8), np.int8))
    scale = graph.constant("s", np.float32(0.1))
    graph.node("DynamicQuantizeMatMul", ["x", weight, scale], "y", domain="com.microsoft")
    found = runtime.precision(
        graph.save(tmp_path / "d.onnx", {"x": [4, 16]}, {"y": [4, 8]}), {"x": zeros(4, 16)}, device="cpu"
    )
    assert found["share_int8"] == 1.0
    assert found["macs"] == 4 * 16 * 8


@pytest.mark.parametrize(("level", "share"), [(4, 1.0), (0, 0.0)])
def test_four_bit_weights_are_float_compute_unless_asked_otherwise(
    graph: Any, tmp_path: Path, level: int, share: float
) -> None:
    packed = graph.constant("w", np.zeros((8, 1, 16), np.uint8))
    scales = graph.constant("s", np.ones(8, np.float32))
    attributes = {"K": 32, "N": 8, "bits": 4, "block_size": 32, "accuracy_level": level}
    graph.node("MatMulNBits", ["x", packed, scales], "y", domain="com.microsoft", **attributes)
    path = graph.save(tmp_path / "n.onnx", {"x": [4, 32]}, {"y": [4, 8]})
    found = runtime.precision(path, {"x": zeros(4, 32)}, device="cpu")
    assert found["macs"] == 4 * 32 * 8
    assert found["share_int8"] == share


def test_nodes_in_a_loop_are_counted_every_time(graph: Any, tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["before", "w"], ["after"], name="product"),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "body",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("before", 1, [2, 4])],
        [info("on", TensorProto.BOOL, []), info("after", 1, [2, 4])],
    )
    graph.floats("w", 4, 4)
    trips, go = graph.constant("trips", np.int64(3)), graph.constant("go_on", np.bool_(True))
    graph.node("Loop", [trips, go, "x"], "y", body=body)
    path = graph.save(tmp_path / "l.onnx", {"x": [2, 4]}, {"y": [2, 4]})
    found = runtime.precision(path, {"x": zeros(2, 4)}, device="cpu")
    assert found["macs"] == 3 * 2 * 4 * 4
