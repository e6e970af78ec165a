"""Which array of the data goes to which input of the model, and whether it fits. Imports no numpy."""

from __future__ import annotations

import re
from collections.abc import Iterable

from compressor.errors import DataError
from compressor.model import TensorSpec

__all__ = ["fixed_batch", "match", "reshaped", "whole"]

_UNNAMED = ("arr_0", "x", "input", "inputs", "data")
_Shape = tuple[int | str, ...]


def match(arrays: Iterable[TensorSpec], inputs: Iterable[TensorSpec]) -> dict[str, str]:
    """The array for each input, by name: `{input: array}`.

    `arrays` have the shape of one sample, `inputs` include the batch axis. Names match exactly (but for
    `:0`), or as the last part of the input's (`batch_zeta` takes `zeta`); one array goes to a single
    input whatever it is called, `arr_0, arr_1, ...` go in order. Axes of size 1 may be missing or extra.
    An array whose sample has the full shape of the input (a state, a scalar) fits too, and is given one
    sample at a time.
    Raises `DataError` that says which array is wrong and how.
    """
    arrays, inputs = tuple(arrays), tuple(inputs)
    if not arrays:
        raise DataError(f"the data hold no array; the model wants {_listed(inputs)}")
    binding = _by_name(arrays, inputs) or _by_place(arrays, inputs)
    if binding is None:
        raise DataError(
            f"the names do not match: the model wants input {_listed(inputs)}; "
            f"the data have, per sample, {_listed(arrays)}; name the arrays after the inputs"
        )
    known = {array.name: array for array in arrays}
    for spec in inputs:
        problem = _misfit(known[binding[spec.name]], spec)
        if problem:
            raise DataError(problem)
    return binding


def whole(array: TensorSpec, spec: TensorSpec) -> bool:
    """Whether one sample of `array` is the whole input, with no batch axis to add."""
    if spec.shape and (_fits(array.shape, spec.shape[1:]) or reshaped(array, spec)):
        return False
    alone = not spec.shape or isinstance(spec.shape[0], int) or array.shape[:1] == (1,)
    return alone and _fits(array.shape, spec.shape)


def reshaped(array: TensorSpec, spec: TensorSpec) -> bool:
    """Whether a sample has the input's shape but for axes of size 1, so that only one reading is possible."""
    sample, wanted = array.shape, spec.shape[1:]
    fixed = all(isinstance(size, int) for size in (*sample, *wanted))
    return fixed and sample != wanted and _without_ones(sample) == _without_ones(wanted)


def fixed_batch(
    arrays: Iterable[TensorSpec], inputs: Iterable[TensorSpec], binding: dict[str, str]
) -> int | None:
    """The batch size that the model insists on, if it does: 1 where a sample is a whole input."""
    known = {array.name: array for array in arrays}
    sizes: set[int] = set()
    for spec in inputs:
        if whole(known[binding[spec.name]], spec):
            sizes.add(1)
        elif isinstance(spec.shape[0], int):
            sizes.add(spec.shape[0])
    if len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes)))
        raise DataError(f"the model's inputs {_listed(inputs)} want batches of {listed} at the same time")
    return sizes.pop() if sizes else None


def _by_name(arrays: tuple[TensorSpec, ...], inputs: tuple[TensorSpec, ...]) -> dict[str, str] | None:
    names = [array.name for array in arrays]
    binding = {spec.name: _named(spec.name.removesuffix(":0"), names) for spec in inputs}
    found = {name: array for name, array in binding.items() if array is not None}
    whole_set = len(found) == len(inputs) and len(set(found.values())) == len(inputs)
    return found if whole_set else None


def _named(name: str, arrays: list[str]) -> str | None:
    """The array of that name, else the longest that is the last part of the name."""
    if name in arrays:
        return name
    parts = [array for array in arrays if re.search(rf"[_./:]{re.escape(array)}$", name)]
    return max(parts, key=len, default=None)


def _by_place(arrays: tuple[TensorSpec, ...], inputs: tuple[TensorSpec, ...]) -> dict[str, str] | None:
    names = {array.name for array in arrays}
    order = [f"arr_{place}" for place in range(len(inputs))]
    if names == set(order):
        return {spec.name: name for spec, name in zip(inputs, order, strict=True)}
    if len(inputs) != 1:
        return None
    # A lone number beside the samples (a scale, a count) is no candidate for an input with axes.
    able = [array.name for array in arrays if array.shape or len(inputs[0].shape) < 2]
    if len(able) == 1:
        return {inputs[0].name: able[0]}
    unnamed = [name for name in _UNNAMED if name in able]
    others = [array for array in arrays if array.name in able and array.name not in unnamed]
    fits = [array for array in others if _fits(array.shape, inputs[0].shape[1:])]
    return {inputs[0].name: unnamed[0]} if len(unnamed) == 1 and not fits else None


def _misfit(array: TensorSpec, spec: TensorSpec) -> str | None:
    """Why the array cannot be given to the input, in a sentence; None: it can."""
    name = f"array '{array.name}'"
    kind, wanted = _kind(array.dtype), _kind(spec.dtype)
    if kind == "other":
        return f"{name} has dtype {array.dtype}, which is not numeric; input {spec} wants numbers"
    if wanted not in _CASTS[kind]:
        return f"{name} has dtype {array.dtype}, which does not go into input {spec} without loss"
    if whole(array, spec) or _fits(array.shape, spec.shape[1:]) or reshaped(array, spec):
        return None
    return (
        f"{name} has the wrong shape: one sample is {_shape(array.shape)}, "
        f"input {spec} wants {_shape(spec.shape[1:])}{_hint(array.shape, spec.shape[1:])}"
    )


_CASTS = {
    "bool": ("bool", "int", "float"),
    "int": ("int", "float"),
    "float": ("float",),
    "complex": ("complex",),
}


def _kind(dtype: str) -> str:
    match = re.match(r"u?(int|bool|complex)|b?(float)", dtype)
    return (match[1] or match[2]) if match else "other"


def _hint(sample: _Shape, wanted: _Shape) -> str:
    """What most likely happened."""
    if len(sample) == 3 and len(wanted) == 3:
        if _fits((sample[2], sample[0], sample[1]), wanted):
            return "; it looks like NHWC (channels last): transpose it to NCHW, x.transpose(0, 3, 1, 2)"
        if _fits((sample[1], sample[2], sample[0]), wanted):
            return "; it looks like NCHW (channels first): transpose it to NHWC, x.transpose(0, 2, 3, 1)"
    if _fits(sample, wanted[1:]) and len(wanted) > 1:
        return "; it looks like one sample without a batch dimension: store x[None]"
    return ""


def _fits(sample: _Shape, wanted: _Shape) -> bool:
    return len(sample) == len(wanted) and all(
        isinstance(have, str) or isinstance(want, str) or have == want
        for have, want in zip(sample, wanted, strict=True)
    )


def _without_ones(shape: _Shape) -> _Shape:
    return tuple(size for size in shape if size != 1)


def _shape(shape: _Shape) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _listed(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "nothing"
