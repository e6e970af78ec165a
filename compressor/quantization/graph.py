"""The one form of graph that calibration and quantization work on.

`prepare` gives the same graph for the same file, so ranges that were observed on it fit later.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compressor import onnx_files
from compressor.errors import ModelFileError
from compressor.quantization.constants import fold_constants, lift_constants
from compressor.quantization.folding import fold
from compressor.quantization.halves import widen
from compressor.quantization.versions import upgrade
from compressor.quantization.view import unique

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["already_quantized", "prepare"]

_QUANTIZED = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QGemm", "MatMulNBits"}
_LAYERS = {
    "Conv",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "LSTM",
    "GRU",
    "RNN",
    "Einsum",
    "BatchNormalization",
    "Gather",
}


def prepare(path: Path) -> ModelProto:
    """The model at `path` as the quantizer wants it, computing the same function.

    Opset at least 13, weights as initializers and float32, constants folded, batch normalization and
    channel-wise scaling folded into the layer before, every node named. Names, order, types and free
    dimensions of inputs and outputs stay. Raises `ModelFileError` for an unreadable file, a missing side
    file, or a weight with NaN or Inf; `UnsupportedError` for an opset that cannot be converted.
    """
    model = onnx_files.read(path)
    if already_quantized(model):
        return model
    onnx_files.tidy(model)
    upgrade(model, path)
    lift_constants(model)
    widen(model)
    _refuse_non_finite(model, path)
    fold_constants(model)
    fold(model)
    _name_nodes(model)
    return model


def already_quantized(model: ModelProto) -> bool:
    """Whether the graph holds quantization operators."""
    return any(
        node.op_type in _QUANTIZED or node.op_type.startswith("QLinear") or node.op_type.endswith("Integer")
        for node in model.graph.node
    )


def _refuse_non_finite(model: ModelProto, path: Path) -> None:
    """NaN in any constant, Inf in a layer's weight (a mask may well hold -Inf)."""
    from onnx import numpy_helper

    weights = {name for node in model.graph.node if node.op_type in _LAYERS for name in node.input}
    for item in model.graph.initializer:
        value = numpy_helper.to_array(item) if item.data_type == 1 else np.zeros(0)
        kind = "NaN" if np.isnan(value).any() else "Inf" if np.isinf(value).any() else ""
        if kind == "NaN" or (kind and item.name in weights):
            raise ModelFileError(
                f"{path}: weight '{item.name}' holds {kind}; train or export the model again"
            )


def _name_nodes(model: ModelProto) -> None:
    taken = {node.name for node in model.graph.node}
    for node in model.graph.node:
        if not node.name:
            output = next((name for name in node.output if name), "none")
            node.name = unique(f"{node.op_type}_{output}", taken)
