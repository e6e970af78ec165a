"""float16 and bfloat16 for constants: what fits, and weights that are only stored so.

float16 ends at 65504 and has full precision from 2**-14 on; bfloat16 has the range of float32 and 8 bits of
precision. A constant fits if no value overflows and no slice of it (channel, row) that counts beside the
others is changed by more than rounding explains.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.view import View, replace_nodes, unique

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["HALVES", "Half", "store_half"]

_LEAST = 256  # elements of a constant that is worth storing in half
_DEAD = 2.0**-12  # of a tensor's largest slice: beside it, a slice adds nothing
_TOLERATED = 0.01  # of a slice's norm; rounding itself changes 0.02 % (float16), 0.2 % (bfloat16)
_FLOAT = 1
_CODES_OF = ("QuantizeLinear", "DequantizeLinear", "Integer", "NBits", "BlockQuantized")


@dataclass(frozen=True)
class Half:
    """A 16 bit type: ONNX's number for it, its largest value and its least normal one."""

    name: str
    kind: int
    largest: float
    least: float

    def array(self, value: NDArray[Any]) -> NDArray[Any]:
        """`value` rounded to nearest."""
        if self.name == "float16":
            with np.errstate(over="ignore", under="ignore"):
                return value.astype(np.float16)
        import ml_dtypes

        return value.astype(ml_dtypes.bfloat16)

    def misfit(self, value: NDArray[Any]) -> str | None:
        """Why a float32 constant must stay float32; None: it fits."""
        largest = float(np.abs(value).max(initial=0.0))
        if not largest <= self.largest:
            return f"it holds {largest:g}, beyond {self.name}'s {self.largest:g}"
        change = self.array(value).astype(np.float64) - value
        for axis in {0, value.ndim - 1} if value.ndim > 1 else {None}:
            rest = None if axis is None else tuple(i for i in range(value.ndim) if i != axis)
            size = np.sqrt(np.square(value.astype(np.float64)).sum(axis=rest))
            error = np.sqrt(np.square(change).sum(axis=rest))
            alive = size > size.max(initial=0.0) * _DEAD
            if (error > _TOLERATED * size)[alive].any():
                return f"values below {self.least:.0e} lose their digits in {self.name}"
        return None


HALVES = {
    half.name: half
    for half in (
        Half("float16", 10, 65504.0, 2.0**-14),
        Half("bfloat16", 16, 3.3895e38, 2.0**-126),
    )
}


def store_half(
    model: ModelProto, half: Half, only: Container[str] | None = None
) -> tuple[int, dict[str, str]]:
    """Store large float constants in half, a Cast behind each, which the runtime does once when it loads.

    `only` names those that may be. Gives how many elements are stored so, and the constants that stay
    float32 with the reason.
    """
    from onnx import helper

    view = View(model)
    names = {node.name for node in view.graph.node}
    casts, count, kept = [], 0, {}
    scales = {name for node in view.graph.node if _is_coder(node.op_type) for name in node.input}
    for name, item in list(view.initializers.items()):
        if only is not None and name not in only:
            continue
        if item.data_type != _FLOAT or np.prod(item.dims) < _LEAST or name in scales or name in view.outputs:
            continue
        value = view.array(name)
        assert value is not None
        if reason := half.misfit(value):
            kept[name] = reason
            continue
        stored = view.new_name(f"{name}_{half.name}")
        item.CopyFrom(_tensor(half, value, stored))
        casts.append(
            helper.make_node("Cast", [stored], [name], name=unique(f"Cast_{name}", names), to=_FLOAT)
        )
        count += value.size
    replace_nodes(model, [*casts, *model.graph.node])
    return count, kept


def _is_coder(op: str) -> bool:
    return op.endswith(_CODES_OF)


def _tensor(half: Half, value: NDArray[Any], name: str) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.asarray(half.array(value), order="C"), name)
