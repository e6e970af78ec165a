"""The codes that a quantized activation can take, as far as a choice of range needs to know them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Grid"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Grid:
    """A uniform grid of `bits` bits: symmetric about zero (zero point 0), or with a zero point of its own."""

    bits: int = 8
    symmetric: bool = False

    @property
    def lowest(self) -> int:
        """The lowest code; a symmetric grid leaves its outermost negative code unused."""
        return 1 - (1 << (self.bits - 1)) if self.symmetric else 0

    @property
    def highest(self) -> int:
        """The highest code."""
        return (1 << (self.bits - 1)) - 1 if self.symmetric else (1 << self.bits) - 1

    def place(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """Scales and zero points for ranges `low <= 0 <= high` (arrays of one shape).

        Source: ONNX QuantizeLinear; the zero point is rounded, so that 0 is a code.
        """
        if self.symmetric:
            return np.maximum(-low, high) / self.highest, np.zeros_like(low)
        scale = (high - low) / self.highest
        return scale, np.rint(-low / scale)
