"""Which array goes to which input, and the words for what does not fit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from compressor.data import match
from compressor.data._match import fixed_batch, reshaped, whole
from compressor.errors import DataError
from compressor.model import TensorSpec

IMAGE = TensorSpec("image", "float32", ("batch", 3, 16, 20))


def spec(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


@pytest.mark.parametrize(
    ("arrays", "inputs", "binding"),
    [
        ([spec("image", 3, 16, 20)], [IMAGE], {"image": "image"}),
        ([spec("arr_0", 3, 16, 20)], [IMAGE], {"image": "arr_0"}),
        ([spec("picture", 3, 16, 20)], [IMAGE], {"image": "picture"}),
        ([spec("x", 3, 16, 20), spec("scale")], [IMAGE], {"image": "x"}),
        ([spec("x", 3, 16, 20), spec("boxes", 4)], [IMAGE], {"image": "x"}),
        ([spec("input_1", 8)], [spec("input_1:0", "n", 8)], {"input_1:0": "input_1"}),
        (
            [spec("alpha", 2), spec("zeta", 2), spec("eta", 2)],
            [spec("batch_zeta", "n", 2), spec("batch_eta", "n", 2), spec("batch_alpha", "n", 2)],
            {"batch_zeta": "zeta", "batch_eta": "eta", "batch_alpha": "alpha"},
        ),
        (
            [spec("arr_1", 4), spec("arr_0", 2)],
            [spec("a", "n", 2), spec("b", "n", 4)],
            {"a": "arr_0", "b": "arr_1"},
        ),
        ([spec("ids", 7, dtype="uint16")], [spec("ids", "n", "t", dtype="int64")], {"ids": "ids"}),
        ([spec("ids", "dim1", dtype="int64")], [spec("ids", "n", "t", dtype="int64")], {"ids": "ids"}),
        ([spec("x", 4, dtype="bool")], [spec("m", "n", 4)], {"m": "x"}),
        ([spec("x", 4)], [spec("m", "n", 4, dtype="float16")], {"m": "x"}),
    ],
)
def test_names(arrays: list[TensorSpec], inputs: list[TensorSpec], binding: dict[str, str]) -> None:
    assert match(arrays, inputs) == binding


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([], "the data hold no array; the model wants image=batchx3x16x20:float32"),
        (
            [spec("picture", 3, 16, 20), spec("other", 1, 16, 20)],
            "the model wants input image=batchx3x16x20:float32; the data have, per sample, "
            "picture=3x16x20:float32, other=1x16x20:float32",
        ),
        ([spec("image", 3, 24, 24)], "one sample is 3x24x24, input image=.* wants 3x16x20$"),
        ([spec("image", 16, 20, 3)], r"looks like NHWC \(channels last\).*transpose\(0, 3, 1, 2\)"),
        ([spec("image", 16, 20)], "one sample without a batch dimension"),
        ([spec("image", dtype="str")], "dtype str, which is not numeric"),
        ([spec("image", 3, 16, 20, dtype="object")], "dtype object, which is not numeric"),
        ([spec("image", 3, 16, 20, dtype="complex64")], "dtype complex64, which does not go into"),
    ],
)
def test_what_does_not_fit_is_said(arrays: list[TensorSpec], words: str) -> None:
    with pytest.raises(DataError, match=words):
        match(arrays, [IMAGE])


def test_nchw_for_nhwc() -> None:
    with pytest.raises(DataError, match=r"NCHW \(channels first\).*transpose\(0, 2, 3, 1\)"):
        match([spec("x", 3, 16, 20)], [spec("x", "n", 16, 20, 3)])


@pytest.mark.parametrize(
    ("sample", "wanted"),
    [((28, 28), (1, 28, 28)), ((28, 28), (28, 28, 1)), ((1, 3, 4), (3, 4)), ((), (1,)), ((5, 1), (5,))],
)
def test_axes_of_size_one_may_be_missing_or_extra(sample: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    array, single = spec("x", *sample), spec("x", "n", *wanted)
    assert match([array], [single]) == {"x": "x"}
    assert reshaped(array, single)
    assert not whole(array, single)


def test_floats_do_not_go_into_integers() -> None:
    with pytest.raises(DataError, match="float32, which does not go into input ids=nx7:int64"):
        match([spec("ids", 7)], [spec("ids", "n", 7, dtype="int64")])


def test_every_input_needs_an_array_of_its_own() -> None:
    with pytest.raises(DataError, match="names do not match"):
        match([spec("b", 2)], [spec("a_b", "n", 2), spec("c_b", "n", 2)])


def test_a_sample_can_be_a_whole_input() -> None:
    state, rate = spec("state", 2, "batch", 64), TensorSpec("sr", "int64", ())
    arrays = [spec("input", 576), spec("state", 2, 1, 64), spec("sr", dtype="int64")]
    inputs = [spec("input", "batch", 576), state, rate]
    binding = match(arrays, inputs)
    assert binding == {"input": "input", "state": "state", "sr": "sr"}
    assert not whole(arrays[0], inputs[0])
    assert whole(arrays[1], state)
    assert fixed_batch(arrays, inputs, binding) == 1
    assert not whole(spec("image", 1, 3, 16, 20), IMAGE)
    assert not whole(spec("image", 5, 3, 16, 20), IMAGE)


def test_fixed_batches() -> None:
    free, one, eight = spec("a", "n", 2), spec("b", 1, 2), spec("c", 8, 2)
    arrays = [spec("a", 2), spec("b", 2), spec("c", 2)]
    assert fixed_batch(arrays, [free], {"a": "a"}) is None
    assert fixed_batch(arrays, [free, eight], {"a": "a", "c": "c"}) == 8
    with pytest.raises(DataError, match="batches of 1, 8 at the same time"):
        fixed_batch(arrays, [one, eight], {"b": "b", "c": "c"})


def test_the_parent_can_match_without_numpy() -> None:
    code = (
        "import sys; from compressor.data import match, parse_preprocess\n"
        "from compressor.model import TensorSpec\n"
        "match([TensorSpec('x', 'float32', (3,))], [TensorSpec('y', 'float32', ('n', 3))]);"
        "parse_preprocess('resize=256'); sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
