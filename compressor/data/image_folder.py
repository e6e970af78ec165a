"""A folder of pictures: a sub-folder a class, or labels in `labels.json` / `labels.csv`, or no labels."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.data import _images
from compressor.data._preprocess import plan
from compressor.data._source import locate
from compressor.data._types import Batch, DataOptions
from compressor.errors import DataError
from compressor.model import TensorSpec

__all__ = ["DESCRIPTION", "open_dataset", "recognise"]

DESCRIPTION = "folder of pictures"
_SPLITS = {
    "train",
    "training",
    "val",
    "valid",
    "validation",
    "test",
    "testing",
    "eval",
    "calib",
    "calibration",
}
_LABEL_FILES = ("labels.json", "labels.csv")
_FOREIGN = "{} does not map file names to one label each: the pictures are taken as unlabelled"


def recognise(source: str) -> bool:
    """Whether `source` is a folder (or a folder's `:split`) that exists."""
    place = locate(source)
    if place is None or not place.path.is_dir():
        return False
    return (place.path / (place.split or "")).is_dir()


def open_dataset(source: str, options: DataOptions) -> _Folder:
    """Open the folder; raises `DataError` if it holds no picture, or splits of which none was chosen."""
    place = locate(source)
    assert place is not None
    root = place.path / (place.split or "")
    names = _pictures(root)
    if not names:
        raise DataError(f"data '{source}': there are no samples in it, no file with a picture's ending")
    tops = {name.split("/")[0] for name in names}
    if len(tops) > 1 and {top.lower() for top in tops} <= _SPLITS:
        raise DataError(
            f"data '{source}': the folder holds splits; choose one, e.g. {source}:{sorted(tops)[0]}"
        )
    return _Folder(source, root, names, options)


class _Folder:
    """See `compressor.data.Dataset`. Positions count all files with a picture's ending, by name (`names`)."""

    kind = "image_folder"
    finite = True

    def __init__(self, source: str, root: Path, names: list[str], options: DataOptions) -> None:
        self._source, self._root = source, root
        self._plan, self._plan_notes = plan(options.preprocess, options.inputs)
        self._labelling = _labelling(root, names)
        self.names = self._labelling.names
        self.length = len(self.names)

    @property
    def arrays(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("image", self._plan.dtype, self._plan.sample),)

    @property
    def labels(self) -> NDArray[Any] | None:
        return self._labelling.labels

    @cached_property
    def _problems(self) -> list[str | None]:
        """Why each picture cannot be read; every file is decoded once."""
        found: list[str | None] = []
        with ThreadPoolExecutor(_workers()) as pool:
            for reason in pool.map(_images.problem, (self._root / name for name in self.names)):
                found.append(reason)
                if len(found) % 64 == 0 or len(found) == self.length:
                    events.progress("checking pictures", len(found), self.length)
        if all(found):
            raise DataError(f"data '{self._source}': no picture in it can be read ({found[0]})")
        return found

    @cached_property
    def usable(self) -> NDArray[Any]:
        return np.array([place for place, reason in enumerate(self._problems) if reason is None])

    @cached_property
    def sha256(self) -> str:
        total = hashlib.sha256()
        labels = [name for name in _LABEL_FILES if (self._root / name).is_file()]
        for name in [*self.names, *labels]:
            with (self._root / name).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{_normal(name)}\0{content}\n".encode())
        return total.hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        return self._labelling.notes + self._plan_notes

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        broken = [(name, reason) for name, reason in zip(self.names, self._problems, strict=True) if reason]
        reasons = [f"{name} ({str(reason).removeprefix(f'{Path(name).name}: ')})" for name, reason in broken]
        skipped = (f"{len(broken)} unreadable picture(s) skipped: {'; '.join(reasons)}",) if broken else ()
        return self._labelling.warnings + skipped

    def batches(self, indices: NDArray[Any] | None, size: int) -> Iterator[Batch]:
        chosen = self.usable if indices is None else indices
        with ThreadPoolExecutor(_workers()) as pool:
            for start in range(0, len(chosen), size):
                rows = chosen[start : start + size]
                pictures = list(pool.map(self._read, rows))
                labels = None if self.labels is None else self.labels[rows]
                yield Batch({"image": _stacked(pictures)}, labels, rows)

    def _read(self, position: int) -> NDArray[Any]:
        return _images.read(self._root / self.names[position], self._plan)


def _workers() -> int:
    """Threads that decode: Pillow lets go of the interpreter's lock while it does."""
    return min(8, os.cpu_count() or 1)


def _stacked(pictures: list[NDArray[Any]]) -> NDArray[Any]:
    if len({picture.shape for picture in pictures}) > 1:
        raise DataError(
            "the pictures differ in size: add --preprocess resize=HEIGHTxWIDTH, or resize=N,crop=N"
        )
    return np.stack(pictures)


def _pictures(root: Path) -> list[str]:
    """Files with a picture's ending, relative to `root`, no hidden ones, sorted alike everywhere."""
    found = [
        (folder / name).relative_to(root).as_posix()
        for folder, files in _walk(root)
        for name in files
        if Path(name).suffix.lower() in _images.ENDINGS and not name.startswith(".")
    ]
    return sorted((name for name in found if (root / name).is_file()), key=_normal)


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders that are not hidden, each once, through links too."""
    seen: set[str] = set()
    for folder, inner, files in os.walk(root, followlinks=True):
        seen.add(os.path.realpath(folder))
        inner[:] = [
            name
            for name in inner
            if not name.startswith(".") and os.path.realpath(Path(folder, name)) not in seen
        ]
        yield Path(folder), files


def _normal(name: str) -> str:
    return unicodedata.normalize("NFC", name)


@dataclass(frozen=True)
class _Labelling:
    """The pictures that take part, and their labels if there are any."""

    names: list[str]
    labels: NDArray[Any] | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def _labelling(root: Path, names: list[str]) -> _Labelling:
    for file in _LABEL_FILES:
        if (root / file).is_file():
            table = _table(root / file)
            return (
                _Labelling(names, warnings=(_FOREIGN.format(file),))
                if table is None
                else _listed(root / file, table, names)
            )
    folders = sorted(item.name for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))
    if len(folders) < 2 or any("/" not in name for name in names):
        return _Labelling(names)
    classes = {name: number for number, name in enumerate(folders)}
    labels = np.array([classes[name.split("/")[0]] for name in names], np.int64)
    listed = ", ".join(folders[:5]) + (", ..." if len(folders) > 5 else "")
    notes = (f"labels from {len(folders)} sub-folders, in the order of their names: {listed}",)
    return _Labelling(names, labels, notes, _numbered(folders))


def _numbered(folders: list[str]) -> tuple[str, ...]:
    """Warn where 10 sorts before 2."""
    if not all(name.isdecimal() for name in folders) or folders == sorted(folders, key=int):
        return ()
    place = next(place for place, name in enumerate(folders) if name != sorted(folders, key=int)[place])
    return (
        f"class folders are sorted as text (as torchvision's ImageFolder does): folder '{folders[place]}' is "
        f"class {place}; write labels.json if the model was trained otherwise",
    )


def _listed(file: Path, labels: dict[str, int | float | str], names: list[str]) -> _Labelling:
    """Labels by file name, or by path relative to the folder."""
    table = {_normal(name): label for name, label in labels.items()}
    found = {name: table.get(_normal(name), table.get(_normal(name.split("/")[-1]))) for name in names}
    labelled = [name for name in names if found[name] is not None]
    if not labelled:
        raise DataError(f"{file}: none of its names is a picture here (first picture: {names[0]})")
    without = len(names) - len(labelled)
    notes = [f"labels from {file.name}"]
    if without:
        notes.append(f"{without} picture(s) without an entry in {file.name} are left out")
    values = [found[name] for name in labelled]
    if any(isinstance(value, str) for value in values):
        classes = sorted({str(value) for value in values})
        values = [classes.index(str(value)) for value in values]
        notes.append(f"label names are numbered in their order: {', '.join(classes[:5])}")
    whole = all(isinstance(value, int) for value in values)
    return _Labelling(labelled, np.array(values, np.int64 if whole else np.float64), tuple(notes))


def _table(file: Path) -> dict[str, int | float | str] | None:
    """File name to label, or None for annotations of another kind. Raises `DataError` for a damaged file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        rows = json.loads(text) if file.suffix == ".json" else dict(_pairs(text))
    except (ValueError, OSError) as error:
        raise DataError(f"{file}: cannot be read as labels ({error})") from error
    if not isinstance(rows, dict) or not all(isinstance(label, int | float | str) for label in rows.values()):
        return None
    return rows


def _pairs(text: str) -> Iterator[tuple[str, int | float | str]]:
    """The rows `file,label`; a first row without a picture's name is a heading."""
    for place, row in enumerate(row for row in csv.reader(text.splitlines()) if row):
        if len(row) < 2:
            raise ValueError(f"row {place + 1} is not 'file,label'")
        if place or Path(row[0]).suffix.lower() in _images.ENDINGS:
            yield row[0].strip(), _value(row[1].strip())


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
