"""float16 and bfloat16: types at the borders, islands, constants that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from compressor.errors import UsageError
from compressor.quantization import calibrate
from compressor.quantization.activations import Batches
from compressor.quantization.segments import write_segments
from compressor.quantization.view import View
from compressor.stages import cast

Json = dict[str, Any]
HALF, BFLOAT, FLOAT = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT


def run(model: Json, folder: Path, **options: Any) -> tuple[Json, onnx.ModelProto]:
    folder.mkdir(exist_ok=True)
    found = cast.run(model, str(folder), **options)
    return found["facts"], onnx.load(folder / found["path"])


def observed(model: Json, feeds: dict[str, np.ndarray], folder: Path) -> str:
    """A folder as `calibrate` leaves it."""
    from compressor.quantization import graph, islands

    folder.mkdir()
    prepared = graph.prepare(Path(model["path"]))
    tensors = islands.activations(View(prepared))

    def batches(start: int) -> Batches:
        n = len(next(iter(feeds.values())))
        return [(np.arange(start, n), {name: array[start:] for name, array in feeds.items()})]

    calibrate.observe(write_segments(prepared, tensors, folder, "s"), tensors, batches, folder)
    return str(folder)


def in_half(path: Path, feeds: Json) -> np.ndarray:
    """What a file computes where every operator rounds to its type, as the runtime's CPU side does not."""
    with np.errstate(over="ignore", invalid="ignore"):
        return ReferenceEvaluator(onnx.load(path)).run(None, feeds)[0]


def overflowing(model_of: Callable[..., Json], scale: float = 1e5) -> Json:
    """A layer whose result reaches about `scale` before it is made small again."""
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 0.1, (32, 64)).astype("f4")
    constants = {"w": weight, "up": np.float32(300.0), "down": np.float32(1 / scale), "v": weight.T.copy()}
    nodes = [
        ("MatMul", "x w", "m"),
        ("Mul", "m up", "large"),
        ("Mul", "large up", "larger"),
        ("Mul", "larger down", "small"),
        ("MatMul", "small v", "y"),
    ]
    return model_of(nodes, {"x": ["n", 32]}, ["y"], constants)


@pytest.mark.parametrize(
    ("to", "compute"), [("float16", None), ("float16", "float32"), ("bfloat16", "float32")]
)
def test_inputs_and_outputs_stay_and_weights_halve(
    to: str,
    compute: str | None,
    mlp: Json,
    sequences: Any,
    tmp_path: Path,
    answer: Callable[..., Any],
    sqnr: Callable[..., float],
) -> None:
    facts, graph = run(mlp, tmp_path / "out", to=to, compute=compute)
    ends = [*graph.graph.input, *graph.graph.output]
    assert [(item.name, item.type.tensor_type.elem_type) for item in ends] == [("x", FLOAT), ("y", FLOAT)]
    kinds = {item.data_type for item in graph.graph.initializer if np.prod(item.dims) >= 256}
    assert kinds == {HALF if to == "float16" else BFLOAT}
    assert facts["halved"] >= 64 * 96 + 96 * 64 + 64 * 32
    assert (tmp_path / "out/model.onnx").stat().st_size < Path(mlp["path"]).stat().st_size * 0.6
    got = answer(tmp_path / "out/model.onnx", sequences)
    assert sqnr(answer(mlp["path"], sequences), got) > (50 if to == "float16" else 35)


def test_report_sees_that_only_weights_are_half(mlp: Json, sequences: Any, tmp_path: Path) -> None:
    from serving.runtimes import onnx as runtime

    run(mlp, tmp_path / "out", to="bfloat16", compute="float32")
    found = runtime.precision(tmp_path / "out/model.onnx", sequences, device="cpu")
    assert found["weights_by_type"]["bfloat16"] > 0.9
    assert found["share_by_type"] == {"float32": 1.0}


def test_overflow_becomes_an_island(
    model_of: Callable[..., Json], tmp_path: Path, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    model = overflowing(model_of)
    feeds = {"x": np.random.default_rng(1).normal(size=(16, 32)).astype("f4")}
    want = answer(model["path"], feeds)
    run(model, tmp_path / "blind", to="float16")
    assert not np.isfinite(in_half(tmp_path / "blind/model.onnx", feeds)).all()
    facts, graph = run(
        model, tmp_path / "out", to="float16", ranges=observed(model, feeds, tmp_path / "seen")
    )
    assert [item["name"] for item in facts["islands"]] == ["larger", "small"]
    assert "'larger' reaches" in facts["islands"][0]["reason"]
    assert "65504" in facts["islands"][0]["reason"]
    for got in (in_half(tmp_path / "out/model.onnx", feeds), answer(tmp_path / "out/model.onnx", feeds)):
        assert np.isfinite(got).all()
        assert sqnr(want, got) > 50
    assert sum(node.op_type == "Cast" for node in graph.graph.node) == 4


def test_ranges_below_the_types_digits_become_an_island(
    model_of: Callable[..., Json], tmp_path: Path
) -> None:
    constants = {"w": np.full((32, 32), 0.1, "f4"), "down": np.float32(1e-4), "up": np.float32(1e4)}
    nodes = [
        ("MatMul", "x w", "m"),
        ("Mul", "m down", "tiny"),
        ("Mul", "tiny down", "tinier"),
        ("Mul", "tinier up", "y"),
    ]
    model = model_of(nodes, {"x": ["n", 32]}, ["y"], constants)
    feeds = {"x": np.random.default_rng(1).normal(size=(8, 32)).astype("f4")}
    facts, _ = run(model, tmp_path / "out", ranges=observed(model, feeds, tmp_path / "seen"))
    assert "tinier" in {item["name"] for item in facts["islands"]}
    assert any("loses its digits" in item["reason"] for item in facts["islands"])


@pytest.mark.parametrize("compute", [None, "float32"])
@pytest.mark.parametrize(("value", "words"), [(1e5, "beyond float16's 65504"), (1e-8, "lose their digits")])
def test_weights_that_do_not_fit_stay_float(
    compute: str | None, value: float, words: str, model_of: Callable[..., Json], tmp_path: Path, answer: Any
) -> None:
    weight = np.random.default_rng(0).normal(0, 0.1, (32, 32)).astype("f4")
    odd = weight * np.float32(value) if value < 1 else weight + np.float32(value)
    model = model_of(
        [("MatMul", "x w", "m"), ("MatMul", "m odd", "y")], {"x": ["n", 32]}, ["y"], {"w": weight, "odd": odd}
    )
    facts, _ = run(model, tmp_path / "out", to="float16", compute=compute)
    assert words in facts["float_constants"]["odd"]
    assert "w" not in facts["float_constants"]
    feeds = {"x": np.random.default_rng(1).normal(size=(4, 32)).astype("f4")}
    want = answer(model["path"], feeds)
    np.testing.assert_allclose(
        in_half(tmp_path / "out/model.onnx", feeds), want, rtol=0.02, atol=abs(want).max() * 0.01
    )


def test_mask_stays_float_until_the_softmax(
    model_of: Callable[..., Json], tmp_path: Path, answer: Any
) -> None:
    least = np.float32(np.finfo(np.float32).min)
    constants = {"w": np.eye(32, dtype="f4"), "least": least, "zero": np.float32(0)}
    nodes = [
        ("MatMul", "x w", "scores"),
        ("Where", "keep zero least", "mask"),
        ("Add", "scores mask", "masked"),
        ("Softmax", "masked", "p"),
        ("MatMul", "p w", "y"),
    ]
    model = model_of(nodes, {"x": ["n", 32], "keep": ([32], "bool")}, ["y"], constants)
    facts, _ = run(model, tmp_path / "out", to="float16")
    assert [item["name"] for item in facts["islands"]] == ["mask", "masked", "p"]
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 32)).astype("f4"), "keep": np.arange(32) < 5}
    want, got = answer(model["path"], feeds), in_half(tmp_path / "out/model.onnx", feeds)
    np.testing.assert_allclose(got, want, atol=2e-3)


def test_subgraphs_and_foreign_operators_stay_float(
    model_of: Callable[..., Json], tmp_path: Path, answer: Any
) -> None:
    from onnx import helper

    branch = [
        helper.make_graph(
            [helper.make_node(op, ["m"], [f"{op}_out"])],
            op,
            [],
            [helper.make_tensor_value_info(f"{op}_out", FLOAT, None)],
        )
        for op in ("Relu", "Neg")
    ]
    nodes = [
        ("MatMul", "x w", "m"),
        ("If", "c", "z", {"then_branch": branch[0], "else_branch": branch[1]}),
        ("MatMul", "z w", "y"),
    ]
    constants = {"w": np.random.default_rng(0).normal(0, 0.2, (32, 32)).astype("f4")}
    model = model_of(nodes, {"x": ["n", 32], "c": ([], "bool")}, ["y"], constants)
    facts, _ = run(model, tmp_path / "out", to="float16")
    assert [(item["name"], item["reason"]) for item in facts["islands"]] == [("z", "it holds a subgraph")]
    for flag in (True, False):
        feeds = {"x": np.random.default_rng(1).normal(size=(4, 32)).astype("f4"), "c": np.array(flag)}
        np.testing.assert_allclose(
            answer(tmp_path / "out/model.onnx", feeds), answer(model["path"], feeds), rtol=0.02, atol=0.02
        )


def test_types_without_kernels_are_only_stored_and_said(
    mlp: Json, sequences: Any, tmp_path: Path, answer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, graph = run(mlp, tmp_path / "out", to="bfloat16", compute="bfloat16")
    assert facts["compute"] == "float32"
    assert "bfloat16 cannot be computed with on cpu, only the weights are" in capsys.readouterr().err
    assert {item.data_type for item in graph.graph.initializer if np.prod(item.dims) >= 256} == {BFLOAT}
    assert np.isfinite(answer(tmp_path / "out/model.onnx", sequences)).all()


def test_weights_that_are_stored_in_integers_stay_so(
    net: Path, tmp_path: Path, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    from compressor import onnx_files
    from compressor.model import Model
    from compressor.stages import weight_only

    specs = onnx_files.specs(onnx_files.read(net / "net.onnx"))
    model = Model("onnx", net / "net.onnx", *specs, "0" * 64, 0, "onnx").json()
    (tmp_path / "eight").mkdir()
    found = weight_only.run(model, str(tmp_path / "eight"), bits=8)
    stored = {**found, "path": str(tmp_path / "eight/model.onnx")}
    facts, graph = run(stored, tmp_path / "out", to="float16")
    assert facts["compute"] == "float32"
    assert {onnx.TensorProto.INT8, HALF} <= {item.data_type for item in graph.graph.initializer}
    feeds = {"image": np.load(net / "data.npz")["x"]}
    assert sqnr(answer(net / "net.onnx", feeds), answer(tmp_path / "out/model.onnx", feeds)) > 30


def test_nothing_to_cast_is_said(model_of: Callable[..., Json], tmp_path: Path) -> None:
    facts, _ = run(
        model_of([("Relu", "x", "y")], {"x": ["n", 4]}, ["y"], {}), tmp_path / "out", compute="float32"
    )
    assert "nothing to cast" in facts["reason"]


def test_wrong_types_and_names_are_refused(mlp: Json, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="types are float16 and bfloat16"):
        run(mlp, tmp_path / "out", to="float8")
    with pytest.raises(UsageError, match="no node 'nowhere'"):
        run(mlp, tmp_path / "out", exclude=["nowhere"])
