"""Arrays in an `.npz` archive or an `.npy` file; the first axis counts samples. Nothing is unpickled."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.data._labels import label_name, usable_labels
from compressor.data._source import locate
from compressor.data._types import Batch, DataOptions
from compressor.errors import DataError
from compressor.model import TensorSpec
from compressor.store import digest, file_digest

__all__ = ["DESCRIPTION", "open_dataset", "recognise"]

DESCRIPTION = "numpy archive (.npz) or array (.npy)"
_SPLITS = ("train", "val", "valid", "validation", "test", "eval", "calib")
_BROKEN = (
    zipfile.BadZipFile, zlib.error, struct.error, ValueError, EOFError, OSError, RuntimeError,
)  # fmt: skip


def recognise(source: str) -> bool:
    """Whether `source` is a file that begins as an `.npy`, or a zip archive called `.npz`."""
    place = locate(source)
    if place is None or not place.path.is_file():
        return False
    with place.path.open("rb") as file:
        magic = file.read(6)
    return magic == b"\x93NUMPY" or place.path.suffix.lower() in (".npz", ".npy")


def open_dataset(source: str, options: DataOptions) -> _Arrays:
    """Open the archive; raises `DataError` if it is broken, holds no samples, or arrays of unequal length."""
    place = locate(source)
    assert place is not None
    members = _members(place.path)
    if place.split:
        members = _of_split(members, place.split, source)
    if not members:
        raise DataError(f"data '{source}': the archive is empty, there are no arrays in it")
    return _Arrays(source, place.path, members, options)


@dataclass(frozen=True)
class _Member:
    """One array: its name in the archive (None: the file is the array) and what its header says.

    `offset` is where its bytes begin, None where they are compressed or objects and cannot be mapped.
    """

    key: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    offset: int | None


class _Arrays:
    """See `compressor.data.Dataset`. Arrays that are stored uncompressed are memory-mapped."""

    kind = "npz"
    finite = False

    def __init__(self, source: str, path: Path, members: dict[str, _Member], options: DataOptions) -> None:
        self._source, self._path, self._members, self._options = source, path, members, options
        self._label = label_name(members, options.inputs)
        self.length = _length(members, self._label, options, source)
        self._loaded: dict[str, NDArray[Any]] = {}

    @cached_property
    def arrays(self) -> tuple[TensorSpec, ...]:
        sampled = {name: array for name, array in self._members.items() if self._is_sampled(array)}
        return tuple(
            TensorSpec(name, _dtype_name(array.dtype), array.shape[1:])
            for name, array in sampled.items()
            if name != self._label
        )

    @cached_property
    def usable(self) -> NDArray[Any]:
        return np.arange(self.length)

    @property
    def labels(self) -> NDArray[Any] | None:
        return self._labelling[0]

    @property
    def sha256(self) -> str:
        return digest(file_digest(self._path), sorted(self._members))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        aside = [
            f"array '{name}' ({'x'.join(map(str, array.shape))}) is left aside: it has not {self.length} rows"
            for name, array in self._members.items()
            if not self._is_sampled(array)
        ]
        if self._options.preprocess:
            aside.append("arrays are given to the model as they are; preprocess is for pictures")
        said = self._labelling[1] if self.labels is not None else ""
        return (*aside, said) if said else tuple(aside)

    @property
    def warnings(self) -> tuple[str, ...]:
        return (self._labelling[1],) if self.labels is None and self._labelling[1] else ()

    def batches(self, indices: NDArray[Any] | None, size: int) -> Iterator[Batch]:
        chosen = self.usable if indices is None else indices
        names = [spec.name for spec in self.arrays if spec.dtype not in ("object", "str")]
        labels = self.labels
        for start in range(0, len(chosen), size):
            rows = chosen[start : start + size]
            inputs = {name: self._rows(name, rows) for name in names}
            yield Batch(inputs, None if labels is None else labels[rows], rows)

    @cached_property
    def _labelling(self) -> tuple[NDArray[Any] | None, str]:
        """Labels, and what is to be said of them."""
        if self._label is None:
            return None, ""
        member = self._members[self._label]
        if member.shape[:1] != (self.length,):
            return None, f"labels '{self._label}' are left aside: they are not one per sample ({self.length})"
        if member.dtype.hasobject:
            return None, f"labels '{self._label}' are left aside: Python objects are not unpickled"
        return usable_labels(np.asarray(self._array(self._label)))

    def _is_sampled(self, member: _Member) -> bool:
        return not member.shape or member.shape[0] == self.length

    def _rows(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        array = self._array(name)
        return np.broadcast_to(array, len(rows)) if array.ndim == 0 else np.asarray(array[rows])

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self._loaded:
            self._loaded[name] = _read(self._path, self._members[name], self._source)
        return self._loaded[name]


def _length(members: dict[str, _Member], label: str | None, options: DataOptions, source: str) -> int:
    """The number of samples; arrays of another length than the inputs' are no samples."""
    lengths = {name: array.shape[0] for name, array in members.items() if array.shape and name != label}
    if not lengths:
        raise DataError(f"data '{source}': there are no samples in it, only {', '.join(members)}")
    known = {name: lengths[name] for name in (spec.name for spec in options.inputs) if name in lengths}
    distinct = set((known or lengths).values())
    labelled = {members[label].shape[0]} if label and members[label].shape else set()
    if len(distinct) > 1 and not known and labelled and labelled <= distinct:
        distinct = labelled
    if len(distinct) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in (known or lengths).items())
        raise DataError(
            f"data '{source}': the arrays differ in their number of samples: {listed}{_advice(members)}"
        )
    if distinct == {0}:
        raise DataError(f"data '{source}': there are no samples in it, the arrays are empty")
    return distinct.pop()


def _advice(members: dict[str, _Member]) -> str:
    found = [split for split in _SPLITS if any(_in_split(name, split) is not None for name in members)]
    return f"; choose a part by :{' or :'.join(found)}" if found else ""


def _in_split(name: str, split: str) -> str | None:
    """The name without the split's (`val_x`, `x_val`, `val/x`); None if it is of another split."""
    for mark in "_/.-":
        if name.startswith(split + mark):
            return name[len(split) + 1 :]
        if name.endswith(mark + split):
            return name[: -len(split) - 1]
    return None


def _of_split(members: dict[str, _Member], split: str, source: str) -> dict[str, _Member]:
    chosen = {short: array for name, array in members.items() if (short := _in_split(name, split))}
    if not chosen:
        raise DataError(
            f"data '{source}': no array is called '{split}_...' or '..._{split}'; "
            f"there are {', '.join(members)}"
        )
    return chosen


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return "str" if dtype.kind in "US" else dtype.newbyteorder("=").name


def _members(path: Path) -> dict[str, _Member]:
    """What the headers say; no array is read."""
    try:
        with path.open("rb") as file:
            if file.read(6) == b"\x93NUMPY":
                return {"arr_0": _header(file, 0, None, plain=True)}
        with zipfile.ZipFile(path) as archive:
            return {
                info.filename.removesuffix(".npy"): _archived(path, archive, info)
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
    except _BROKEN as error:
        raise DataError(f"data '{path}': not a readable numpy file ({error}); save it again") from error


def _archived(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    if not plain:
        with archive.open(info) as stream:
            return _header(stream, 0, info.filename, plain=False)
    with path.open("rb") as file:
        file.seek(info.header_offset)
        local = file.read(30)  # local file header, APPNOTE.TXT 4.3.7: two lengths at the end
        name, extra = struct.unpack("<HH", local[26:30])
        return _header(file, info.header_offset + 30 + name + extra, info.filename, plain=True)


def _header(file: Any, start: int, key: str | None, *, plain: bool) -> _Member:
    if plain:
        file.seek(start)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    offset = file.tell() if plain and not dtype.hasobject else None
    return _Member(key, shape, dtype, fortran, offset)


def _read(path: Path, member: _Member, source: str) -> NDArray[Any]:
    """The array: mapped where possible, else read whole."""
    try:
        if member.offset is not None and 0 not in member.shape:
            flat: NDArray[Any] = np.memmap(path, member.dtype, "r", member.offset, (math.prod(member.shape),))
            return flat.reshape(member.shape, order="F" if member.fortran else "C")
        if member.key is None:
            return np.asarray(np.load(path, allow_pickle=False))
        with np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[member.key.removesuffix(".npy")])
    except _BROKEN as error:
        raise DataError(f"data '{source}': array '{member.key}' cannot be read ({error})") from error
