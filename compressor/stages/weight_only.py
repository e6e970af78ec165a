"""Weight-only quantization of an ONNX model: weights in blocks of 4 or 8 bits, activations in float."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import UsageError
from compressor.model import Model
from compressor.stages import _outcome

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from compressor.quantization.blocks import Blocks
    from compressor.quantization.moments import Moments
    from compressor.quantization.nbits import Layer, Plan
    from compressor.quantization.view import View

__all__ = ["FORM", "VERSION", "calibrate", "calibration", "run"]

VERSION = 2
FORM = "onnx"
_ROUNDINGS = ("nearest", "hqq", "gptq")
_LEVELS = (0, 1, 2, 3, 4)  # of MatMulNBits
_GROUPS = (16, 32, 64, 128, 256)
_WIDEST = 8192  # inputs of a layer whose second moments are still solved with


def calibration(parameters: dict[str, Any]) -> str:
    """GPTQ needs second moments, the other roundings need no data."""
    return "required" if parameters.get("rounding") == "gptq" else "none"


def calibrate(model: dict[str, Any], data: dict[str, Any], folder: str) -> dict[str, Any]:
    """The task: gather second moments of what the layers read (see `quantization.moments`)."""
    from compressor.data import stream
    from compressor.quantization import graph, moments, nbits
    from compressor.quantization.view import View

    prepared = graph.prepare(Path(model["path"]))
    view = View(prepared)
    uses = [layer.use for layer in nbits.plan(view, _GROUPS[0], frozenset()).matrices]
    if not uses:
        return {"layers": 0}
    batches = ((batch.indices, batch.inputs) for batch in stream(data))
    found = moments.gather(prepared, uses, batches, Path(folder))
    moments.save(found, Path(folder))
    return {"layers": len(found)}


def run(
    model: dict[str, Any],
    folder: str,
    ranges: str | None = None,
    bits: int = 4,
    group: int = 32,
    rounding: str = "hqq",
    wide: float = 0.0,
    accuracy_level: int = 4,
    exclude: list[str] | None = None,
) -> dict[str, Any]:
    """The task: pack constant weights of MatMul, Gemm and (4 bits) tables; store the others (see `storage`).

    `group` weights along a layer's inputs share a scale and a zero point. `rounding` is nearest, hqq or
    gptq, which reads what `calibrate` left in the folder `ranges`. The share `wide` (from 0 to below 1) of
    the packed weights, those of the layers that 4 bits change most, gets 8 bits. `accuracy_level` is the
    kernel's: 4 rounds activations to int8 inside it, 0 keeps them. `exclude` names nodes to be left in float.

    Facts of the model that is given back: the parameters, `quantized` (layers packed), `by_bits` (weights
    per number of bits), `wide_layers`, `stored` (weights stored as int8), `float` (name, op and reason of
    every layer that is not packed). Raises `UsageError` for parameters that do not exist.
    """
    from compressor.quantization import graph, nbits, storage
    from compressor.quantization.scheme import SCHEMES
    from compressor.quantization.view import View

    _check(bits, group, rounding, ranges, wide, accuracy_level)
    source, left = Model.of(model), frozenset(exclude or [])
    facts: dict[str, Any] = {
        "bits": bits,
        "group": group,
        "rounding": rounding,
        "accuracy_level": accuracy_level,
    }
    prepared = graph.prepare(source.path)
    if graph.already_quantized(prepared):
        reason = "already quantized: the model holds quantization operators"
        return _outcome.unchanged(source, folder, facts, reason)
    view = View(prepared)
    _outcome.check_names(view, sorted(left))
    planned = nbits.plan(view, group, left)
    if bits == 8:  # rows of int8 are as small, and need no kernel of their own
        planned = nbits.Plan(planned.matrices, [], planned.float)
    rounder = _Rounder(view, group, rounding, ranges)
    packed, wide_layers = _packed(planned, rounder, bits, wide)
    nbits.write(view, planned, packed, accuracy_level)
    facts |= _facts(planned, packed, wide_layers)
    facts["float"] += _outcome.inner_layers(prepared)
    facts["stored"] = storage.store(prepared, SCHEMES["ort-x86-vnni"], left)
    if not packed and not facts["stored"]:
        why = _outcome.why_float(facts["float"], "the model has no large constant weight")
        reason = f"nothing to quantize: {why}"
        return _outcome.unchanged(source, folder, facts, reason)
    if not packed:
        events.warn("no layer has a weight-only kernel, weights are only stored as int8")
    return _outcome.written(source, folder, prepared, facts)


def _check(
    bits: int, group: int, rounding: str, ranges: str | None, wide: float, accuracy_level: int
) -> None:
    if bits not in (4, 8):
        raise UsageError(f"weight-only with {bits} bits: the runtime has kernels for 4 and 8")
    if group not in _GROUPS:
        raise UsageError(f"group {group}: must be one of {', '.join(map(str, _GROUPS))}")
    if rounding not in _ROUNDINGS:
        raise UsageError(f"there is no rounding '{rounding}'; there are: {', '.join(_ROUNDINGS)}")
    if not 0 <= wide < 1:
        raise UsageError(f"weight-only: wide {wide:g} is not a share of the weights; give 0 to below 1")
    if accuracy_level not in _LEVELS:
        known = ", ".join(map(str, _LEVELS))
        raise UsageError(f"weight-only: accuracy_level {accuracy_level} is unknown; known are {known}")
    if rounding == "gptq" and not ranges:
        raise UsageError(
            "rounding gptq needs data to calibrate from: pass --data or --calib-data, or take hqq"
        )


def _facts(planned: Plan, packed: dict[str, Blocks], wide_layers: list[str]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for blocks in packed.values():
        counts[f"int{blocks.bits}"] += len(blocks.codes) * blocks.width
    return {
        "quantized": len(planned.matrices),
        "tables": len(planned.tables),
        "by_bits": dict(counts),
        "wide_layers": wide_layers,
        "float": [asdict(operator) for operator in planned.float],
    }


def _packed(planned: Plan, rounder: _Rounder, bits: int, wide: float) -> tuple[dict[str, Blocks], list[str]]:
    """Each layer's blocks, and the names of those that got 8 bits for their error."""
    layers = [*planned.matrices, *planned.tables]
    packed: dict[str, Blocks] = {}
    for done, layer in enumerate(layers):
        packed[layer.name] = rounder.round(layer, bits)
        events.progress("rounding weights", done, len(layers))
    if not wide or bits == 8:
        return packed, []
    sizes = {layer.name: packed[layer.name].codes.size for layer in layers}
    left, chosen = wide * sum(sizes.values()), []
    for layer in sorted(planned.matrices, key=lambda item: -rounder.loss(item, packed[item.name])):
        if sizes[layer.name] <= left:
            left -= sizes[layer.name]
            packed[layer.name] = rounder.round(layer, 8)
            chosen.append(layer.name)
    return packed, chosen


class _Rounder:
    """Rounds layers with one method; those without usable moments fall to HQQ."""

    def __init__(self, view: View, group: int, rounding: str, ranges: str | None) -> None:
        from compressor.quantization import moments

        self.view, self.group, self.rounding = view, group, rounding
        self.moments: dict[str, Moments] = {}
        if rounding == "gptq" and ranges and (Path(ranges) / moments.MOMENTS).exists():
            self.moments = moments.load(Path(ranges))

    def round(self, layer: Layer, bits: int) -> Blocks:
        from compressor.quantization import blocks, gptq, hqq, nbits

        rows = nbits.matrix(self.view, layer)
        second = self._second(layer)
        if self.rounding == "nearest":
            return blocks.nearest(rows, bits, self.group)
        if second is None:
            return hqq.round_rows(rows, bits, self.group)
        return gptq.round_rows(rows, second, self.moments[layer.use.node].count, bits, self.group)

    def loss(self, layer: Layer, made: Blocks) -> float:
        """Share of the output's power (without moments: of the weights') that rounding changes."""
        from compressor.quantization import nbits

        rows = nbits.matrix(self.view, layer)
        change, second = rows - made.values(), self._second(layer)
        if second is None:
            return float((change * change).sum() / max((rows * rows).sum(), 1e-30))
        power = ((rows @ second) * rows).sum()
        return float(((change @ second) * change).sum() / max(power, 1e-30))

    def _second(self, layer: Layer) -> NDArray[np.float64] | None:
        """E[x xT] [inputs, inputs], or None where it is not known or too wide to solve with."""
        import numpy as np

        found = self.moments.get(layer.use.node)
        if found is None or not found.count:
            return None
        parts = [part[0] for part in found.second()]
        width = sum(len(part) for part in parts)
        if width > _WIDEST:
            return None
        full, start = np.zeros((width, width)), 0
        for part in parts:
            stop = start + len(part)
            full[start:stop, start:stop] = part
            start = stop
        return full
