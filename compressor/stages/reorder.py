"""Put channels in an order in which fewer pairs of int8 weights would overflow: ONNX in, ONNX out."""

from __future__ import annotations

from typing import Any

from compressor.model import Model
from compressor.stages._outcome import unchanged, written

__all__ = ["FORM", "VERSION", "run"]

VERSION = 1
FORM = "onnx"


def run(model: dict[str, Any], folder: str, scheme: str) -> dict[str, Any]:
    """The task: an ONNX model that computes the same with inner channels in another order.

    The fact `reordered` counts the layers that read theirs in a new order; none do for a scheme without a
    pair limit.
    """
    from compressor.quantization import graph
    from compressor.quantization.reorder import reorder
    from compressor.quantization.scheme import named

    source, chosen = Model.of(model), named(scheme)
    prepared = graph.prepare(source.path)
    facts: dict[str, Any] = {name: value for name, value in source.facts.items() if name == "smoothed"}
    if graph.already_quantized(prepared):
        return unchanged(source, folder, facts, "already quantized: the model holds quantization operators")
    return written(source, folder, prepared, {**facts, "reordered": reorder(prepared, chosen)})
