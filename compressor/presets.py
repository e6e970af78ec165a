"""Recipes for a target, cheapest first: the rungs that are tried until the accuracy budget is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compressor import machine
from compressor.errors import UnsupportedError, UsageError
from compressor.quantization.scheme import SCHEMES, named
from compressor.recipe import Recipe, Step
from compressor.target import Target

__all__ = ["check_scheme", "rungs", "schemed", "suited"]


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


def check_scheme(target: Target, name: str) -> None:
    """Raise `UnsupportedError` for a scheme by which a target cannot be made.

    A file of static int8 is Q/DQ in standard ONNX and may be made for another runtime or processor; one of
    dynamic int8 holds operators of the runtime that runs it.
    """
    if target.precision != "int8-dynamic":
        return
    chosen = named(name)
    if not chosen.dynamic:
        raise UnsupportedError(
            f"{target}: {chosen.title} has no kernels that quantize while they run; ask for int8"
        )
    if chosen.place != (target.runtime, target.device):
        fitting = [one.name for one in SCHEMES.values() if one.place == (target.runtime, target.device)]
        raise UnsupportedError(
            f"{target}: scheme {name} is for {chosen.title}, and int8-dynamic is made for the runtime that "
            f"runs it; take {', '.join(fitting)}"
        )


def suited(recipe: Recipe, target: Target, scheme: str, asked: str | None = None) -> Recipe:
    """The recipe with the machine's scheme and the target's device where it names none.

    Raises `UsageError` if it does not make the target: its last step, and no other, must give the target's
    precision; if parameters do not fit their stages; or if `asked`, the scheme of --scheme, is another than
    its own.
    """
    if target.precision == "fp32" and recipe.steps:
        raise UsageError(
            f"recipe {recipe.name}: {target} is the model as it is, which no recipe changes; leave that "
            "target out, it is made and measured in any case"
        )
    filled = replace(recipe, steps=tuple(_filled(step, target, scheme) for step in recipe.steps))
    for step in filled.steps:
        step.check(recipe.name)
        own = step.parameters.get("scheme")
        if asked and own not in (None, asked):
            raise UsageError(f"recipe {recipe.name}: it names the scheme {own}, but --scheme is {asked}")
    _check_makes(filled, target)
    return filled


def _filled(step: Step, target: Target, scheme: str) -> Step:
    """A step with what the run knows, where its stage takes that and the recipe leaves it open."""
    known = {"scheme": scheme, "device": target.device}
    given = {name: value for name, value in known.items() if value and name in step.takes}
    return Step(step.stage, {**given, **step.parameters})


def _check_makes(recipe: Recipe, target: Target) -> None:
    """Raise `UsageError` unless the last step, and no other, makes the precision of the target."""
    made = [(step.stage, _makes(recipe, step)) for step in recipe.steps]
    wrong = [(stage, precision) for stage, precision in made if precision not in (None, target.precision)]
    if wrong:
        stage, precision = wrong[0]
        raise UsageError(
            f"recipe {recipe.name}: its step '{stage}' makes {precision}, so it cannot make {target}; "
            f"ask for {precision} or change the recipe"
        )
    makers = [stage for stage, precision in made if precision]
    if not makers and target.precision != "fp32":
        needed = _MADE_BY[target.precision][0]
        raise UsageError(f"recipe {recipe.name}: no step '{needed}', so it cannot make {target}; add it")
    if len(makers) > 1 or (makers and makers[0] != made[-1][0]):
        raise UsageError(
            f"recipe {recipe.name}: the step '{makers[0]}' must be the last one, and stand there once, since "
            "what comes behind it finds the model quantized; move or remove the others"
        )
    last = recipe.steps[-1] if recipe.steps else None
    if last and last.parameters.get("device") not in (None, target.device):
        device = last.parameters["device"]
        raise UsageError(f"recipe {recipe.name}: it computes on {device}, but the target is {target}")
    if last and last.stage == "dynamic":
        check_scheme(target, str(last.parameters["scheme"]))


_MADE_BY: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("quantize", {}),
    "int8-dynamic": ("dynamic", {}),
    "int8-weight": ("weight_only", {"bits": 8}),
    "int4": ("weight_only", {"bits": 4}),
    "fp16": ("cast", {"to": "float16"}),
    "bf16": ("cast", {"to": "bfloat16"}),
}


def _makes(recipe: Recipe, step: Step) -> str | None:
    """The precision that a step makes; None for one that leaves the model in float."""
    ways = [(wanted, precision) for precision, (stage, wanted) in _MADE_BY.items() if stage == step.stage]
    for wanted, precision in ways:
        if all(
            step.parameters.get(name, step.takes[name].default) == value for name, value in wanted.items()
        ):
            return precision
    if not ways:
        return None
    names = {name: step.parameters[name] for wanted, _ in ways for name in wanted}
    known = " and ".join(f"{value!r}" for wanted, _ in ways for value in wanted.values())
    given = ", ".join(f"{name} {value!r}" for name, value in names.items())
    raise UsageError(f"recipe {recipe.name}: stage {step.stage} with {given} is unknown; known are {known}")
