"""Dynamic int8 of an ONNX model: int8 weights, activations quantized while it runs; needs no data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import UnsupportedError
from compressor.model import Model
from compressor.stages import _outcome

if TYPE_CHECKING:
    from compressor.quantization.scheme import Scheme
    from compressor.quantization.view import View

__all__ = ["FORM", "VERSION", "calibrate", "calibration", "run"]

VERSION = 2
FORM = "onnx"
_CONVOLUTIONS = 0.1  # of the compute
_ERROR = 0.01  # of the power of an input's vectors that uint8 may change


def calibration(parameters: dict[str, Any]) -> str:
    """Data show which inputs 8 bits can hold; without any, layers that read the model's inputs stay float."""
    return "optional"


def calibrate(model: dict[str, Any], data: dict[str, Any], folder: str) -> dict[str, Any]:
    """The task: measure how well the layers' inputs bear uint8 (see `quantization.spread`)."""
    from compressor.data import stream
    from compressor.quantization import graph, integers, spread
    from compressor.quantization.scheme import SCHEMES
    from compressor.quantization.view import View

    prepared = graph.prepare(Path(model["path"]))
    if graph.already_quantized(prepared):
        return {"tensors": 0}
    view = View(prepared)
    planned = integers.plan(view, SCHEMES["ort-x86-vnni"], {})
    batches = ((batch.indices, batch.inputs) for batch in stream(data))
    found = spread.measure(prepared, planned.inputs(view), batches, Path(folder))
    return {"tensors": len(found), "worst": max(found.values(), default=0.0)}


def run(
    model: dict[str, Any],
    folder: str,
    scheme: str,
    ranges: str | None = None,
    exclude: list[str] | None = None,
) -> dict[str, Any]:
    """The task: MatMul, Gemm and LSTM in dynamic int8; other layers stay float, their weights only stored so.

    A layer stays float where its input loses more than 1 % of its vectors' power in uint8, as `calibrate`
    measured into the folder `ranges`; without that, where it reads an input of the model, whose spread is
    unknown. `exclude` names more nodes to be left in float.

    The facts of the model that is given back hold `scheme`, `quantized` (layers in integers), `stored`
    (weights only stored as int8) and `float` (name, op and reason of every layer left in float). Raises
    `UnsupportedError` for a model whose compute is to a tenth or more in convolutions. A model that is
    quantized already or has no such layer is given back unchanged with a `reason`.
    """
    from compressor.quantization import graph, integers, storage
    from compressor.quantization.scheme import named
    from compressor.quantization.view import View

    source, chosen = Model.of(model), named(scheme)
    left = dict.fromkeys(exclude or [], "left in float on request")
    facts: dict[str, Any] = {"scheme": scheme}
    prepared = graph.prepare(source.path)
    if graph.already_quantized(prepared):
        reason = "already quantized: the model holds quantization operators"
        return _outcome.unchanged(source, folder, facts, reason)
    view = View(prepared)
    _outcome.check_names(view, sorted(left))
    _refuse_convolutions(view)
    planned = integers.plan(view, chosen, {**_unsafe(view, chosen, ranges), **left})
    facts["quantized"] = len(planned.matrices) + len(planned.recurrent)
    facts["float"] = [asdict(operator) for operator in planned.float] + _outcome.inner_layers(prepared)
    if not facts["quantized"]:
        why = _outcome.why_float(facts["float"], "the model has no MatMul, Gemm or LSTM")
        reason = f"nothing to quantize: {why}"
        return _outcome.unchanged(source, folder, facts, reason)
    integers.write(view, planned, chosen)
    facts["stored"] = storage.store(prepared, chosen, frozenset(left))
    return _outcome.written(source, folder, prepared, facts)


def _unsafe(view: View, scheme: Scheme, ranges: str | None) -> dict[str, str]:
    """Nodes whose inputs are not for 8 bits, with the reason."""
    from compressor.quantization import integers, spread

    layers = [node for node in view.graph.node if node.op_type in integers.OPERATORS]
    if ranges:
        errors = spread.load(Path(ranges))
        return {
            node.name: f"uint8 loses {errors[node.input[0]]:.0%} of the power of its input's vectors"
            for node in layers
            if errors.get(node.input[0], 0.0) > _ERROR
        }
    found = {
        node.name: "it reads an input of the model whose spread is unknown; pass data to have it measured"
        for node in layers
        if integers.reads_input(view, node)
    }
    planned = integers.plan(view, scheme, found)
    if planned.matrices or planned.recurrent or not found:
        return found
    events.warn(
        "every layer that dynamic int8 can take reads an input of the model, and without data its spread is "
        "unknown: check the engine's accuracy, or pass --data"
    )
    return {}


def _refuse_convolutions(view: View) -> None:
    from compressor.quantization import work

    shares = work.shares(view)
    share = shares.get("Conv", 0.0) + shares.get("ConvTranspose", 0.0)
    if share >= _CONVOLUTIONS:
        raise UnsupportedError(
            f"int8-dynamic is not made for this model: {share:.0%} of its compute is convolution, and "
            "dynamic int8 of convolutions ran 8x slower than float (ConvInteger has no fast kernel); "
            "use int8, which calibrates on --data"
        )
