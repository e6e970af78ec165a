"""Full bias correction: each layer's bias makes good for what all quantization before it did to its mean.

Source: Nagel et al., Data-Free Quantization through Weight Equalization and Bias Correction, 2019
(arXiv:1906.04721), appendix D (empirical correction). Layers are corrected in the graph's order, so that
each one sees inputs that are corrected already: the quantized graph runs layer by layer over a few
samples, whose values wait at the cut. Of a mean error that a few samples tell, only as much is corrected as
stands out of their spread (James and Stein, Estimation with Quadratic Loss, 1961).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.errors import DataError
from compressor.quantization.activations import Activations, Array, Batches, Sample, samples, unusable
from compressor.quantization.segments import write_segments
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["correct", "shifts"]

Floats = NDArray[np.float64]
_MEMORY = 1 << 29  # bytes of values that wait at a cut
_LIVE = 2  # tensors as large as the largest that may wait at once
_INT32 = 2**31 - 1


def correct(
    reference: ModelProto,
    quantized: ModelProto,
    batches: Callable[[], Batches],
    folder: Path,
    limit: int = 64,
) -> int:
    """Correct the int32 biases of a Q/DQ model in place; gives how many layers were corrected.

    `reference` is the float graph whose nodes have the same names; `batches` gives the same data at every
    call, of which the first `limit` usable samples count (fewer where activations are large).
    """
    found = shifts(reference, quantized, batches, folder, limit)
    view = View(quantized)
    layers = _layers(quantized, view)
    for name, shift in found.items():
        _shift_bias(view, layers[name], shift)
    return len(found)


def shifts(
    reference: ModelProto,
    quantized: ModelProto,
    batches: Callable[[], Batches],
    folder: Path,
    limit: int = 64,
) -> dict[str, Floats]:
    """What to add to the bias [channels] of each quantized layer, by the node's name."""
    layers = _layers(quantized, View(quantized))
    outputs = {node.name: node.output[0] for node in reference.graph.node if node.name in layers}
    wanted, count = _float_means(reference, outputs, _clean(batches, limit), folder)
    walk = _Walk([sample.feeds for sample in _clean(batches, count)])
    makers = {layers[name].output[0]: name for name in outputs}
    pieces = write_segments(quantized, list(makers), folder, "corrected", few=1)
    found: dict[str, Floats] = {}
    for place, piece in enumerate(pieces):
        last = walk.through(piece, _reads(pieces[place + 1 :]))
        if last in makers:
            name = makers[last]
            found[name] = _certain(wanted[name] - walk.means(last, _axis(layers[name])))
            walk.add(last, found[name], _axis(layers[name]))
        piece.unlink()
        events.progress("bias correction", place + 1, len(pieces))
    return found


class _Walk:
    """The values of some samples at one cut of the graph after the other."""

    def __init__(self, values: list[dict[str, Array]]) -> None:
        self.values = values

    def through(self, piece: Path, later: set[str]) -> str:
        """Run a piece; keep what later ones read and what its last node makes, whose name is given."""
        import onnx

        graph = onnx.load(piece, load_external_data=False).graph
        outputs = [item.name for item in graph.output]
        last = next((name for name in graph.node[-1].output if name in outputs), "")
        activations = Activations([piece], outputs, exact=True)
        for number, values in enumerate(self.values):
            feeds = {name: values[name] for name in activations.inputs}
            kept = {name: value for name, value in values.items() if name in later}
            made = dict(activations.run(Sample(number, feeds)))
            self.values[number] = kept | {key: made[key] for key in made if key in later or key == last}
        return last

    def means(self, name: str, axis: int) -> Floats:
        """The mean of each channel in every sample, [samples, channels]."""
        return np.array([_means(values[name], axis) for values in self.values])

    def add(self, name: str, shift: Floats, axis: int) -> None:
        """Go on as if the layer's bias had been shifted."""
        for values in self.values:
            shape = [-1 if place == axis % values[name].ndim else 1 for place in range(values[name].ndim)]
            values[name] = values[name] + shift.astype(np.float32).reshape(shape)


def _float_means(
    reference: ModelProto, outputs: Mapping[str, str], found: Iterator[Sample], folder: Path
) -> tuple[dict[str, Floats], int]:
    """The means [samples, channels] of each layer's output, and how many samples that are."""
    axes = {node.output[0]: _axis(node) for node in reference.graph.node if node.name in outputs}
    segments = write_segments(reference, list(axes), folder, "reference")
    activations = Activations(segments, list(axes))
    for path in segments:
        path.unlink()
    means: dict[str, list[Floats]] = {name: [] for name in axes}
    count, allowed = 0, None
    for count, unit in enumerate(activations.units(found), 1):
        largest = 0
        for name, value in activations.run(unit):
            means[name].append(_means(value, axes[name]))
            largest = max(largest, value.nbytes)
        allowed = allowed or max(4, _MEMORY // (_LIVE * max(largest, 1)))
        if count >= allowed:
            break
    if not count:
        raise DataError("bias correction: no sample is free of NaN and Inf; mend the data")
    return {name: np.array(means[output]) for name, output in outputs.items()}, count


def _layers(quantized: ModelProto, view: View) -> dict[str, NodeProto]:
    """Nodes that read a dequantized bias of their own, by name."""
    found = {}
    for node in quantized.graph.node:
        maker = view.producers.get(node.input[2]) if len(node.input) > 2 else None
        if node.op_type in ("Conv", "Gemm") and maker is not None and maker.op_type == "DequantizeLinear":
            found[node.name] = node
    return found


def _shift_bias(view: View, node: NodeProto, shift: Floats) -> None:
    """Give a layer codes of its own that stand for the shifted bias."""
    dequantize = view.producers[node.input[2]]
    codes, scale = view.array(dequantize.input[0]), view.array(dequantize.input[1])
    assert codes is not None
    assert scale is not None
    moved = np.clip(np.rint(codes + shift / scale.astype(np.float64)), -_INT32, _INT32).astype(np.int32)
    output = view.new_name(f"{node.input[2]}_corrected")
    place = next(i for i, item in enumerate(view.graph.node) if item.output[:1] == dequantize.output[:1])
    copy = type(dequantize)()
    copy.CopyFrom(dequantize)
    copy.name = copy.output[0] = output
    copy.input[0] = view.add(f"{dequantize.input[0]}_corrected", moved)
    view.graph.node.insert(place, copy)
    node.input[2] = output


def _clean(batches: Callable[[], Batches], limit: int) -> Iterator[Sample]:
    return itertools.islice((sample for sample in samples(batches()) if not unusable(sample)), limit)


def _reads(pieces: Sequence[Path]) -> set[str]:
    import onnx

    graphs = [onnx.load(piece, load_external_data=False).graph for piece in pieces]
    return {item.name for graph in graphs for item in graph.input}


def _axis(node: NodeProto) -> int:
    return 1 if node.op_type == "Conv" else -1


def _means(value: Array, axis: int) -> Floats:
    """The mean of each channel."""
    moved = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
    return np.asarray(moved.mean(axis=0, dtype=np.float64))


def _certain(errors: Floats) -> Floats:
    """The mean [channels] of `errors` [samples, channels], shrunk towards 0 by what may be chance."""
    mean = errors.mean(axis=0)
    if len(errors) < 2:
        return np.asarray(mean)
    chance = errors.var(axis=0, ddof=1) / len(errors)
    return np.asarray(mean * np.maximum(0.0, 1 - chance / np.maximum(np.square(mean), np.finfo(float).tiny)))
