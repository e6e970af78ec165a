"""The values inside an ONNX graph, sample by sample.

A sample at a time is what makes calibration independent of the batch size to the last bit, keeps one
sample's activations in memory however many there are, and tells which sample is a bad one. A graph
whose inputs have a fixed batch is given as many samples as it takes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.errors import DataError

__all__ = ["Activations", "Batches", "Sample", "samples", "unusable", "usable"]

_THREADS = 8  # a session; one sample seldom keeps more of them busy
Array = NDArray[Any]
Batches = Iterable[tuple[Sequence[int] | Array, Mapping[str, Array]]]


@dataclass(frozen=True)
class Sample:
    """One sample's inputs (with a batch axis of 1, if the graph has one), and its index in the data."""

    index: int
    feeds: dict[str, Array]


def samples(batches: Batches) -> Iterator[Sample]:
    """Split batches (indices and input arrays) along axis 0; a batch of one is a sample as it is."""
    for indices, inputs in batches:
        n = len(indices)
        for place, index in enumerate(indices):
            rows = slice(place, place + 1) if n > 1 else ...
            yield Sample(int(index), {name: array[rows] for name, array in inputs.items()})


def unusable(sample: Sample) -> str | None:
    """What is wrong with a sample's inputs, as in "NaN in input 'image'"; None if they are finite."""
    for name, array in sample.feeds.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"{'NaN' if np.isnan(array).any() else 'Inf'} in input '{name}'"
    return None


def usable(batches: Batches, limit: int) -> Iterator[Sample]:
    """The first `limit` samples whose inputs are finite."""
    clean = (sample for sample in samples(batches) if not unusable(sample))
    return itertools.islice(clean, limit)


def _cores() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1


class Activations:
    """`tensors` of a graph that `write_segments` wrote, from onnxruntime on the CPU.

    `exact` turns every graph optimization off: Q/DQ pairs are then simulated in float.
    """

    def __init__(self, segments: Sequence[Path], tensors: Sequence[str], *, exact: bool = False) -> None:
        self._wanted = dict.fromkeys(tensors)
        self._segments = [_Segment.open(path, exact) for path in segments]
        made = {name for segment in self._segments for name in segment.outputs}
        self.inputs = {
            name: shape
            for segment in self._segments
            for name, shape in segment.inputs.items()
            if name not in made
        }

    @property
    def batch(self) -> int:
        """How many samples the graph takes at once: its inputs' fixed first dimension, else 1."""
        sizes = {shape[0] if shape and isinstance(shape[0], int) else 1 for shape in self.inputs.values()}
        return sizes.pop() if len(sizes) == 1 else 1

    def units(self, found: Iterable[Sample]) -> Iterator[Sample]:
        """Samples put together as the graph takes them; the last unit is filled up with its last sample.

        A unit bears the index of its last sample.
        """
        waiting: list[Sample] = []
        for sample in found:
            if not _fills(sample, self.inputs) and self.batch > 1:
                waiting.append(sample)
                if len(waiting) == self.batch:
                    yield _together(waiting)
                    waiting = []
            else:
                yield sample
        if waiting:
            yield _together(waiting + waiting[-1:] * (self.batch - len(waiting)))

    def run(
        self, sample: Sample, supply: Callable[[str], Array] | None = None
    ) -> Iterator[tuple[str, Array]]:
        """Each tensor's name and value, in the order in which the graph makes them.

        A value is let go as soon as nothing reads it any more. `supply` is asked for inputs that the sample
        does not have when the piece that reads them comes. Raises `DataError` if the graph cannot run on the
        sample.
        """
        values = dict(sample.feeds)
        yield from ((name, values[name]) for name in self._wanted if name in values)
        for place, segment in enumerate(self._segments):
            given = {
                name: values[name] if supply is None or name in values else supply(name)
                for name in segment.inputs
            }
            made = segment.run(given, sample.index)
            later = {name for after in self._segments[place + 1 :] for name in after.inputs}
            values = {name: value for name, value in values.items() if name in later}
            for name in segment.outputs:
                value = made.pop(name)
                if name in later:
                    values[name] = value
                if name in self._wanted:
                    yield name, value
                del value  # not held while the next piece runs


@dataclass(frozen=True)
class _Segment:
    session: Any
    inputs: dict[str, tuple[int | str | None, ...]]
    outputs: list[str]

    @classmethod
    def open(cls, path: Path, exact: bool) -> _Segment:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = min(_THREADS, _cores())
        options.enable_cpu_mem_arena = False  # every segment would keep one of its own
        options.enable_mem_pattern = False  # nor one block for all that a run needs at any time
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if exact:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        inputs = {value.name: tuple(value.shape) for value in session.get_inputs()}
        return cls(session, inputs, [value.name for value in session.get_outputs()])

    def run(self, feeds: Mapping[str, Array], index: int) -> dict[str, Array]:
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        try:
            values = self.session.run(self.outputs, feeds)
        except (state.Fail, state.InvalidArgument, state.RuntimeException, state.NotImplemented) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"the model cannot run on sample {index}: {reason}") from error
        return dict(zip(self.outputs, values, strict=True))


def _fills(sample: Sample, inputs: Mapping[str, tuple[int | str | None, ...]]) -> bool:
    return all(array.shape[:1] == inputs[name][:1] for name, array in sample.feeds.items() if name in inputs)


def _together(parts: Sequence[Sample]) -> Sample:
    feeds = {name: np.concatenate([part.feeds[name] for part in parts]) for name in parts[0].feeds}
    return Sample(parts[-1].index, feeds)
