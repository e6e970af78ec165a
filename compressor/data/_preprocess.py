"""What is done to a picture before a model sees it: text, JSON and a checked plan. Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.errors import DataError, UsageError
from compressor.model import TensorSpec

__all__ = ["INTERPOLATIONS", "Preprocess", "parse_preprocess", "plan"]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
_FORM = "resize=256,crop=224,mean=0.485/0.456/0.406,std=0.229/0.224/0.225,scale=1/255"
_CHOICES = {"layout": ("NCHW", "NHWC"), "interpolation": INTERPOLATIONS, "channels": ("rgb", "bgr")}
_Size = tuple[int, int]


def parse_preprocess(text: str) -> dict[str, Any]:
    """Read `--preprocess`, e.g. `resize=256,crop=224,mean=0.485/0.456/0.406,std=0.229/0.224/0.225`.

    A pixel p in 0..255 becomes `(p * scale - mean) / std`; `scale` is 1/255 unless given, so
    `scale=1,mean=127,std=128` is `(p - 127) / 128`. `resize=N` is the shorter side, `resize=HxW` both;
    `crop=N` or `crop=HxW` is cut from the middle. Raises `UsageError` with the part that is wrong.
    """
    result: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or key not in _READERS or key in result:
            raise UsageError(f"--preprocess: '{part}' is not understood; the form is {_FORM}")
        try:
            result[key] = _READERS[key](value)
        except (ValueError, ZeroDivisionError):
            raise UsageError(
                f"--preprocess: the value of '{part}' is not understood; the form is {_FORM}"
            ) from None
    _check(result)
    return result


def _size(text: str) -> int | list[int]:
    sizes = [int(size) for size in text.split("x")]
    if len(sizes) > 2:
        raise ValueError(text)
    return sizes[0] if len(sizes) == 1 else sizes


def _number(text: str) -> float:
    top, slash, bottom = text.partition("/")
    return float(top) / float(bottom) if slash else float(top)


def _numbers(text: str) -> list[float]:
    return [float(value) for value in text.split("/")]


_READERS: dict[str, Callable[[str], Any]] = {
    "resize": _size,
    "crop": _size,
    "mean": _numbers,
    "std": _numbers,
    "scale": _number,
    "layout": str.upper,
    "interpolation": str.lower,
    "channels": str.lower,
}


def _check(value: dict[str, Any]) -> None:
    """Raise `UsageError` for a key or value that has no meaning."""
    for key, given in value.items():
        if key not in _READERS:
            raise UsageError(f"preprocess: unknown key '{key}'; known are {', '.join(_READERS)}")
        if given is None:
            continue
        if key in _CHOICES and given not in _CHOICES[key]:
            raise UsageError(f"preprocess: {key} '{given}' is unknown; known are {', '.join(_CHOICES[key])}")
        if key in ("resize", "crop") and not all(size > 0 for size in _pair(given)):
            raise UsageError(f"preprocess: {key} {given} must be positive")
        if key == "scale" and not given > 0:
            raise UsageError(f"preprocess: scale {given} must be positive")
        if key == "std" and not all(deviation > 0 for deviation in _sequence(given)):
            raise UsageError(f"preprocess: std {given} must be positive")


def _pair(size: int | Sequence[int]) -> _Size:
    values = [size, size] if isinstance(size, int) else list(size)
    if len(values) == 1:
        values *= 2
    return values[0], values[1]


def _sequence(value: float | list[float]) -> list[float]:
    return [float(value)] if isinstance(value, int | float) else [float(item) for item in value]


@dataclass(frozen=True)
class Preprocess:
    """A checked plan.

    `shorter` and `exact` are the two ways to resize; `size` (height, width) is what results, None if it
    differs from picture to picture. `channel_axis` is that of one sample, None: it has no such axis.
    """

    shorter: int | None
    exact: _Size | None
    crop: _Size | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    interpolation: str
    bgr: bool
    colours: int
    channel_axis: int | None
    dtype: str

    @property
    def size(self) -> _Size | None:
        return self.crop or self.exact

    @property
    def sample(self) -> tuple[int | str, ...]:
        """The shape of one sample."""
        shape: list[int | str] = list(self.size or ("height", "width"))
        if self.channel_axis is not None:
            shape.insert(self.channel_axis, self.colours)
        return tuple(shape)


def plan(
    preprocess: dict[str, Any] | None, inputs: tuple[TensorSpec, ...]
) -> tuple[Preprocess, tuple[str, ...]]:
    """The plan for pictures that go into the model's picture input, and notes on what was assumed.

    Raises `DataError` if no input takes a picture or the size of pictures cannot be known.
    """
    given = {key: value for key, value in (preprocess or {}).items() if value is not None}
    _check(given)
    spec = _picture_input(inputs)
    axis, colours, wanted = _layout(spec, given.get("layout"))
    shorter, exact, crop, notes = _sizes(given, wanted, spec)
    integer = spec is not None and "int" in spec.dtype
    if spec is not None and integer and spec.dtype != "uint8" and "scale" not in given:
        raise DataError(f"input {spec} takes integers: say by --preprocess how a pixel becomes one ({_FORM})")
    scale = float(given.get("scale", 1.0 if integer else 1 / 255))
    if not {"scale", "mean", "std"} & set(given):
        notes += (f"pixel values are given as {'0..255' if integer else '0..1'}, no mean or std",)
    mean, std = (_per_channel(key, given.get(key), colours) for key in ("mean", "std"))
    return Preprocess(
        shorter, exact, crop, mean, std, scale,
        given.get("interpolation", "bilinear"), given.get("channels") == "bgr", colours, axis,
        spec.dtype if spec is not None else "float32",
    ), notes  # fmt: skip


def _picture_input(inputs: tuple[TensorSpec, ...]) -> TensorSpec | None:
    if not inputs:
        return None
    able = [spec for spec in inputs if len(spec.shape) == 4] or [s for s in inputs if len(s.shape) == 3]
    if len(able) != 1 or len(inputs) != 1:
        listed = ", ".join(map(str, inputs))
        raise DataError(
            f"a folder of pictures feeds one picture input, but the model wants {listed}; use an .npz file"
        )
    return able[0]


def _layout(spec: TensorSpec | None, layout: str | None) -> tuple[int | None, int, _Size | None]:
    """Channel axis of a sample, number of channels, and (height, width) if the model fixes them."""
    shape = spec.shape[1:] if spec else ()
    if len(shape) == 2:
        return None, 1, _fixed(shape[0], shape[1])
    if not shape:
        return (2 if layout == "NHWC" else 0), 3, None
    last = layout == "NHWC" if layout else shape[0] not in (1, 3) and shape[2] in (1, 3)
    height, width, colours = shape if last else (shape[1], shape[2], shape[0])
    if isinstance(colours, int) and colours not in (1, 3):
        raise DataError(f"pictures have 1 or 3 channels, but input {spec} wants {colours}; use an .npz file")
    return (2 if last else 0), (colours if isinstance(colours, int) else 3), _fixed(height, width)


def _fixed(height: int | str, width: int | str) -> _Size | None:
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def _sizes(
    given: dict[str, Any], wanted: _Size | None, spec: TensorSpec | None
) -> tuple[int | None, _Size | None, _Size | None, tuple[str, ...]]:
    """Shorter side, exact size, crop and notes."""
    resize, crop = given.get("resize"), given.get("crop")
    if isinstance(resize, list | tuple) and len(resize) == 1:
        resize = resize[0]
    shorter = resize if isinstance(resize, int) else None
    exact = None if resize is None or shorter else _pair(resize)
    cut = _pair(crop) if crop is not None else None
    notes: tuple[str, ...] = ()
    if wanted and resize is None and crop is None:
        exact = wanted
        notes = (f"pictures are resized to the model's {wanted[0]}x{wanted[1]}, whatever their proportions",)
    result = cut or exact
    if spec is not None and result is None:
        how = f"crop={wanted[0]}x{wanted[1]}" if wanted else "resize=HEIGHTxWIDTH, or resize=N,crop=N"
        raise DataError(f"the pictures' size for input {spec} is not fixed: add --preprocess {how}")
    if wanted and result and result != wanted:
        raise DataError(
            f"preprocess gives pictures of size {result[0]}x{result[1]}, "
            f"but input {spec} wants {wanted[0]}x{wanted[1]}; change --preprocess"
        )
    return shorter, exact, cut, notes


def _per_channel(key: str, value: Any, colours: int) -> tuple[float, ...]:
    values = _sequence(value) if value is not None else [1.0 if key == "std" else 0.0]
    if len(values) not in (1, colours):
        raise DataError(
            f"preprocess: {key} has {len(values)} values, but the model takes {colours} channel(s)"
        )
    return tuple(values)
