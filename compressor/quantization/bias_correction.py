"""Fast bias correction: what rounding the weights does to a layer's mean output goes into its bias.

Sources: Nagel et al., Data-Free Quantization through Weight Equalization and Bias Correction, 2019
(arXiv:1906.04721), section 4.2; Finkelstein et al., Fighting Quantization Bias With Bias, 2019
(arXiv:1906.03193). The means are those of the float graph; `full_bias_correction` measures them behind
the quantized layers before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["add_biases", "shift"]

Floats = NDArray[np.float64]


def shift(rows: NDArray[Any], rounded: NDArray[Any], mean: Floats) -> Floats:
    """What to add to the bias [channels] so that the mean output stays.

    `rows` and `rounded` are the weights [channels, k] before and after, `mean` [groups, k] is E[x] of the
    vectors that each group of channels meets.
    """
    groups, k = mean.shape
    errors = (np.asarray(rows, np.float64) - rounded).reshape(groups, -1, k)
    return np.asarray((errors @ mean[:, :, None]).reshape(-1))


def add_biases(model: ModelProto) -> None:
    """Give every Conv and Gemm of a prepared model with a constant weight a bias, zeros if it has none."""
    view = View(model)
    for node in model.graph.node:
        weight = view.array(node.input[1]) if len(node.input) > 1 else None
        if node.op_type not in ("Conv", "Gemm") or weight is None or (len(node.input) > 2 and node.input[2]):
            continue
        channels = weight.shape[0 if node.op_type == "Conv" or _rows_first(node) else 1]
        view.set_input(node, 2, view.add(f"{node.input[1]}_bias", np.zeros(channels, np.float32)))


def _rows_first(node: Any) -> bool:
    return any(item.name == "transB" and item.i for item in node.attribute)
