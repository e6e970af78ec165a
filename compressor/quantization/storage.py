"""Weights of float layers in fewer bytes; the runtime makes floats of them once, when it loads the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.quantization import qdq
from compressor.quantization.layers import storage_uses
from compressor.quantization.placement import Placement
from compressor.quantization.scheme import Scheme
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["store_int8"]


def store_int8(model: ModelProto, scheme: Scheme, exclude: frozenset[str]) -> int:
    """Store the large float weights that are left as int8, one scale per channel or row; gives their number.

    Nodes named in `exclude` keep theirs.
    """
    view = View(model)
    excluded = {View.key(node) for node in view.graph.node if node.name in exclude}
    uses = [use for use in storage_uses(view, scheme) if use.node not in excluded]
    qdq.write(view, Placement(stored=uses, excluded=excluded), {}, scheme)
    return len(uses)
