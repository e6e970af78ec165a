"""Keeps integer MatMuls what they are: ONNX Runtime would make float Gemms of them and their biases.

Its MatMulAddFusion pass (seen in onnxruntime 1.31) takes a MatMul of known shape whose sum with a constant
row follows, and turns both into a Gemm between two Reshapes, before it looks for quantized layers: the Gemm
reads dequantized weights and runs in float. It takes rows of one or two dimensions only, so they get more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["keep_matmuls"]


def keep_matmuls(view: View, integer: set[str]) -> None:
    """Let constant rows that are added to a MatMul of `integer` (keys) of fixed shape have three dimensions.

    The sum is the same where the MatMul's output has at least as many. Names of nodes and tensors stay.
    """
    for key in integer:
        node, reader = view.producers[key], view.only_reader(key)
        shape = view.types.get(key, (0, None))[1]
        if node.op_type != "MatMul" or reader is None or reader.op_type != "Add" or shape is None:
            continue
        if len(shape) >= 3 and all(isinstance(size, int) for size in shape):
            _raise_row(view, reader)


def _raise_row(view: View, node: NodeProto) -> None:
    for index, name in enumerate(node.input):
        row = view.array(name)
        if row is not None and row.ndim in (1, 2):
            view.set_input(
                node, index, view.add(f"{name}_row", row.reshape((1,) * (3 - row.ndim) + row.shape))
            )
