"""Weight-only int8 and int4: kernels, sizes, mixed bits, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compressor.errors import UsageError
from compressor.stages import weight_only

Json = dict[str, Any]


def run(model: Json, folder: Path, **options: Any) -> tuple[Json, onnx.ModelProto]:
    folder.mkdir(exist_ok=True)
    found = weight_only.run(model, str(folder), **options)
    return found["facts"], onnx.load(folder / found["path"])


@pytest.mark.parametrize(("bits", "least", "smaller"), [(4, 18, 3.0), (8, 35, 2.2)])
def test_packed_layers_answer_as_float_does(
    bits: int,
    least: float,
    smaller: float,
    mlp: Json,
    sequences: Any,
    tmp_path: Path,
    answer: Callable[..., Any],
    sqnr: Callable[..., float],
) -> None:
    facts, graph = run(mlp, tmp_path / "out", bits=bits)
    packed = [node for node in graph.graph.node if node.op_type == "MatMulNBits"]
    assert facts["quantized"] == len(packed) == 3
    assert facts["by_bits"] == {f"int{bits}": 64 * 96 + 96 * 64 + 64 * 32}
    want, got = answer(mlp["path"], sequences), answer(tmp_path / "out/model.onnx", sequences)
    assert np.isfinite(got).all()
    assert sqnr(want, got) > least
    assert (tmp_path / "out/model.onnx").stat().st_size < Path(mlp["path"]).stat().st_size / smaller


def test_inputs_that_do_not_fill_a_block(
    model_of: Callable[..., Json], tmp_path: Path, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    rng = np.random.default_rng(0)
    model = model_of(
        [("MatMul", "x w", "y")], {"x": ["n", 75]}, ["y"], {"w": rng.normal(size=(75, 20)).astype("f4")}
    )
    feeds = {"x": rng.normal(size=(4, 75)).astype("f4")}
    for bits in (4, 8):
        run(model, tmp_path / "out", bits=bits)
        assert sqnr(answer(model["path"], feeds), answer(tmp_path / "out/model.onnx", feeds)) > 15


def test_table_is_looked_up_in_blocks(
    model_of: Callable[..., Json], tmp_path: Path, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    table = np.random.default_rng(0).normal(size=(200, 64)).astype("f4")
    model = model_of([("Gather", "table ids", "y")], {"ids": (["n", "t"], "int64")}, ["y"], {"table": table})
    feeds = {"ids": np.arange(20).reshape(4, 5)}
    _, graph = run(model, tmp_path / "out")
    assert [node.op_type for node in graph.graph.node] == ["GatherBlockQuantized"]
    assert sqnr(answer(model["path"], feeds), answer(tmp_path / "out/model.onnx", feeds)) > 18
    facts, graph = run(model, tmp_path / "eight", bits=8)
    assert facts["stored"] == 1
    assert "GatherBlockQuantized" not in {node.op_type for node in graph.graph.node}


def test_wide_layers_are_those_that_4_bits_hurt_most(
    mlp: Json, tmp_path: Path, sequences: Any, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    plain, _ = run(mlp, tmp_path / "plain")
    facts, graph = run(mlp, tmp_path / "mixed", wide=0.5)
    assert not plain["wide_layers"]
    assert facts["wide_layers"]
    assert 0 < facts["by_bits"]["int8"] <= 0.5 * sum(facts["by_bits"].values())
    bits = {
        n.name: a.i
        for n in graph.graph.node
        if n.op_type == "MatMulNBits"
        for a in n.attribute
        if a.name == "bits"
    }
    assert {name for name, count in bits.items() if count == 8} == set(facts["wide_layers"])
    want = answer(mlp["path"], sequences)
    errors = [sqnr(want, answer(tmp_path / name / "model.onnx", sequences)) for name in ("plain", "mixed")]
    assert errors[1] > errors[0]


def test_gptq_beats_hqq_on_inputs_like_those_it_saw(
    model_of: Callable[..., Json],
    tmp_path: Path,
    reference: Callable[..., Json],
    answer: Callable[..., Any],
    sqnr: Callable[..., float],
) -> None:
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(8, 64))

    def draw(n: int) -> np.ndarray:
        return (rng.normal(size=(n, 50, 8)) @ mix + 0.1 * rng.normal(size=(n, 50, 64))).astype("f4")

    weight = rng.normal(size=(64, 48)).astype("f4")
    model = model_of([("MatMul", "x w", "y")], {"x": ["n", "t", 64]}, ["y"], {"w": weight})
    weight_only.calibrate(model, reference(draw(64), ["n", "t", 64]), str(tmp_path))
    feeds, found = {"x": draw(10)}, {}
    for rounding in ("nearest", "hqq", "gptq"):
        run(model, tmp_path / rounding, rounding=rounding, ranges=str(tmp_path), accuracy_level=0)
        got = answer(tmp_path / rounding / "model.onnx", feeds)
        found[rounding] = sqnr(answer(model["path"], feeds), got)
    assert found["gptq"] > found["hqq"] + 3
    assert found["hqq"] > found["nearest"]


def test_convolutions_are_stored_as_int8(
    net: Path, tmp_path: Path, answer: Callable[..., Any], sqnr: Callable[..., float]
) -> None:
    from compressor import onnx_files
    from compressor.model import Model

    specs = onnx_files.specs(onnx_files.read(net / "net.onnx"))
    model = Model("onnx", net / "net.onnx", *specs, "0" * 64, 0, "onnx").json()
    facts, graph = run(model, tmp_path / "out", bits=8)
    assert facts["stored"] == 1
    assert facts["quantized"] == 0
    assert {item["op"] for item in facts["float"]} == {"Conv", "Gemm"}
    assert onnx.TensorProto.INT8 in {item.data_type for item in graph.graph.initializer}
    feeds = {"image": np.load(net / "data.npz")["x"]}
    assert sqnr(answer(net / "net.onnx", feeds), answer(tmp_path / "out/model.onnx", feeds)) > 30


def test_report_sees_the_types_of_weights(mlp: Json, tmp_path: Path, sequences: Any) -> None:
    from serving.runtimes import onnx as runtime

    for bits, kind in ((4, "int4"), (8, "int8")):
        run(mlp, tmp_path / kind, bits=bits)
        found = runtime.precision(tmp_path / kind / "model.onnx", sequences, device="cpu")
        assert found["weights_by_type"][kind] > 0.95
        assert sum(found["weights_by_type"].values()) == pytest.approx(1)
        assert found["share_int8"] == pytest.approx(1)  # accuracy level 4 rounds activations too


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3}, "kernels for 4 and 8"),
        ({"group": 48}, "must be one of 16, 32"),
        ({"rounding": "best"}, "no rounding 'best'.*nearest, hqq, gptq"),
        ({"rounding": "gptq"}, "needs data"),
        ({"wide": 7.0}, "wide 7 is not a share"),
        ({"wide": 1.0}, "wide 1 is not a share of the weights; give 0 to below 1"),
        ({"accuracy_level": 9}, "accuracy_level 9 is unknown"),
        ({"exclude": ["nowhere"]}, "no node 'nowhere'"),
    ],
)
def test_wrong_parameters_are_refused(options: Json, words: str, mlp: Json, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        run(mlp, tmp_path / "out", **options)


def test_only_gptq_needs_data() -> None:
    assert weight_only.calibration({"rounding": "gptq"}) == "required"
    assert weight_only.calibration({"rounding": "hqq"}) == "none"
