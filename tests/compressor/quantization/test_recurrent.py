"""Stored weights of recurrent layers: what R meets, and which are not for 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compressor.errors import DataError
from compressor.quantization import moments, recurrent
from compressor.quantization.corrections import Corrections
from compressor.quantization.layers import Use, storage_uses
from compressor.quantization.patches import states_of
from compressor.quantization.placement import FloatOperator, Placement
from compressor.quantization.scheme import named
from compressor.quantization.view import View

RNG = np.random.default_rng(3)
SCHEME = named("ort-x86-avx2")


def array(*shape: int, scale: float = 0.3) -> np.ndarray:
    return RNG.normal(0, scale, shape).astype(np.float32)


@pytest.fixture
def tiny(build: Callable[..., onnx.ModelProto]) -> tuple[onnx.ModelProto, list[Use]]:
    """An RNN of one state and two inputs. In int8, W has the scale 100 / 127: 0.3 becomes 0. R is exact."""
    constants = {"w": np.float32([[[100, 0.3]]]), "r": np.float32([[[0.5]]])}
    model = build([("RNN", "x w r", "y", {"hidden_size": 1})], {"x": [2, 1, 2]}, {"y": None}, constants)
    return model, [Use("y", 1, "w", (0, 1), (0, 1, 2)), Use("y", 2, "r", (0, 1), (0, 1, 2))]


def test_states_by_hand(build: Callable[..., onnx.ModelProto]) -> None:
    node = build([("LSTM", "x w r", "y", {"direction": "bidirectional"})], {"x": None}, {"y": None})
    y = np.float32([[1, 10], [2, 20], [3, 30]]).reshape(3, 2, 1, 1)  # steps, directions
    assert states_of(node.graph.node[0], y, 99, 0)[:, :, 0].tolist() == [[1, 2], [20, 30]]
    node.graph.node[0].attribute[0].s = b"reverse"
    assert states_of(node.graph.node[0], y[:, :1], 99, 0)[:, :, 0].tolist() == [[2, 3]]
    assert states_of(node.graph.node[0], y[:, :1], 1, 0).shape == (1, 1, 1)


def test_a_weight_that_rounding_wipes_out_is_kept(tiny: tuple[onnx.ModelProto, list[Use]]) -> None:
    model, uses = tiny
    quiet = {0: np.float32([[[0, 1]], [[0, 2]]])}  # the output is tanh(0.3), ...; all 0 in int8
    kept = recurrent.keep(View(model), uses, SCHEME, Corrections(), {"y": [quiet]})
    assert kept["y"].weights == {"w"}
    assert kept["y"].reason == (
        "it stores W as float16 and R as int8: int8 would change its output by 100.0%"
    )


def test_what_the_data_do_not_show_may_be_wiped_out(tiny: tuple[onnx.ModelProto, list[Use]]) -> None:
    model, uses = tiny
    loud = {0: np.float32([[[0.01, 0]], [[0.02, 0]]])}  # 100 is exact
    assert not recurrent.keep(View(model), uses, SCHEME, Corrections(), {"y": [loud]})


def test_without_data_layers_on_the_models_input_are_kept(
    tiny: tuple[onnx.ModelProto, list[Use]],
) -> None:
    model, uses = tiny
    view = View(model)
    kept = recurrent.keep_unseen(view, uses)
    assert kept["y"].weights == {"w", "r"}
    reason = "no kernel; its weight is stored as int8"
    placed = Placement(stored=list(uses), float=[FloatOperator("RNN_0", "RNN", reason)])
    assert recurrent.take_out(view, placed, kept) == {"w", "r"}
    assert not placed.stored
    assert placed.float[0].reason.startswith("no kernel; it stores W as float16 and R as float16: ")


@pytest.mark.parametrize(("op", "gates", "outputs"), [("LSTM", 4, " h c"), ("GRU", 3, " h"), ("RNN", 1, "y")])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_w_meets_the_input_and_r_the_outputs_of_the_step_before(
    build: Callable[..., onnx.ModelProto],
    run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    op: str,
    gates: int,
    outputs: str,
    direction: str,
) -> None:
    ways = 2 if direction == "bidirectional" else 1
    weights = {"w": array(ways, gates * 64, 16), "r": array(ways, gates * 64, 64, scale=0.1)}
    attributes = {"hidden_size": 64, "direction": direction}
    model, whole = (
        build([(op, "x w r", names, attributes)], {"x": [6, 1, 16]}, {names.split(" ")[-1]: None}, weights)
        for names in (outputs, "y")
    )
    view = View(model)
    uses = recurrent.stored(view, storage_uses(view, SCHEME))
    assert [moments.known_by(use) for use in uses] == [uses[0].node, f"{uses[0].node}[2]"]
    x = array(3, 6, 1, 16, scale=1.0)
    found = moments.gather(
        model, uses, [([place], {"x": sample}) for place, sample in enumerate(x)], tmp_path
    )
    y = np.stack([run(whole, {"x": sample})["y"][:, :, 0] for sample in x])  # samples, steps, ways, 64
    backwards = [direction == "reverse", True]
    met = [y[:, 1:, way] if backwards[way] else y[:, :-1, way] for way in range(ways)]
    close(found[uses[0].node].second()[0], [x.reshape(-1, 16)])
    close(found[f"{uses[0].node}[2]"].second()[0], [part.reshape(-1, 64) for part in met])


def close(found: np.ndarray, vectors: list[np.ndarray]) -> None:
    wanted = np.stack([rows.T @ rows / len(rows) for rows in vectors])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_sequences_survive_a_file(build: Callable[..., onnx.ModelProto], tmp_path: Path) -> None:
    constants = {"w": array(1, 128, 16), "r": array(1, 128, 32)}
    inputs = {"x": [5, 1, 16], "n": ([1], "int32"), "h": [1, 1, 32]}
    model = build([("LSTM", "x w r  n h", "y", {"hidden_size": 32})], inputs, {"y": None}, constants)
    view = View(model)
    uses = recurrent.stored(view, storage_uses(view, SCHEME))
    samples = [
        {"x": array(5, 1, 16, scale=1.0), "n": np.int32([steps]), "h": array(1, 1, 32)} for steps in (5, 2)
    ]
    recurrent.record(model, uses, [([place], sample) for place, sample in enumerate(samples)], tmp_path)
    found = recurrent.load(tmp_path)
    assert found.keys() == {"y"}
    for sample, read in zip(samples, found["y"], strict=True):
        assert read.keys() == {0, 4, 5}
        assert all(
            np.array_equal(read[index], sample[name]) for index, name in ((0, "x"), (4, "n"), (5, "h"))
        )
    assert not recurrent.keep(view, uses, SCHEME, Corrections(), found)
    assert not list(tmp_path.glob("*.onnx"))
    with pytest.raises(DataError, match="missing or damaged"):
        recurrent.load(tmp_path / "elsewhere")
