"""The vectors that layers read, and their moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compressor.errors import DataError
from compressor.quantization import moments
from compressor.quantization.layers import weight_uses
from compressor.quantization.moments import Moments
from compressor.quantization.patches import rows_of
from compressor.quantization.scheme import named
from compressor.quantization.view import View

RNG = np.random.default_rng(8)
CONVS = [
    ((3, 3), {}, 1, (7, 8)),
    ((3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}, 1, (7, 8)),
    ((3, 3), {"dilations": [2, 1], "pads": [2, 1, 2, 1]}, 4, (9, 7)),
    ((3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, 2, (8, 7)),
    ((2, 2), {"auto_pad": "SAME_LOWER"}, 1, (5, 5)),
    ((3,), {"pads": [1, 1]}, 2, (9,)),
    ((1, 2, 3), {}, 1, (3, 4, 5)),
]


@pytest.mark.parametrize(("kernel", "attributes", "groups", "sizes"), CONVS)
def test_weights_times_patches_are_the_output(
    build: Callable[..., onnx.ModelProto],
    run: Callable[..., dict[str, Any]],
    kernel: tuple[int, ...],
    attributes: dict[str, Any],
    groups: int,
    sizes: tuple[int, ...],
) -> None:
    weight = RNG.normal(size=(8, 4 // groups, *kernel)).astype(np.float32)
    node = ("Conv", "x w", "y", {"group": groups, **attributes})
    model = build([node], {"x": [2, 4, *sizes]}, {"y": None}, {"w": weight})
    x = RNG.normal(size=(2, 4, *sizes)).astype(np.float32)
    wanted = np.moveaxis(run(model, {"x": x})["y"], 1, -1).reshape(-1, 8)
    (use,) = weight_uses(View(model), named("ort-x86-avx2"))
    rows = weight.transpose(use.order).reshape(groups, 8 // groups, -1)
    patches = rows_of(model.graph.node[0], kernel, x, 10_000, 0)
    found = np.concatenate(list(patches @ rows.transpose(0, 2, 1)), axis=-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_fewer_patches_are_some_of_them(build: Callable[..., onnx.ModelProto]) -> None:
    node = build([("Conv", "x w", "y")], {"x": None}, {"y": None}).graph.node[0]
    x = np.arange(100, dtype=np.float32).reshape(1, 1, 10, 10)
    found = [rows_of(node, (1, 1), x, 7, ordinal)[0, :, 0] for ordinal in range(3)]
    assert all(len(set(part)) == 7 for part in found)
    assert len({tuple(part) for part in found}) > 1
    assert np.array_equal(found[1], rows_of(node, (1, 1), x, 7, 1)[0, :, 0])


def test_moments_by_hand() -> None:
    found = Moments.empty(1, 2, 64)
    found.add(np.array([[[1.0, 0.0], [3.0, 2.0]]]))
    found.flush()
    assert found.mean.tolist() == [[2.0, 1.0]]
    assert found.second()[0].tolist() == [[[5.0, 3.0], [3.0, 2.0]]]
    assert found.second(centred=True)[0].tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


def test_few_vectors_tell_little_of_correlations() -> None:
    found = Moments.empty(1, 2, 64)
    found.add(np.array([[[1.0, 1.0]] * 6]))  # 6 vectors, k = 2: three quarters of the correlation stay
    found.flush()
    assert found.shrunk()[0].tolist() == [[[1.0, 0.75], [0.75, 1.0]]]


def test_wide_layers_have_spans_that_part_no_pair() -> None:
    found = Moments.empty(1, 11, 4)
    rows = RNG.normal(size=(1, 50, 11))
    found.add(rows)
    found.flush()
    assert [part.shape for part in found.products] == [(1, 4, 4), (1, 4, 4), (1, 3, 3)]
    np.testing.assert_allclose(found.second()[1][0], rows[0, :, 4:8].T @ rows[0, :, 4:8] / 50, rtol=1e-5)


def test_spans_part_no_two_stretches_of_odd_length() -> None:
    widths = [part.shape[1] for part in Moments.empty(1, 27, 13, 6).products]
    assert widths == [12, 12, 3]
    assert [part.shape[1] for part in Moments.empty(1, 27, 4, 6).products] == [6, 6, 6, 6, 3]


def net(build: Callable[..., onnx.ModelProto]) -> onnx.ModelProto:
    nodes = [("Conv", "x w b", "c"), ("Relu", "c", "r"), ("GlobalAveragePool", "r", "p"),
             ("Flatten", "p", "f"), ("Gemm", "f v", "y")]  # fmt: skip
    constants = {
        name: RNG.normal(size=shape).astype(np.float32)
        for name, shape in {"w": (8, 3, 3, 3), "b": (8,), "v": (8, 5)}.items()
    }
    return build(nodes, {"x": ["n", 3, 6, 6]}, {"y": ["n", 5]}, constants)


def test_gathering_is_exact_and_survives_a_file(
    build: Callable[..., onnx.ModelProto], prepared: Callable[..., onnx.ModelProto], tmp_path: Path
) -> None:
    model = prepared(net(build))
    uses = list(weight_uses(View(model), named("ort-x86-avx2")))
    x = RNG.normal(size=(5, 3, 6, 6)).astype(np.float32)
    bad = x.copy()
    bad[2] = np.nan
    whole = moments.gather(model, uses, [([0, 1, 2, 3, 4], {"x": bad})], tmp_path)
    parts = moments.gather(model, uses, [([0], {"x": x[:1]}), ([1, 3, 4], {"x": x[[1, 3, 4]]})], tmp_path)
    assert whole["c"].count == 4 * 16
    moments.save(whole, tmp_path)
    loaded = moments.load(tmp_path)
    for key, entry in whole.items():
        assert np.array_equal(entry.total, parts[key].total)
        assert np.array_equal(entry.total, loaded[key].total)
        assert np.array_equal(entry.products[0], loaded[key].products[0])
        assert entry.count == loaded[key].count
    assert not list(tmp_path.glob("moments-*"))


def test_no_usable_sample_is_an_error(
    build: Callable[..., onnx.ModelProto], prepared: Callable[..., onnx.ModelProto], tmp_path: Path
) -> None:
    model = prepared(net(build))
    uses = list(weight_uses(View(model), named("ort-x86-avx2")))
    with pytest.raises(DataError, match="no sample is free"):
        moments.gather(model, uses, [([0], {"x": np.full((1, 3, 6, 6), np.nan, np.float32)})], tmp_path)
    with pytest.raises(DataError, match="missing or damaged"):
        moments.load(tmp_path / "elsewhere")
