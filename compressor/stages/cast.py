"""float16 or bfloat16 for an ONNX model, its inputs and outputs left as they are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events, onnx_files
from compressor.errors import UnsupportedError, UsageError
from compressor.model import Model
from compressor.stages import _outcome

if TYPE_CHECKING:
    from onnx import ModelProto

    from compressor.quantization.half import Half

__all__ = ["FORM", "VERSION", "calibrate", "calibration", "run"]

VERSION = 2
FORM = "onnx"


def calibration(parameters: dict[str, Any]) -> str:
    """Data show which activations overflow; nothing overflows where compute stays float32."""
    return "none" if parameters.get("compute") == "float32" else "optional"


def calibrate(model: dict[str, Any], data: dict[str, Any], folder: str) -> dict[str, Any]:
    """The task: observe the range of every float activation (see `quantization.calibrate`)."""
    from compressor.data import stream
    from compressor.quantization import calibrate, graph, islands
    from compressor.quantization.activations import Batches
    from compressor.quantization.segments import write_segments
    from compressor.quantization.view import View

    prepared = graph.prepare(Path(model["path"]))
    tensors = islands.activations(View(prepared))
    segments = write_segments(prepared, tensors, Path(folder), "observed")

    def batches(start: int) -> Batches:
        return ((batch.indices, batch.inputs) for batch in stream(data, start))

    key = f"{model['sha256']} {data['sha256']}"
    found = calibrate.observe(segments, tensors, batches, Path(folder), key=key, total=data.get("n"))
    for path in segments:
        path.unlink()
    return found


def run(
    model: dict[str, Any],
    folder: str,
    to: str = "float16",
    compute: str | None = None,
    device: str = "cpu",
    ranges: str | None = None,
    exclude: list[str] | None = None,
) -> dict[str, Any]:
    """The task: store weights as `to` (float16 or bfloat16) and compute in `compute` (`to` or float32).

    Computing in half, operators whose activations exceed the type's range stay float32 islands between
    casts: by what `calibrate` observed into the folder `ranges`, else by what the operator may do to a
    range. `exclude` names more such nodes. If the runtime has no kernels for that on `device`, a warning
    says so and compute is float32.

    Facts of the model that is given back: `to`, `compute`,
    `halved` (elements stored in half), `islands` (name, op and reason of each node kept float32) and
    `float_constants` (name: reason). Raises `UsageError` for other types.
    """
    from compressor.quantization import graph, half
    from compressor.quantization.view import View

    if to not in half.HALVES or compute not in (None, to, "float32"):
        types = " and ".join(half.HALVES)
        raise UsageError(f"cast to {to}, compute {compute}: types are {types}, compute is that or float32")
    source, kind = Model.of(model), half.HALVES[to]
    as_it_is = _constants_lifted(source.path)
    facts: dict[str, Any] = {"to": to, "compute": compute or to, "islands": []}
    if compute != "float32" and not graph.already_quantized(as_it_is) and not source.facts.get("stored"):
        prepared = graph.prepare(source.path)
        _outcome.check_names(View(prepared), exclude or [])
        try:
            facts |= _halve(prepared, kind, ranges, exclude or [])
            return _delivered(source, folder, prepared, facts, device)
        except UnsupportedError as error:
            events.warn(f"{to} cannot be computed with on {device}, only the weights are {to}: {error}")
    facts |= {"compute": "float32", "islands": []}
    facts["halved"], facts["float_constants"] = half.store_half(as_it_is, kind)
    return _delivered(source, folder, as_it_is, facts, device)


def _constants_lifted(path: Path) -> ModelProto:
    """The graph with all constants as initializers, else unchanged: weights stored in integers stay so."""
    from compressor.quantization import constants, versions

    model = onnx_files.read(path)
    onnx_files.tidy(model)
    versions.upgrade(model, path)
    constants.lift_constants(model)
    return model


def _delivered(
    source: Model, folder: str, model: ModelProto, facts: dict[str, Any], device: str
) -> dict[str, Any]:
    if not facts["halved"]:
        inside = _outcome.inner_layers(model)
        reason = f"nothing to cast: {_outcome.why_float(inside, 'the model has no large float weight')}"
        return _outcome.unchanged(source, folder, facts, reason)
    made = _outcome.written(source, folder, model, facts, device)
    for name, reason in facts["float_constants"].items():
        events.warn(f"weight '{name}' stays float32: {reason}")
    return made


def _halve(model: ModelProto, kind: Half, ranges: str | None, exclude: list[str]) -> dict[str, Any]:
    """Compute in half but for islands; gives facts."""
    from compressor.quantization import calibrate, islands

    observed = calibrate.ranges(Path(ranges), "minmax") if ranges else {}
    masked = calibrate.left_out(Path(ranges)) if ranges else {}
    found = islands.find(model, kind, observed, masked, exclude)
    halved, kept = islands.write(model, kind, {island.name for island in found})
    return {"islands": [asdict(island) for island in found], "halved": halved, "float_constants": kept}
