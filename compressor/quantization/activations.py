"""The values inside an ONNX graph, sample by sample.

A sample at a time is what makes calibration independent of the batch size to the last bit, keeps one
sample's activations in memory however many there are, and tells which sample is a bad one. A graph
whose inputs have a fixed batch is given as many samples as it takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.errors import DataError

__all__ = ["Activations", "Batches", "Sample", "instrument", "samples", "unusable"]

Array = NDArray[Any]
Batches = Iterable[tuple[Sequence[int] | Array, Mapping[str, Array]]]
_INLINE = 1 << 30  # bytes of weights that go into the file itself


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


def instrument(model: Any, tensors: Sequence[str], path: Path) -> None:
    """Write the `onnx.ModelProto` to `path` with `tensors` among its outputs.

    Weights of more than 1 GiB in all move from `model` into a file beside `path`.
    """
    import onnx

    known = {value.name for value in (*model.graph.input, *model.graph.output)}
    declared = len(model.graph.output)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in known)
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    beside = f"{path.name}.data" if weights > _INLINE else None
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    onnx.save_model(model, path, save_as_external_data=beside is not None, location=beside)
    del model.graph.output[declared:]


class Activations:
    """A graph made by `instrument`, opened in onnxruntime on the CPU.

    `exact` turns every graph optimization off: Q/DQ pairs are then simulated in float.
    """

    def __init__(self, path: Path, tensors: Sequence[str], *, exact: bool = False) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", 0))
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if exact:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: tuple(value.shape) for value in self._session.get_inputs()}
        self._given = [name for name in tensors if name in self.inputs]
        self._made = [name for name in tensors if name not in self.inputs]

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

    def run(self, sample: Sample) -> Iterator[tuple[str, Array]]:
        """Each tensor's name and value; a value is let go before the next one is handed out.

        Raises `DataError` if the graph cannot run on the sample.
        """
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        feeds = {name: array for name, array in sample.feeds.items() if name in self.inputs}
        yield from ((name, feeds[name]) for name in self._given)
        try:
            values = self._session.run(self._made, feeds) if self._made else []
        except (state.Fail, state.InvalidArgument, state.RuntimeException, state.NotImplemented) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"the model cannot run on sample {sample.index}: {reason}") from error
        for place, name in enumerate(self._made):
            value, values[place] = values[place], None
            yield name, value


def _fills(sample: Sample, inputs: Mapping[str, tuple[int | str, ...]]) -> bool:
    return all(array.shape[:1] == inputs[name][:1] for name, array in sample.feeds.items() if name in inputs)


def _together(parts: Sequence[Sample]) -> Sample:
    feeds = {name: np.concatenate([part.feeds[name] for part in parts]) for name in parts[0].feeds}
    return Sample(parts[-1].index, feeds)
