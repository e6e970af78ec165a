"""One picture file to one array, as the plan in `_preprocess` says. The pixels go through Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.data._preprocess import Preprocess
from compressor.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ENDINGS", "problem", "read"]

ENDINGS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".gif", ".webp", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".jp2", ".avif",
)  # fmt: skip
_ORIENTATION = 0x0112


def read(path: Path, plan: Preprocess) -> NDArray[Any]:
    """The picture as the model wants it: shape `plan.sample`, dtype `plan.dtype`. Raises `DataError`."""
    with _readable(path) as image:
        return _values(_sized(_upright(_eight_bit(image), image, plan.colours), plan), plan)


def problem(path: Path) -> str | None:
    """Why the picture cannot be read, by decoding all of it; None: it can."""
    try:
        with _readable(path) as image:
            if image.format == "JPEG":
                image.draft("RGB", (1, 1))  # all of the data are parsed, few pixels made
            image.load()
            _eight_bit(image)
    except DataError as error:
        return str(error)
    return None


@contextmanager
def _readable(path: Path) -> Iterator[Image]:
    """The open picture; whatever Pillow raises becomes `DataError`."""
    from PIL import Image

    try:
        data = path.read_bytes()
        if not data:
            raise DataError(f"{path.name}: the file is empty")
        with Image.open(io.BytesIO(data)) as image:
            yield image
    except DataError:
        raise
    except Image.UnidentifiedImageError as error:
        raise DataError(f"{path.name}: not a picture") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ValueError and more
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path.name}: {reason}") from error


def _eight_bit(image: Image) -> Image:
    """The first frame with 8 bits a channel. A 16-bit value v becomes v / 257, so that white stays white."""
    from PIL import Image

    image.load()
    if image.mode == "F":
        raise DataError("pixels are floating point numbers without a known range")
    if image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.float64).clip(0, 65535)
        return Image.fromarray(np.rint(wide / 257).astype(np.uint8))
    return image


def _upright(pixels: Image, source: Image, colours: int) -> Image:
    """RGB or grey, turned as the camera was held (EXIF 2.32, tag Orientation)."""
    from PIL.Image import Transpose

    turns = (
        None, Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90,
    )  # fmt: skip
    if pixels.mode == "P" and "transparency" in pixels.info:
        pixels = pixels.convert("RGBA")
    pixels = pixels.convert("RGB" if colours == 3 else "L")
    orientation = _orientation(source)
    turn = turns[orientation - 1] if 1 <= orientation <= 8 else None
    return pixels if turn is None else pixels.transpose(turn)


def _orientation(image: Image) -> int:
    """1 (upright) where the EXIF block is missing or broken: that block is no part of the picture."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) else 1


def _sized(image: Image, plan: Preprocess) -> Image:
    """Resize, then cut from the middle (as torchvision's `Resize` and `CenterCrop` do)."""
    from PIL.Image import Resampling

    method = Resampling[plan.interpolation.upper()]
    if plan.exact:
        image = _resized(image, (plan.exact[1], plan.exact[0]), method)
    elif plan.shorter:
        width, height = image.size
        shorter = min(width, height)
        size = (plan.shorter * width // shorter, plan.shorter * height // shorter)
        image = _resized(image, size, method)
    return _cropped(image, plan.crop) if plan.crop else image


def _resized(image: Image, size: tuple[int, int], method: Any) -> Image:
    return image if image.size == size else image.resize(size, method)


def _cropped(image: Image, crop: tuple[int, int]) -> Image:
    """The middle part; a smaller picture gets a black border first."""
    height, width = crop
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    if image.width < width or image.height < height:
        left = -((width - image.width) // 2) if image.width < width else left
        top = -((height - image.height) // 2) if image.height < height else top
    return image.crop((left, top, left + width, top + height))


def _values(image: Image, plan: Preprocess) -> NDArray[Any]:
    """float32 arithmetic in the order that torchvision uses, so that the results are the same bits."""
    pixels = np.asarray(image)
    if pixels.ndim == 3 and plan.bgr:
        pixels = pixels[..., ::-1]
    values = pixels.astype(np.float32) / np.float32(1 / plan.scale)
    mean, std = np.array(plan.mean, np.float32), np.array(plan.std, np.float32)
    if plan.colours == 1:
        mean, std = mean[0], std[0]
    values = (values - mean) / std
    if values.ndim == 2 and plan.channel_axis is not None:
        values = np.expand_dims(values, plan.channel_axis)
    elif plan.channel_axis == 0:
        values = values.transpose(2, 0, 1)
    return _typed(values, np.dtype(plan.dtype))


def _typed(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind not in "iu":
        return np.ascontiguousarray(values, dtype)
    rounded = np.rint(values)
    limits = np.iinfo(dtype)
    if rounded.min() < limits.min or rounded.max() > limits.max:
        raise DataError(f"preprocess gives {rounded.min():g}..{rounded.max():g}, which does not fit {dtype}")
    return np.ascontiguousarray(rounded, dtype)
