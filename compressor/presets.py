"""Recipes for a target, cheapest first: the rungs that are tried until the accuracy budget is kept."""

from __future__ import annotations

from typing import Any

from compressor import machine
from compressor.errors import UnsupportedError
from compressor.recipe import Recipe, Step
from compressor.target import Target

__all__ = ["rungs", "schemed"]

_CORRECTED = {"rounding": "gptq", "bias_correction": "fast"}
_STATIC: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "gptq",
        "weights rounded by their layer's output, biases corrected, activation ranges of least squared error",
        {"observer": "mse", **_CORRECTED},
    ),
    (
        "full-bias",
        "as gptq, biases corrected layer by layer behind quantized layers",
        {"observer": "mse", **_CORRECTED, "bias_correction": "full"},
    ),
    ("minmax", "as gptq, min-max activation ranges", {"observer": "minmax", **_CORRECTED}),
    (
        "percentile",
        "as gptq, activation ranges clipped at the 99.99th percentile",
        {"observer": "percentile", **_CORRECTED},
    ),
    (
        "entropy",
        "as gptq, activation ranges of least relative entropy",
        {"observer": "entropy", **_CORRECTED},
    ),
    ("plain", "weights rounded to nearest, min-max activation ranges", {"observer": "minmax"}),
)
_HALVES = {"fp16": "float16", "bf16": "bfloat16"}


def schemed(target: Target) -> bool:
    """Whether a target is made by a quantization scheme of its runtime."""
    return target.precision in ("int8", "int8-dynamic")


def rungs(target: Target, scheme: str, calibrated: bool = True) -> tuple[Recipe, ...]:
    """The ladder for `target` (runtime and device filled in); `calibrated`: there are data to calibrate from.

    Rungs of static int8 change how biases are corrected and how activation ranges are found, from one
    calibration pass; the first one is what was measured best on most models at little cost. Weight-only
    int4 rounds by GPTQ with data and HQQ without, then gives 8 bits to the layers that 4 hurt most.
    Raises `UnsupportedError` if there is none.
    """
    match target.precision:
        case "fp32":
            return (Recipe("float"),)
        case "int8":
            return tuple(
                _recipe(name, "quantize", what, scheme=scheme, **choices) for name, what, choices in _STATIC
            )
        case "int8-dynamic":
            what = "int8 weights per channel, activations quantized at run time"
            return (_recipe("dynamic", "dynamic", what, scheme=scheme),)
        case "int8-weight":
            what = "weights in blocks of 32 with 8 bits"
            return (_recipe("int8-weight", "weight_only", what, bits=8, group=32, rounding="nearest"),)
        case "int4":
            return _int4("gptq" if calibrated else "hqq")
        case "fp16" | "bf16":
            return _half(target)
    raise UnsupportedError(
        f"target {target}: there is no way to make {target.precision} for {target.runtime}"
    )


def _int4(rounding: str) -> tuple[Recipe, ...]:
    common = {"bits": 4, "group": 32, "rounding": rounding}
    first = _recipe(rounding, "weight_only", f"weights in blocks of 32 with 4 bits, {rounding}", **common)
    mixed = (
        _recipe(
            f"mixed{share:.0%}",
            "weight_only",
            f"{share:.0%} of the weights with 8 bits",
            wide=share,
            **common,
        )
        for share in (0.25, 0.5)
    )
    return (first, *mixed)


def _half(target: Target) -> tuple[Recipe, ...]:
    """Compute in half where the device has kernels for it; elsewhere only the weights are stored so."""
    kind = _HALVES[target.precision]
    stored = _recipe(
        "stored", "cast", f"weights stored as {kind}, compute in float32", to=kind, compute="float32"
    )
    if target.device == "cpu" and not (kind == "float16" and "asimdhp" in machine.cpu_flags()):
        return (stored,)
    what = f"{kind} with float32 islands where ranges overflow"
    return (_recipe(kind, "cast", what, to=kind, compute=kind, device=target.device), stored)


def _recipe(name: str, stage: str, what: str, **parameters: Any) -> Recipe:
    return Recipe(name, (Step(stage, parameters),), what)
