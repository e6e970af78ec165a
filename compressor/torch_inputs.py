"""Which tensors a torch module takes: names from its forward, shapes from what the user or the data say."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compressor.errors import UnsupportedError, UsageError
from compressor.model import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["arguments", "bind", "random_inputs", "refuse_cycle"]

_FREE_STEPS, _FREE_PIXELS = 24, 224
_LABELS = {"label", "labels", "target", "targets", "y", "class", "classes"}


def bind(
    names: Sequence[str],
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    preprocess: Mapping[str, Any] | None,
) -> tuple[TensorSpec, ...]:
    """The inputs of a module whose forward takes `names`, from what is known of shapes.

    Raises `UsageError` that says what to pass where that is not enough.
    """
    if inputs:
        return _bind_given(names, inputs)
    fixed = all(isinstance(size, int) for spec in samples for size in spec.shape)
    crop = (preprocess or {}).get("crop")
    if samples and (fixed or not crop):
        return _bind_samples(names, samples)
    if crop and names:
        return (TensorSpec(names[0], "float32", ("batch", 3, crop, crop)),)
    raise _unknown(names)


def arguments(module: torch.nn.Module) -> list[str]:
    """The names of forward's arguments; required ones only, if there are any.

    Raises `UnsupportedError` if forward takes nothing at all.
    """
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        schema = module.forward.schema.arguments[1:]
        _refuse_none(schema)
        required = [each.name for each in schema if not each.has_default_value()]
        return required or [each.name for each in schema]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(module.forward).parameters.values()
    _refuse_none(parameters)
    found = [each for each in parameters if each.kind in kinds]
    required = [each.name for each in found if each.default is inspect.Parameter.empty]
    return required or [each.name for each in found]


def _refuse_none(parameters: Collection[Any]) -> None:
    if not parameters:
        raise UnsupportedError("the model has no input: its forward takes nothing that could be fed")


def refuse_cycle(module: torch.nn.Module) -> None:
    """Raise `UnsupportedError` if a module contains itself: whatever walks it would never end."""
    above: set[int] = set()
    done: set[int] = set()
    walk = [(module, "", True)]
    while walk:
        current, name, entered = walk.pop()
        if not entered:
            above.discard(id(current))
            done.add(id(current))
        elif id(current) in above:
            raise UnsupportedError(
                f"the module contains itself (as '{name}'), so it can be neither run nor saved"
            )
        elif id(current) not in done:
            above.add(id(current))
            walk.append((current, name, False))
            inner = [(key, each) for key, each in current._modules.items() if each is not None]
            walk += [(each, f"{name}.{key}".lstrip("."), True) for key, each in inner]


def random_inputs(inputs: Sequence[TensorSpec], batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """One tensor per input: normal numbers, or 0 and 1 for whole numbers (an index that always exists)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for spec in inputs:
        free = _FREE_PIXELS if len(spec.shape) > 3 else _FREE_STEPS
        shape = [size if isinstance(size, int) else batch if size == "batch" else free for size in spec.shape]
        dtype = getattr(torch, spec.dtype)
        values = torch.randn(shape, generator=generator)
        tensors.append(values.to(dtype) if dtype.is_floating_point else (values > 0).to(dtype))
    return tuple(tensors)


def _bind_given(names: Sequence[str], inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    given = [spec.name for spec in inputs]
    if len(inputs) == 1 and (not given[0] or len(names) == 1):
        return (replace(inputs[0], name=given[0] or (names[0] if names else "input")),)
    if names and not set(given) <= set(names):
        raise UsageError(f"--input names {', '.join(given)}, but the model takes {', '.join(names)}")
    if set(names) - set(given):
        missing = [name for name in names if name not in given]
        raise UsageError(f"the model also takes {', '.join(missing)}: pass --input for each")
    order = list(names) or given
    return tuple(sorted(inputs, key=lambda spec: order.index(spec.name)))


def _bind_samples(names: Sequence[str], samples: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """By name; the only array (leaving labels aside) for the only argument."""
    by_name = {spec.name: spec for spec in samples}
    arrays = [spec for spec in samples if spec.name.lower() not in _LABELS] or list(samples)
    if set(names) <= set(by_name) and names:
        chosen = [by_name[name] for name in names]
    elif len(arrays) == 1 and len(names) <= 1:
        chosen = [replace(arrays[0], name=names[0] if names else arrays[0].name)]
    else:
        raise UsageError(
            f"the model takes {', '.join(names)}, the data have {', '.join(by_name)}: name the arrays like "
            "the inputs, or pass --input NAME=SHAPE for each"
        )
    wide = {"float64": "float32", "float16": "float32", "uint8": "float32"}
    return tuple(
        replace(spec, dtype=wide.get(spec.dtype, spec.dtype), shape=("batch", *spec.shape)) for spec in chosen
    )


def _unknown(names: Sequence[str]) -> UsageError:
    shown = " ".join(f"--input {name}=?x..." for name in names) or "--input NAME=?x..."
    return UsageError(
        f"the shapes of the model's inputs are not known: pass {shown}, for example "
        f"--input {names[0] if names else 'image'}=?x3x224x224, or --data"
    )
