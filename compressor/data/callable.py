"""Batches from the user's own code: `module:callable` or `file.py:callable` returns an iterable of batches.

It is called anew for every pass, and must give the same each time.

A batch is an array (or tensor), `(inputs, labels)`, or a mapping of names to arrays, of which one may hold
labels. What the module names may also be an iterable itself, such as a torch `DataLoader`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import events, user_code
from compressor.data._labels import label_name, usable_labels
from compressor.data._source import is_reference
from compressor.data._types import Batch, DataOptions
from compressor.errors import DataError
from compressor.model import TensorSpec

__all__ = ["DESCRIPTION", "open_dataset", "recognise"]

DESCRIPTION = "module:callable or file.py:callable that gives batches"
_FORMS = "give an array, (inputs, labels), or a dict of arrays by input name"


def recognise(source: str) -> bool:
    """Whether `source` reads as `module:callable` or `file.py:callable`; nothing is imported."""
    return is_reference(source)


def open_dataset(source: str, options: DataOptions) -> _Batches:
    """Import the module and find the callable; raises `UsageError` if it is not there."""
    return _Batches(source, user_code.load(source), options)


@dataclass(frozen=True)
class _Facts:
    """What one pass over all batches shows."""

    arrays: tuple[TensorSpec, ...]
    length: int
    labels: NDArray[Any] | None
    sha256: str
    said: str


class _Batches:
    """See `compressor.data.Dataset`. Samples are counted in the order in which the batches give them."""

    kind = "callable"
    finite = False

    def __init__(self, source: str, made: Any, options: DataOptions) -> None:
        self._source, self._made, self._options = source, made, options

    @property
    def arrays(self) -> tuple[TensorSpec, ...]:
        return self._facts.arrays

    @property
    def length(self) -> int:
        return self._facts.length

    @cached_property
    def usable(self) -> NDArray[Any]:
        return np.arange(self.length)

    @property
    def labels(self) -> NDArray[Any] | None:
        return self._facts.labels

    @property
    def sha256(self) -> str:
        return self._facts.sha256

    @property
    def notes(self) -> tuple[str, ...]:
        return (self._facts.said,) if self._facts.said and self.labels is not None else ()

    @property
    def warnings(self) -> tuple[str, ...]:
        return (self._facts.said,) if self._facts.said and self.labels is None else ()

    def batches(self, indices: NDArray[Any] | None, size: int) -> Iterator[Batch]:
        """No batch is merged with another: their shapes may differ."""
        last = None if indices is None else int(indices[-1]) if len(indices) else -1
        known = self.__dict__.get("_facts")  # an earlier pass of this process, if there was one
        total = hashlib.sha256()
        for batch in self._pass():
            if last is not None and batch.indices[0] > last and (known is None or last + 1 < known.length):
                return
            if known is not None:
                total.update(_content(batch))
            rows = np.arange(len(batch.indices))
            if indices is not None:
                rows = rows[np.isin(batch.indices, indices)]
            labels = self._usable(batch)
            for start in range(0, len(rows), size):
                yield _taken(batch, labels, rows[start : start + size])
        if known is not None and total.hexdigest() != known.sha256:
            raise self._changed()

    def _usable(self, batch: Batch) -> NDArray[Any] | None:
        """The batch's labels; whether rows are one-hot can be told from all batches only."""
        if batch.labels is None or (batch.labels.ndim == 1 and batch.labels.dtype.kind in "biuf"):
            return batch.labels
        return None if self.labels is None else self.labels[batch.indices]

    @cached_property
    def _facts(self) -> _Facts:
        summary = _Summary()
        for batch in self._pass():
            summary.add(batch)
            events.progress(f"reading {self._source}", summary.length, None)
        if not summary.length:
            raise DataError(f"data '{self._source}': there are no samples in it, it gave no batch")
        again = next(self._pass(), None)
        if again is None or _content(again) != summary.first:
            raise self._changed()
        return summary.facts()

    def _changed(self) -> DataError:
        return DataError(
            f"data '{self._source}': a second pass gives other samples than the first; return a new "
            "iterable at each call, always in the same order (no shuffling, seed what is random)"
        )

    def _pass(self) -> Iterator[Batch]:
        with user_code.running(self._source):
            given = iter(self._made() if callable(self._made) else self._made)
        begun = 0
        while True:
            with user_code.running(self._source):
                item = next(given, _END)
                if item is _END:
                    return
                inputs, labels = self._parts(item)
            batch = self._batch(inputs, labels, begun)
            if len(batch.indices):
                yield batch
            begun += len(batch.indices)

    def _parts(self, item: Any) -> tuple[dict[str, NDArray[Any]], NDArray[Any] | None]:
        """Named inputs and labels of what the user's code gave."""
        labels = None
        if isinstance(item, tuple | list):
            if len(item) not in (1, 2):
                raise DataError(f"data '{self._source}' gave a sequence of {len(item)} things; {_FORMS}")
            item, labels = (*item, None)[:2]
        if not isinstance(item, Mapping):
            item = {"x": item}
        inputs = {str(name): _array(value) for name, value in item.items()}
        key = label_name(inputs, self._options.inputs)
        if labels is None and key is not None and len(inputs) > 1:
            return {name: value for name, value in inputs.items() if name != key}, inputs[key]
        return inputs, None if labels is None else _array(labels)

    def _batch(self, inputs: dict[str, NDArray[Any]], labels: NDArray[Any] | None, begun: int) -> Batch:
        arrays = {**inputs, **({} if labels is None else {"labels": labels})}
        sizes = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
        size = next(iter(sizes.values()), None)
        if size is None or set(sizes.values()) != {size}:
            listed = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise DataError(
                f"data '{self._source}': arrays of a batch must have the same first axis; it gave {listed}"
            )
        return Batch(inputs, labels, np.arange(begun, begun + size))


_END = object()


class _Summary:
    """Collects `_Facts` batch by batch; keeps labels, but no samples."""

    def __init__(self) -> None:
        self.length = 0
        self.first = b""
        self._digest = hashlib.sha256()
        self._shapes: dict[str, tuple[str, tuple[int | str, ...]]] = {}
        self._labels: list[NDArray[Any] | None] = []

    def add(self, batch: Batch) -> None:
        content = _content(batch)
        self.first = self.first or content
        self._digest.update(content)
        for name, array in batch.inputs.items():
            known = self._shapes.get(name)
            shape = tuple(array.shape[1:]) if known is None else _joint(known[1], array.shape[1:])
            self._shapes[name] = (_dtype_name(array), shape)
        self._labels.append(batch.labels)
        self.length += len(batch.indices)

    def facts(self) -> _Facts:
        arrays = tuple(TensorSpec(name, dtype, shape) for name, (dtype, shape) in self._shapes.items())
        labels, said = self._joined()
        return _Facts(arrays, self.length, labels, self._digest.hexdigest(), said)

    def _joined(self) -> tuple[NDArray[Any] | None, str]:
        """All labels, and what is to be said of them."""
        given = [labels for labels in self._labels if labels is not None]
        if len(given) < len(self._labels):
            return None, "some batches have labels and some have none: all are left aside" if given else ""
        if len({labels.shape[1:] for labels in given}) > 1:
            return None, "labels differ in shape from batch to batch, and are left aside"
        return usable_labels(np.concatenate(given))


def _joint(known: tuple[int | str, ...], shape: tuple[int, ...]) -> tuple[int | str, ...]:
    """The shape of both; a size that differs gets a name."""
    if len(known) != len(shape):
        raise DataError(f"batches differ in rank: {known} and {shape} per sample")
    pairs = enumerate(zip(known, shape, strict=True), 1)
    return tuple(have if have == new else f"dim{axis}" for axis, (have, new) in pairs)


def _taken(batch: Batch, labels: NDArray[Any] | None, rows: NDArray[Any]) -> Batch:
    inputs = {name: array[rows] for name, array in batch.inputs.items()}
    return Batch(inputs, None if labels is None else labels[rows], batch.indices[rows])


def _content(batch: Batch) -> bytes:
    """A digest of names, types, shapes and values."""
    total = hashlib.sha256()
    arrays = {**batch.inputs, **({} if batch.labels is None else {"": batch.labels})}
    for name, array in arrays.items():
        total.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        total.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    return total.digest()


def _dtype_name(array: NDArray[Any]) -> str:
    return "str" if array.dtype.kind in "US" else array.dtype.name


def _array(value: Any) -> NDArray[Any]:
    """A numpy array from an array, a tensor of any framework, or nested lists; imports no framework."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if hasattr(value, "numpy") and not isinstance(value, np.ndarray):
        value = value.numpy()
    return np.asarray(value)
