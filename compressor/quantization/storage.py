"""Weights of float layers in fewer bytes; the runtime makes floats of them once, when it loads the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.quantization import qdq
from compressor.quantization.half import HALVES, store_half
from compressor.quantization.integers import reads_input
from compressor.quantization.layers import storage_uses
from compressor.quantization.placement import Placement
from compressor.quantization.scheme import Scheme
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["store"]


def store(model: ModelProto, scheme: Scheme, exclude: frozenset[str]) -> int:
    """Store the large float weights that are left as int8, one scale per channel or row; gives their number.

    Layers that read an input of the model get float16 instead: features of very different size meet there,
    and 8 bits cost a speaker encoder's LSTM on mel power 16 dB of its output. Nodes named in `exclude` keep
    their weights.
    """
    view = View(model)
    excluded = {View.key(node) for node in view.graph.node if node.name in exclude}
    uses = [use for use in storage_uses(view, scheme) if use.node not in excluded]
    first = {
        use.node
        for use in uses
        if view.producers[use.node].op_type != "Gather" and reads_input(view, view.producers[use.node])
    }
    halves = {use.weight for use in uses if use.node in first}
    uses = [use for use in uses if use.weight not in halves]
    qdq.write(view, Placement(stored=uses, excluded=excluded | first), {}, scheme)
    store_half(model, HALVES["float16"], halves)
    return len(uses) + len(halves)
