"""Post-training static quantization of an ONNX model: place pairs, correct, write the Q/DQ graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import UsageError
from compressor.model import Model
from compressor.stages._outcome import check_names, inner_layers, unchanged, why_float, written

if TYPE_CHECKING:
    from onnx import ModelProto

    from compressor.quantization.corrections import Corrections
    from compressor.quantization.placement import Placement
    from compressor.quantization.scheme import Scheme
    from compressor.quantization.view import View

__all__ = ["FORM", "VERSION", "calibrate", "calibration", "diagnose", "moments", "needs", "run"]

VERSION = 10
FORM = "onnx"
_LARGEST = 1e30  # a range beyond this is a mask or an overflow, not a signal


def calibration(parameters: dict[str, Any]) -> str:
    """Ranges of activations come from data alone."""
    return "required"


def needs(parameters: dict[str, Any]) -> set[str]:
    """What `run` takes beyond ranges: "moments" (the folder of that task), "data" (a reference)."""
    bias = parameters.get("bias_correction")
    wanted = {"moments"} if bias or parameters.get("rounding", "nearest") != "nearest" else set()
    return wanted | ({"data"} if bias == "full" else set())


def calibrate(model: dict[str, Any], data: dict[str, Any], scheme: str, folder: str) -> dict[str, Any]:
    """The task: observe the activations that `run` will quantize (see `quantization.calibrate`)."""
    from compressor.quantization import calibrate

    return calibrate.calibrate(model, data, scheme, folder)


def moments(model: dict[str, Any], data: dict[str, Any], scheme: str, folder: str) -> dict[str, Any]:
    """The task: what corrections need to know of the inputs of all layers; writes `moments.npz`.

    And `sequences.npz`, what recurrent layers whose weights are stored read in a few samples. It takes
    seconds to a minute and starts anew if it was killed. Returns how many `layers` that are.
    """
    from compressor.data import stream
    from compressor.quantization import graph, recurrent
    from compressor.quantization import moments as gathering
    from compressor.quantization.layers import storage_uses, weight_uses
    from compressor.quantization.scheme import named
    from compressor.quantization.view import View

    prepared = graph.prepare(Path(model["path"]))
    quantized = graph.already_quantized(prepared)
    view, chosen = View(prepared), named(scheme)
    uses = [] if quantized else list(weight_uses(view, chosen))
    stores = chosen.stores and not quantized
    stored = recurrent.stored(view, storage_uses(view, chosen)) if stores else []

    def batches() -> Iterator[tuple[Any, Any]]:
        return ((batch.indices, batch.inputs) for batch in stream({**data, "batch": 1}))

    found = gathering.gather(prepared, [*uses, *stored], batches(), Path(folder)) if uses or stored else {}
    if stored:
        recurrent.record(prepared, stored, batches(), Path(folder))
    gathering.save(found, Path(folder))
    return {"layers": len(found)}


def diagnose(
    model: dict[str, Any], quantized: dict[str, Any], data: dict[str, Any], folder: str, samples: int = 32
) -> dict[str, Any]:
    """The task: SQNR per layer of a quantized model (see `quantization.diagnose`)."""
    from compressor.quantization import diagnose

    return diagnose.diagnose(model, quantized, data, folder, samples)


def run(
    model: dict[str, Any],
    folder: str,
    ranges: str,
    scheme: str,
    observer: str = "minmax",
    exclude: list[str] | None = None,
    weights: str = "minmax",
    rounding: str = "nearest",
    bias_correction: str | None = None,
    moments: str | None = None,
    data: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The task: quantize an ONNX model to int8 with the ranges that `calibrate` left in the folder `ranges`.

    `exclude` names nodes to be left in float. Tensors that the stage equalize has smoothed keep their whole
    range, whatever the observer. `weights` chooses the scales of weights, minmax or mse;
    `rounding` is nearest or gptq, which chooses the scales itself; `bias_correction` is None, fast or full.
    gptq and corrections need the folder that the task `moments` wrote, full correction also `data`. The
    facts of the model that is given back hold these choices, `scheme`, `quantized` (operators with an integer
    kernel), `stored` (weights of float operators that are stored as int8, those of recurrent ones as float16
    where int8 changes their output too much, see `recurrent`), `tensors` (activations with a pair) and
    `float` (name, op and reason of every compute operator left in float). A model that is quantized
    already, or has nothing to quantize, is given back unchanged with `quantized` 0 and a `reason`, which is
    also a warning.
    """
    from compressor.quantization import calibrate, graph, placement, qdq
    from compressor.quantization.bias_correction import add_biases
    from compressor.quantization.half import HALVES, store_half
    from compressor.quantization.scheme import named
    from compressor.quantization.view import View

    source, chosen = Model.of(model), named(scheme)
    corrections = _corrections(weights, rounding, bias_correction, moments)
    facts: dict[str, Any] = {"scheme": scheme, "observer": observer, "weights": weights}
    facts |= {"rounding": rounding, "bias_correction": bias_correction}
    prepared = graph.prepare(source.path)
    if graph.already_quantized(prepared):
        reason = "already quantized: the model holds quantization operators"
        return unchanged(source, folder, {"tensors": 0, **facts}, reason)
    if bias_correction:
        add_biases(prepared)
    view = View(prepared)
    check_names(view, exclude or [])
    whole = placement.place(view, chosen)
    observed = calibrate.ranges(Path(ranges), observer)
    if smoothed := source.facts.get("smoothed"):  # what clips one channel there clips them all
        full = calibrate.ranges(Path(ranges), "minmax")
        observed |= {name: full[name] for name in smoothed if name in full}
    members = {name: whole.joined.get(root, (root,)) for name, root in whole.pairs.items()}
    watched = {member for found in members.values() for member in found}
    reasons = _unusable(watched, observed, calibrate.left_out(Path(ranges)))
    unusable = {name: reasons[one] for name, found in members.items() for one in found if one in reasons}
    placed = placement.place(view, chosen, frozenset(exclude or []), unusable)
    halves = _kept_from_int8(view, placed, chosen, corrections, moments)
    facts |= _facts(placed, halves)
    facts["float"] += inner_layers(prepared)
    why = why_float(facts["float"], "the model has no operator with weights")
    if not placed.integer and not facts["stored"]:
        return unchanged(source, folder, facts, f"nothing to quantize: {why}")
    if not placed.integer:
        events.warn(f"no operator runs in int8, weights are only stored in fewer bits: {why}")
    known = {name: _cover(name, found, observed) for name, found in members.items()}
    made = qdq.write(view, placed, known, chosen, corrections)
    store_half(made, HALVES["float16"], halves)
    if bias_correction == "full":
        _correct_fully(source, made, data, folder)
    return written(source, folder, made, facts)


def _corrections(weights: str, rounding: str, bias: str | None, moments: str | None) -> Corrections:
    """Raises `UsageError` for a choice that does not exist, or that lacks its moments."""
    from compressor.quantization import corrections
    from compressor.quantization import moments as gathering

    known = {"weights": corrections.WEIGHTS, "rounding": corrections.ROUNDINGS}
    known["bias_correction"] = corrections.BIASES
    for name, value in (("weights", weights), ("rounding", rounding), ("bias_correction", bias)):
        if value not in (*known[name], *([None] if name == "bias_correction" else [])):
            raise UsageError(f"quantize: {name} '{value}' is unknown; known are {', '.join(known[name])}")
    if needs({"rounding": rounding, "bias_correction": bias}) and moments is None:
        raise UsageError("quantize: gptq rounding and bias correction need moments; gather them first")
    found = gathering.load(Path(moments)) if moments else {}
    return corrections.Corrections(weights, rounding, bias is not None, found)


def _kept_from_int8(
    view: View, placed: Placement, scheme: Scheme, corrections: Corrections, moments: str | None
) -> set[str]:
    """Take weights out of `placed` that are to be stored as float16; gives their names."""
    from compressor.quantization import recurrent

    uses = recurrent.stored(view, placed.stored)
    if not uses:
        return set()
    if moments is None:
        return recurrent.take_out(view, placed, recurrent.keep_unseen(view, uses))
    kept = recurrent.keep(view, uses, scheme, corrections, recurrent.load(Path(moments)))
    return recurrent.take_out(view, placed, kept)


def _correct_fully(source: Model, made: ModelProto, data: dict[str, Any] | None, folder: str) -> None:
    from compressor.data import stream
    from compressor.quantization import full_bias_correction, graph
    from compressor.quantization.bias_correction import add_biases

    if data is None:
        raise UsageError("quantize: full bias correction needs data; pass --data or --calib-data")
    reference = graph.prepare(source.path)
    add_biases(reference)

    def batches() -> Iterator[tuple[Any, Any]]:
        return ((batch.indices, batch.inputs) for batch in stream(data))

    full_bias_correction.correct(reference, made, batches, Path(folder))


def _cover(
    name: str, members: Sequence[str], observed: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """The range of a tensor: its own if it was observed, else that of those whose scale it shares."""
    found = [observed[item] for item in ([name] if name in observed else members) if item in observed]
    return min((low for low, _ in found), default=0.0), max((high for _, high in found), default=0.0)


def _unusable(
    tensors: set[str], observed: Mapping[str, tuple[float, float]], left_out: Mapping[str, str]
) -> dict[str, str]:
    """Why tensors cannot be quantized with the ranges at hand."""
    reasons = {name: f"tensor '{name}' was never observed" for name in tensors if name not in observed}
    for name, bounds in observed.items():
        if not all(map(math.isfinite, bounds)) or max(map(abs, bounds)) > _LARGEST:
            reasons[name] = f"tensor '{name}' has the range {bounds[0]:g} to {bounds[1]:g}"
    return {**reasons, **{name: f"tensor '{name}': {reason}" for name, reason in left_out.items()}}


def _facts(placed: Placement, halves: set[str]) -> dict[str, Any]:
    return {
        "quantized": len(placed.integer),
        "stored": len(placed.stored) + len(halves),
        "tensors": len(placed.pairs),
        "float": [asdict(operator) for operator in placed.float],
    }
