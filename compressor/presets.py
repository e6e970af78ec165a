"""Recipes for a target, cheapest first: the rungs that are tried until the accuracy budget is kept."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

from compressor import machine, plugins
from compressor.errors import UnsupportedError, UsageError
from compressor.recipe import Recipe, Step
from compressor.target import Target

__all__ = ["rungs", "schemed", "suited"]


def _corrected(observer: str, **choices: str) -> Step:
    defaults = {"rounding": "gptq", "bias_correction": "fast"}
    return Step("quantize", {"observer": observer, **defaults, **choices})


# Where rows meet matrices (transformers); nothing else is touched.
_SMOOTH = Step("equalize", {"method": "smooth", "where": "rows"})
_PLAIN = Step("quantize", {"observer": "minmax"})
_STATIC: tuple[tuple[str, str, tuple[Step, ...]], ...] = (
    (
        "gptq",
        "weights rounded by their layer's output, biases corrected, inputs of matrices smoothed, "
        "other activation ranges of least squared error",
        (_SMOOTH, _corrected("mse")),
    ),
    (
        "smooth",
        "as gptq, ranges of channels evened out between layers",
        (Step("equalize", {"method": "smooth"}), _corrected("mse")),
    ),
    (
        "full-bias",
        "as gptq, biases corrected layer by layer behind quantized layers",
        (_SMOOTH, _corrected("mse", bias_correction="full")),
    ),
    ("minmax", "as gptq, min-max activation ranges", (_SMOOTH, _corrected("minmax"))),
    (
        "percentile",
        "as gptq, activation ranges clipped at the 99.99th percentile",
        (_SMOOTH, _corrected("percentile")),
    ),
    ("entropy", "as gptq, activation ranges of least relative entropy", (_SMOOTH, _corrected("entropy"))),
    ("plain", "weights rounded to nearest, min-max activation ranges", (_PLAIN,)),
)
_HALVES = {"fp16": "float16", "bf16": "bfloat16"}


def schemed(target: Target) -> bool:
    """Whether a target is made by a quantization scheme of its runtime."""
    return target.precision in ("int8", "int8-dynamic")


def rungs(target: Target, scheme: str, calibrated: bool = True) -> tuple[Recipe, ...]:
    """The ladder for `target` (runtime and device filled in); `calibrated`: there are data to calibrate from.

    Rungs of static int8 change how biases are corrected, ranges of channels evened out and activation
    ranges found; the first one is what was measured best on most models at little cost. Weight-only
    int4 rounds by GPTQ with data and HQQ without, then gives 8 bits to the layers that 4 hurt most.
    Raises `UnsupportedError` if there is none.
    """
    match target.precision:
        case "fp32":
            return (Recipe("float"),)
        case "int8":
            return tuple(Recipe(name, _with(scheme, steps), what) for name, what, steps in _STATIC)
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


def _with(scheme: str, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps, those that quantize with the scheme."""
    return tuple(Step(step.stage, {"scheme": scheme, **step.parameters}) for step in steps)


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


_MADE_BY = {
    "int8": "quantize",
    "int8-dynamic": "dynamic",
    "int8-weight": "weight_only",
    "int4": "weight_only",
}


def suited(recipe: Recipe, target: Target, scheme: str) -> Recipe:
    """The recipe with the machine's scheme where it names none; refuses one that cannot make the target."""
    needed = _MADE_BY.get(target.precision)
    if needed and needed not in [step.stage for step in recipe.steps]:
        raise UsageError(
            f"recipe {recipe.name}: no step '{needed}', so it cannot make {target}; add it or ask for fp32"
        )
    return replace(recipe, steps=tuple(_filled(recipe, step, scheme) for step in recipe.steps))


def _filled(recipe: Recipe, step: Step, scheme: str) -> Step:
    """A step whose parameters are those that its stage takes."""
    takes = signature(plugins.module("stages", step.stage).run).parameters
    known = [name for name in takes if name not in ("model", "folder", "ranges", "moments", "data")]
    unknown = sorted(set(step.parameters) - set(known))
    if unknown:
        raise UsageError(
            f"recipe {recipe.name}: stage {step.stage} takes no '{unknown[0]}'; it takes {', '.join(known)}"
        )
    given = {"scheme": scheme, **step.parameters} if "scheme" in known else step.parameters
    return Step(step.stage, given)
