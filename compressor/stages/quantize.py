"""Post-training static quantization of an ONNX model: calibrate, place pairs, write the Q/DQ graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events, onnx_files
from compressor.errors import UsageError
from compressor.model import Model
from compressor.store import file_digest

if TYPE_CHECKING:
    from compressor.quantization.placement import Placement
    from compressor.quantization.view import View

__all__ = ["FORM", "VERSION", "calibrate", "calibration", "diagnose", "run"]

VERSION = 2
FORM = "onnx"
_LARGEST = 1e30  # a range beyond this is a mask or an overflow, not a signal


def calibration(parameters: dict[str, Any]) -> str:
    """Ranges of activations come from data alone."""
    return "required"


def calibrate(model: dict[str, Any], data: dict[str, Any], scheme: str, folder: str) -> dict[str, Any]:
    """The task: observe the activations that `run` will quantize (see `quantization.calibrate`)."""
    from compressor.quantization import calibrate

    return calibrate.calibrate(model, data, scheme, folder)


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
) -> dict[str, Any]:
    """The task: quantize an ONNX model to int8 with the ranges that `calibrate` left in the folder `ranges`.

    `exclude` names nodes to be left in float. The facts of the model that is given back hold `scheme`,
    `observer`, `quantized` (operators with an integer kernel), `stored` (float operators whose weights are
    stored as int8), `tensors` (activations with a pair) and `float` (name, op and reason of every compute
    operator left in float). A model that is quantized already, or has nothing to quantize, is given back
    unchanged with `quantized` 0 and a `reason`, which is also a warning.
    """
    from compressor.quantization import calibrate, graph, placement, qdq
    from compressor.quantization.scheme import named
    from compressor.quantization.view import View

    source, chosen = Model.of(model), named(scheme)
    facts: dict[str, Any] = {"scheme": scheme, "observer": observer}
    prepared = graph.prepare(source.path)
    if graph.already_quantized(prepared):
        return _unchanged(source, folder, facts, "already quantized: the model holds quantization operators")
    view = View(prepared)
    _check_names(view, exclude or [])
    roots = placement.place(view, chosen).pairs
    observed = calibrate.ranges(Path(ranges), observer)
    reasons = _unusable(set(roots.values()), observed, calibrate.left_out(Path(ranges)))
    unusable = {name: reasons[root] for name, root in roots.items() if root in reasons}
    placed = placement.place(view, chosen, frozenset(exclude or []), unusable)
    facts |= _facts(placed)
    if not placed.integer and not placed.stored:
        return _unchanged(source, folder, facts, f"nothing to quantize: {_why(placed)}")
    if not placed.integer:
        events.warn(f"no operator runs in int8, weights are only stored as int8: {_why(placed)}")
    known = {name: observed[root] for name, root in roots.items() if root in observed}
    written = onnx_files.write(qdq.write(view, placed, known, chosen), Path(folder, "model.onnx"))
    return _result(source, folder, {**onnx_files.facts(written), **facts})


def _unusable(
    tensors: set[str], observed: Mapping[str, tuple[float, float]], left_out: Mapping[str, str]
) -> dict[str, str]:
    """Why tensors cannot be quantized with the ranges at hand."""
    reasons = {name: f"tensor '{name}' was never observed" for name in tensors if name not in observed}
    for name, bounds in observed.items():
        if not all(map(math.isfinite, bounds)) or max(map(abs, bounds)) > _LARGEST:
            reasons[name] = f"tensor '{name}' has the range {bounds[0]:g} to {bounds[1]:g}"
    return {**reasons, **{name: f"tensor '{name}': {reason}" for name, reason in left_out.items()}}


def _check_names(view: View, exclude: list[str]) -> None:
    known = {node.name for node in view.graph.node}
    missing = [name for name in exclude if name not in known]
    if missing:
        raise UsageError(
            f"the model has no node '{missing[0]}' to leave in float; see the report for its nodes"
        )


def _facts(placed: Placement) -> dict[str, Any]:
    return {
        "quantized": len(placed.integer),
        "stored": len(placed.stored),
        "tensors": len(placed.pairs),
        "float": [asdict(operator) for operator in placed.float],
    }


def _why(placed: Placement) -> str:
    reasons = sorted({f"{operator.op} ({operator.reason})" for operator in placed.float})
    return "; ".join(reasons[:3]) or "the model has no operator with weights"


def _unchanged(source: Model, folder: str, facts: dict[str, Any], reason: str) -> dict[str, Any]:
    """The source model as it is, in its own file."""
    events.warn(reason)
    written = onnx_files.write(onnx_files.read(source.path), Path(folder, "model.onnx"))
    empty = {"quantized": 0, "stored": 0, "tensors": 0, "float": []}
    return _result(source, folder, {**onnx_files.facts(written), **empty, **facts, "reason": reason})


def _result(source: Model, folder: str, facts: dict[str, Any]) -> dict[str, Any]:
    path = Path(folder, "model.onnx")
    return replace(source, path=path, sha256=file_digest(path), facts=facts).json(Path(folder))
