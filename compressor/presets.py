"""Recipes for a target, cheapest first: the rungs that are tried until the accuracy budget is kept."""

from __future__ import annotations

from compressor.errors import UnsupportedError
from compressor.recipe import Recipe, Step
from compressor.target import Target

__all__ = ["rungs"]


def rungs(target: Target, scheme: str) -> tuple[Recipe, ...]:
    """The ladder for `target` (runtime and device filled in).

    The first rung is plain per-channel post-training quantization; the others change how activation
    ranges are found. All of them are read from the same calibration pass.
    """
    if target.precision == "fp32":
        return (Recipe("float"),)
    if target.precision == "int8":
        return tuple(
            Recipe(name, (Step("quantize", {"scheme": scheme, "observer": observer}),), what)
            for name, observer, what in (
                ("minmax", "minmax", "per-channel int8 weights, min-max activation ranges"),
                ("mse", "mse", "activation ranges of least squared error"),
                ("percentile", "percentile", "activation ranges clipped at the 99.99th percentile"),
                ("entropy", "entropy", "activation ranges of least relative entropy"),
            )
        )
    raise UnsupportedError(
        f"target {target}: there is no way to make {target.precision} for {target.runtime}"
    )
