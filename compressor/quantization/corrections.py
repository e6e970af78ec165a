"""How weights are rounded and biases corrected, as the writer of the graph asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization import bias_correction, pairs, rounding, weight_mse
from compressor.quantization.layers import Use
from compressor.quantization.moments import Moments, known_by

__all__ = ["BIASES", "ROUNDINGS", "WEIGHTS", "Corrections", "RowQuantizer"]

WEIGHTS, ROUNDINGS, BIASES = ("minmax", "mse"), ("nearest", "gptq"), ("fast", "full")

Floats = NDArray[np.float64]
RowQuantizer = Callable[[NDArray[Any], Floats, int | None], tuple[NDArray[np.int8], NDArray[np.float32]]]


@dataclass(frozen=True)
class Corrections:
    """How weights are scaled (`WEIGHTS`) and rounded (`ROUNDINGS`), and whether biases make good for it.

    `moments` are those that `gather` found; layers without any are rounded to nearest.
    """

    weights: str = "minmax"
    rounding: str = "nearest"
    bias: bool = False
    moments: Mapping[str, Moments] = field(default_factory=dict)

    def quantizer(self, uses: Sequence[Use]) -> RowQuantizer:
        """What turns a weight's rows, their least scales and the pair limit into codes and scales."""
        second = self.second(uses) if self.rounding == "gptq" else None
        if second is not None:
            width = sum(part.shape[1] for part in second)
            filled = rounding.spaced(second, uses[0].span) if uses[0].span % 2 else second
            return lambda rows, floor, limit: rounding.quantize_rows(
                rows, second if rows.shape[1] == width else filled, floor, limit
            )
        return weight_mse.quantize_rows if self.weights == "mse" else pairs.quantize_rows

    def second(self, uses: Sequence[Use]) -> list[Floats] | None:
        """Second moments of what a weight's readers meet, as `rounding` wants them; None if not known."""
        known = [self.moments.get(known_by(use)) for use in uses]
        found = _together([entry for entry in known if entry is not None and entry.count])
        return None if found is None else found.shrunk(centred=self.bias and all(use.bias for use in uses))

    def shift(self, use: Use, weight: NDArray[Any], rounded: NDArray[Any]) -> Floats | None:
        """What to add to the bias [channels] of a layer whose weight (as stored) became `rounded`."""
        if not self.bias or use.node not in self.moments:
            return None
        before, after = (
            array.transpose(use.order).reshape(weight.shape[use.channels[0]], -1)
            for array in (weight, rounded)
        )
        return bias_correction.shift(before, after, self.moments[use.node].mean)


def _together(found: Sequence[Moments]) -> Moments | None:
    """The sum of the moments of layers that share a weight; None if they cannot be added."""
    if not found or len({tuple(part.shape for part in entry.products) for entry in found}) > 1:
        return None
    total = sum((entry.total for entry in found), np.zeros_like(found[0].total))
    products = [np.sum(parts, axis=0) for parts in zip(*(entry.products for entry in found), strict=True)]
    return Moments(total, products, sum(entry.count for entry in found))
