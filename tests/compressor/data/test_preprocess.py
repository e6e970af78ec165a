"""What is done to pictures, as text and as a plan."""

from __future__ import annotations

from typing import Any

import pytest

from compressor.data import parse_preprocess
from compressor.data._preprocess import plan
from compressor.errors import DataError, UsageError
from compressor.model import TensorSpec


def image(*shape: int | str, dtype: str = "float32") -> tuple[TensorSpec, ...]:
    return (TensorSpec("image", dtype, shape),)


def test_the_usual_text() -> None:
    text = "resize=256,crop=224,mean=0.485/0.456/0.406,std=0.229/0.224/0.225,scale=1/255"
    assert parse_preprocess(text) == {
        "resize": 256,
        "crop": 224,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "scale": 1 / 255,
    }
    assert parse_preprocess("scale=1, mean=127, std=128, layout=nhwc, channels=BGR, resize=240x320") == {
        "scale": 1.0,
        "mean": [127.0],
        "std": [128.0],
        "layout": "NHWC",
        "channels": "bgr",
        "resize": [240, 320],
    }
    assert parse_preprocess("interpolation=bicubic") == {"interpolation": "bicubic"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("size=3", "'size=3' is not understood"),
        ("resize", "'resize' is not understood"),
        ("resize=3,resize=4", "'resize=4' is not understood"),
        ("resize=big", "value of 'resize=big'"),
        ("resize=1x2x3", "value of 'resize=1x2x3'"),
        ("scale=1/0", "value of 'scale=1/0'"),
        ("crop=0", "crop 0 must be positive"),
        ("std=0.2/0/0.2", "must be positive"),
        ("scale=-1", "must be positive"),
        ("layout=CHWN", "layout 'CHWN' is unknown; known are NCHW, NHWC"),
        ("interpolation=cubic", "known are nearest, bilinear, bicubic"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_preprocess(text)


def test_an_unknown_key_of_a_dict_is_named() -> None:
    with pytest.raises(UsageError, match="unknown key 'size'"):
        plan({"size": 3}, image("n", 3, 8, 8))


@pytest.mark.parametrize(
    ("shape", "sample", "axis"),
    [
        (("n", 3, 32, 48), (3, 32, 48), 0),
        (("n", 1, 32, 48), (1, 32, 48), 0),
        (("n", 32, 48, 3), (32, 48, 3), 2),
        (("n", 32, 48, 1), (32, 48, 1), 2),
        ((1, 28, 28), (28, 28), None),
    ],
)
def test_the_layout_is_read_from_the_input(shape: Any, sample: Any, axis: int | None) -> None:
    made, notes = plan(None, image(*shape))
    assert made.sample == sample
    assert made.channel_axis == axis
    assert any("are resized to the model's" in note for note in notes)
    assert any("0..1" in note for note in notes)


def test_the_layout_can_be_given() -> None:
    made, _ = plan({"layout": "NHWC"}, image("n", 3, 4, 3))
    assert (made.size, made.channel_axis) == ((3, 4), 2)


def test_integers_take_pixels_as_they_are() -> None:
    made, notes = plan(None, image("n", 8, 8, 3, dtype="uint8"))
    assert (made.scale, made.dtype) == (1.0, "uint8")
    assert any("0..255" in note for note in notes)
    with pytest.raises(DataError, match="takes integers"):
        plan(None, image("n", 8, 8, 3, dtype="int8"))


@pytest.mark.parametrize(
    ("preprocess", "shape", "words"),
    [
        (None, ("n", 3, "h", "w"), "size for input .* is not fixed: add --preprocess resize=HEIGHTxWIDTH"),
        ({"resize": 256}, ("n", 3, 224, 224), "not fixed: add --preprocess crop=224x224"),
        ({"crop": 200}, ("n", 3, 224, 224), "size 200x200, but input .* wants 224x224"),
        ({"mean": [0.5, 0.5]}, ("n", 3, 8, 8), "mean has 2 values, but the model takes 3"),
        (None, ("n", 4, 8, 8), "1 or 3 channels, but .* wants 4"),
        (None, ("n", 16), "feeds one picture input, but the model wants image=nx16"),
    ],
)
def test_what_cannot_be_planned_is_said(preprocess: Any, shape: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        plan(preprocess, image(*shape))


def test_two_inputs_want_arrays() -> None:
    with pytest.raises(DataError, match=r"use an \.npz file"):
        plan(None, image("n", 3, 8, 8) + image("n", 4))
