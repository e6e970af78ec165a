"""Weights of recurrent layers that are stored as int8: what they meet, and whether 8 bits are enough.

LSTM, GRU and RNN run in float, so that storing their weights saves bytes and nothing else. What rounding them
does to the output is hard to foresee: a small change in a quiet step is carried on by all that follow, and
features of very different size (power spectra) meet in one row of W, which has one scale. So it is measured:
the layer runs on sequences of the calibration data with its weights as they would be stored, and those that
change its output too much are stored as float16.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.errors import DataError
from compressor.quantization.activations import Activations, Batches, usable
from compressor.quantization.half import HALVES
from compressor.quantization.integers import reads_input
from compressor.quantization.layers import Use
from compressor.quantization.patches import RECURRENT
from compressor.quantization.placement import STORED, Placement
from compressor.quantization.scheme import Scheme
from compressor.quantization.segments import write_segments
from compressor.quantization.view import View
from compressor.quantization.weights import quantize_weight

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from compressor.quantization.corrections import Corrections

__all__ = [
    "BOUND",
    "Kept",
    "Sequences",
    "keep",
    "keep_unseen",
    "load",
    "record",
    "stored",
    "take_out",
]

BOUND = 0.01  # of the output's root mean square: 40 dB
_FILE = "sequences.npz"
_SAMPLES, _BYTES = 8, 32 << 20  # of a layer
_WEIGHTS = {1: "W", 2: "R"}
Array = NDArray[Any]
Sequences = dict[str, list[dict[int, Array]]]  # by key of the node: samples, each its inputs by index


def stored(view: View, uses: Iterable[Use]) -> list[Use]:
    """Of stored weights, those of recurrent layers: W (input 1) and R (input 2)."""
    return [use for use in uses if view.producers[use.node].op_type in RECURRENT]


def record(model: ModelProto, uses: Sequence[Use], batches: Batches, folder: Path) -> None:
    """Write `folder/sequences.npz`: what the layers of `uses` read beside constants, for a few samples."""
    view = View(model)
    nodes = {use.node: view.producers[use.node] for use in uses}
    inputs = {
        key: {index: name for index, name in enumerate(node.input) if name and name not in view.initializers}
        for key, node in nodes.items()
    }
    tensors = list(dict.fromkeys(name for found in inputs.values() for name in found.values()))
    segments = write_segments(model, tensors, folder, "sequences")
    activations = Activations(segments, tensors)
    for path in segments:
        path.unlink()
    found: Sequences = {key: [] for key in nodes}
    for count, unit in enumerate(activations.units(usable(batches, _SAMPLES)), 1):
        values = dict(activations.run(unit))
        for key, names in inputs.items():
            held = sum(array.nbytes for sample in found[key] for array in sample.values())
            if held < _BYTES:
                found[key].append({index: values[name] for index, name in names.items()})
        events.progress("sequences", count, _SAMPLES)
    _save(found, folder)


def _save(found: Sequences, folder: Path) -> None:
    arrays: dict[str, Any] = {"keys": np.array(json.dumps(list(found)))}
    for number, samples in enumerate(found.values()):
        for place, sample in enumerate(samples):
            arrays |= {f"{number}.{place}.{index}": array for index, array in sample.items()}
    beside = folder / f"{_FILE}.partial"
    with beside.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / _FILE)


def load(folder: Path) -> Sequences:
    """What `record` wrote; raises `DataError` if it is not there."""
    try:
        file = np.load(folder / _FILE)
    except OSError as error:
        raise DataError(f"{folder / _FILE} is missing or damaged; gather moments again") from error
    with file:
        keys = json.loads(str(file["keys"]))
        found: Sequences = {key: [] for key in keys}
        for name in file.files:
            if name != "keys":
                number, place, index = map(int, name.split("."))
                samples = found[keys[number]]
                samples.extend({} for _ in range(place + 1 - len(samples)))
                samples[place][index] = file[name]
    return found


@dataclass(frozen=True)
class Kept:
    """A layer some of whose weights are not for 8 bits: their names, and the reason in words."""

    weights: frozenset[str]
    reason: str


def keep_unseen(view: View, uses: Sequence[Use]) -> dict[str, Kept]:
    """The layers that read an input of the model, of which nothing is known, by key of the node."""
    found: dict[str, list[Use]] = {}
    for use in uses:
        if reads_input(view, view.producers[use.node]):
            found.setdefault(use.node, []).append(use)
    why = "its input is one of the model's, and nothing is known of it"
    return {
        key: Kept(frozenset(use.weight for use in own), _reason(view, own, own, why))
        for key, own in found.items()
    }


def take_out(view: View, placed: Placement, kept: Mapping[str, Kept]) -> set[str]:
    """Strike weights from those that a placement stores as int8, and say why; gives their names."""
    names = {name for layer in kept.values() for name in layer.weights}
    reasons = {view.producers[key].name: layer.reason for key, layer in kept.items()}
    placed.stored = [use for use in placed.stored if use.weight not in names]
    placed.float = [
        replace(item, reason=f"{item.reason.removesuffix(STORED)}; {reasons[item.name]}")
        if item.name in reasons
        else item
        for item in placed.float
    ]
    return names


def _reason(view: View, own: Sequence[Use], kept: Sequence[Use], why: str) -> str:
    """What is said of a layer with weights of its `own`, of which some are `kept` from 8 bits."""
    kinds = {use.index: "int8" for use in own}
    kinds |= {use.index: "float16" if _half(view, use)[1] else "float32" for use in kept}
    stored = " and ".join(f"{_WEIGHTS[index]} as {kind}" for index, kind in sorted(kinds.items()))
    return f"it stores {stored}: {why}"


def _half(view: View, use: Use) -> tuple[Array, bool]:
    """A weight as it is when stored as float16, and whether it can be: it is float32 if not."""
    value = view.array(use.weight)
    assert value is not None
    fits = HALVES["float16"].misfit(value) is None
    return value.astype(np.float16).astype(np.float32) if fits else value, fits


def keep(
    view: View, uses: Sequence[Use], scheme: Scheme, corrections: Corrections, sequences: Sequences
) -> dict[str, Kept]:
    """The layers whose weights `uses` change the output by more than `BOUND` in int8, by key of the node.

    Of a layer's two weights, the fewest bytes are kept that bring it below. Layers without sequences are
    left out.
    """
    layers: dict[str, list[Use]] = {}
    for use in uses:
        if sequences.get(use.node):
            layers.setdefault(use.node, []).append(use)
    found = {}
    for place, (key, own) in enumerate(layers.items(), 1):
        kept = _kept(_Layer(view, view.producers[key], sequences[key]), own, uses, scheme, corrections)
        if kept is not None:
            found[key] = kept
        events.progress("recurrent layers", place, len(layers))
    return found


def _kept(
    layer: _Layer, own: Sequence[Use], uses: Sequence[Use], scheme: Scheme, corrections: Corrections
) -> Kept | None:
    exact, coded, half = {}, {}, {}
    for use in own:
        value = layer.view.array(use.weight)
        assert value is not None
        together = [other for other in uses if other.weight == use.weight]
        made = quantize_weight(value, together, [], scheme, corrections.quantizer(together))
        exact[use.index], coded[use.index] = value, made.codes * made.broadcast_scale()
        half[use.index] = _half(layer.view, use)[0]
    wanted = layer.outputs(exact)
    whole = _change(wanted, layer.outputs(coded))
    if whole <= BOUND:
        return None
    for choice in _choices({index: value.size for index, value in exact.items()}):
        changed = _change(wanted, layer.outputs({**coded, **{index: half[index] for index in choice}}))
        if changed <= BOUND:
            break
    kept = [use for use in own if use.index in choice]
    why = f"int8 would change its output by {whole:.1%}"
    return Kept(frozenset(use.weight for use in kept), _reason(layer.view, own, kept, why))


def _choices(sizes: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Which weights to keep, the fewest bytes first."""
    found = [part for count in range(1, len(sizes) + 1) for part in itertools.combinations(sizes, count)]
    yield from sorted(found, key=lambda part: sum(sizes[index] for index in part))


def _change(wanted: Sequence[Array], got: Sequence[Array]) -> float:
    """Root mean square of the difference, over that of what is wanted."""
    noise = sum(float(np.square((a - b).astype(np.float64)).sum()) for a, b in zip(wanted, got, strict=True))
    power = sum(float(np.square(a.astype(np.float64)).sum()) for a in wanted)
    return float(np.sqrt(noise / power)) if power > 0 else float(noise > 0)


@dataclass
class _Layer:
    """One recurrent node alone, whose weights are inputs, and what it reads in some samples."""

    view: View
    node: NodeProto
    samples: list[dict[int, Array]]
    session: Any = field(init=False)

    def __post_init__(self) -> None:
        import onnxruntime
        from onnx import ValueInfoProto, helper

        names = [f"i{index}" if name else "" for index, name in enumerate(self.node.input)]
        node = type(self.node).FromString(self.node.SerializeToString())
        node.input[:], node.output[:] = names, ["y"]
        self.constants = {
            index: value
            for index, name in enumerate(self.node.input)
            if (value := self.view.array(name)) is not None
        }
        inputs = [
            helper.make_tensor_value_info(
                names[index], helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim
            )
            for index, value in sorted({**self.constants, **self.samples[0]}.items())
        ]
        graph = helper.make_graph([node], "layer", inputs, [ValueInfoProto(name="y")])
        model = helper.make_model(
            graph, opset_imports=self.view.model.opset_import, ir_version=self.view.model.ir_version
        )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def outputs(self, weights: Mapping[int, Array]) -> list[Array]:
        """The output Y of each sample with these weights."""
        given = {**self.constants, **weights}
        return [
            self.session.run(["y"], {f"i{index}": value for index, value in {**given, **sample}.items()})[0]
            for sample in self.samples
        ]
