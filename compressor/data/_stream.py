"""A data reference as batches that are named, typed and shaped as the model's inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.data import _fingerprints
from compressor.data._match import fixed_batch, match, reshaped, whole
from compressor.data._source import open_dataset
from compressor.data._types import Batch, DataOptions, Dataset
from compressor.errors import DataError
from compressor.model import TensorSpec

__all__ = ["Binder", "stream"]


def stream(data: dict[str, Any], start: int = 0) -> Iterator[Batch]:
    """The samples of a data reference (see docs/architecture.md), from number `start` of its indices on.

    A batch has `data["batch"]` samples, or fewer at the end; a model with a fixed batch of k gets k at a
    time, and what is left over at the end (or, if the source gives its own batches, of each of those) is left
    out with a warning. Memory does not depend on the number of samples. Raises `DataError` if the data
    do not fit, a sample cannot be read, or one is another than when the indices were made.
    """
    inputs = tuple(TensorSpec.of(spec) for spec in data["inputs"])
    dataset = open_dataset(data["source"], DataOptions(data.get("preprocess"), inputs))
    indices = np.load(data["indices"], allow_pickle=False) if data.get("indices") else None
    if start:
        indices = (dataset.usable if indices is None else indices)[start:]
    marks = _fingerprints.read(data.get("indices"))
    marks = marks[start:] if marks is not None else None
    read = 0
    binder = _binder(dataset, indices, inputs, data.get("binding"))
    given = left = 0
    for batch in dataset.batches(indices, binder.batch or int(data["batch"])):
        if marks is not None:
            expected = marks[read : read + len(batch.indices)]
            _fingerprints.refuse_change(data["source"], batch, binder.binding.values(), expected)
        read += len(batch.indices)
        if binder.batch and len(batch.indices) < binder.batch:
            left += len(batch.indices)
            continue
        given += len(batch.indices)
        yield binder.bind(batch)
    if marks is not None and read < len(marks):
        raise DataError(
            f"data '{data['source']}': the source gave fewer samples than before ({read} of {len(marks)})"
        )
    _say_left(left, given + start, binder.batch)


def _binder(
    dataset: Dataset,
    indices: NDArray[Any] | None,
    inputs: tuple[TensorSpec, ...],
    binding: dict[str, str] | None,
) -> Binder:
    """From the first sample if the binding is known: a full description may cost a pass over all."""
    first = next(dataset.batches(indices, 1), None) if binding else None
    if binding is None or first is None:
        return Binder.of(dataset, inputs)
    named = first.inputs.items()
    arrays = tuple(TensorSpec(name, array.dtype.name, array.shape[1:]) for name, array in named)
    return Binder(arrays, inputs, binding)


def _say_left(left: int, given: int, fixed: int | None) -> None:
    if left and not given:
        raise DataError(f"the model takes {fixed} samples at a time, but no batch of the data has as many")
    if left:
        events.warn(f"the model takes {fixed} samples at a time: {left} left over are not used")


class Binder:
    """Turns batches as the source names and types them into batches as the model does."""

    def __init__(
        self, arrays: tuple[TensorSpec, ...], inputs: tuple[TensorSpec, ...], binding: dict[str, str]
    ):
        arrays = tuple(arrays)
        known = {array.name: array for array in arrays}
        self.binding = binding
        self.batch = fixed_batch(arrays, inputs, binding)
        self._inputs = inputs
        self._reshaped = {spec.name for spec in inputs if reshaped(known[binding[spec.name]], spec)}
        self._alone = {spec.name for spec in inputs if whole(known[binding[spec.name]], spec)}

    @classmethod
    def of(cls, dataset: Dataset, inputs: tuple[TensorSpec, ...]) -> Binder:
        """For a dataset, with the binding that `match` finds."""
        return cls(dataset.arrays, inputs, match(dataset.arrays, inputs))

    def bind(self, batch: Batch) -> Batch:
        """Arrays under the inputs' names, C-contiguous, in the inputs' dtypes."""
        inputs = {
            spec.name: self._value(batch.inputs[self.binding[spec.name]], spec) for spec in self._inputs
        }
        return Batch(inputs, batch.labels, batch.indices)

    def _value(self, array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
        if spec.name in self._alone:
            array = array[0]
        elif spec.name in self._reshaped:
            array = np.reshape(array, (len(array), *map(int, spec.shape[1:])))
        return _cast(np.asarray(array), spec)


def _cast(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError as error:
        raise DataError(f"input {spec} has a dtype that data cannot be made in") from error
    if array.dtype.kind in "iu" and dtype.kind in "iu" and array.size:
        low, high, limits = array.min(), array.max(), np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise DataError(
                f"the data for input {spec} go from {low} to {high}, which does not fit into {dtype}"
            )
    with np.errstate(over="ignore"):  # a value too large becomes infinite, and that is looked for
        return np.asarray(array, dtype, order="C")
