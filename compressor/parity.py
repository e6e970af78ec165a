"""Whether two forms of a model give the same: the check behind every conversion, and a program's digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ModelFileError, UnsupportedError
from compressor.model import TensorSpec
from compressor.torch_inputs import random_inputs

if TYPE_CHECKING:
    import torch

__all__ = [
    "TOLERANCE",
    "check_onnx",
    "check_traced",
    "first_line",
    "program_digest",
    "refuse_non_finite",
    "relative_error",
]

TOLERANCE = 1e-3
"""Largest relative error that passes for rounding."""

_BATCHES = (1, 2, 5)


def relative_error(expected: Any, got: Any) -> float:
    """Largest absolute difference over the largest absolute value of `expected` (over 1 if that is 0).

    Both are arrays. NaN and infinities must stand in the same places; else the error is infinite.
    """
    import numpy as np

    expected, got = np.asarray(expected, np.float64), np.asarray(got, np.float64)
    finite = np.isfinite(expected)
    if expected.shape != got.shape or not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(expected - got)[finite].max()) / (float(np.abs(expected[finite]).max()) or 1.0)


def check_onnx(reference: Callable[..., Any], path: Path, inputs: Sequence[TensorSpec]) -> dict[str, float]:
    """Largest relative error of an ONNX file against a torch module, by batch size (1, 2 and 5).

    `reference` takes the tensors of `inputs` in order. Raises `UnsupportedError` with the errors if one is
    above `TOLERANCE`.
    """
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [spec.name for spec in inputs]
    errors: dict[str, float] = {}
    for batch in _BATCHES if any("batch" in spec.shape for spec in inputs) else (1,):
        tensors = random_inputs(inputs, batch, seed=batch)
        with torch.no_grad():
            expected = _tensors(reference(*tensors))
        feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        got = session.run(None, {each.name: feeds[each.name] for each in session.get_inputs()})
        errors[str(batch)] = max(
            (relative_error(first.numpy(), second) for first, second in zip(expected, got, strict=True)),
            default=0.0,
        )
    if max(errors.values()) > TOLERANCE:
        shown = ", ".join(f"{error:.2g} at batch {batch}" for batch, error in errors.items())
        raise UnsupportedError(
            f"the ONNX export does not give what the torch model gives (relative error {shown}; "
            f"{TOLERANCE:g} is allowed)"
        )
    return errors


def check_traced(
    reference: torch.nn.Module,
    program: torch.export.ExportedProgram,
    graph: torch.fx.GraphModule,
    inputs: Sequence[TensorSpec],
) -> None:
    """Raise `UnsupportedError` unless `graph`, the flat module of `program`, gives what `reference` gives.

    Compared at one sample, and at three where the batch is free.
    """
    import torch

    for batch in (1, 3) if any("batch" in spec.shape for spec in inputs) else (1,):
        tensors = random_inputs(inputs, batch, seed=batch)
        args, kwargs = _structured(program, tensors)
        with torch.no_grad():
            expected, again = _tensors(reference(*args, **kwargs)), _tensors(reference(*args, **kwargs))
            got = graph(*tensors)
        for first, second, traced in zip(expected, again, got, strict=True):
            if relative_error(first.numpy(), second.numpy()) > TOLERANCE:
                raise UnsupportedError(
                    "the model gives different answers to the same input, so nothing can be proved of it"
                )
            error = relative_error(first.numpy(), traced.numpy())
            if error > TOLERANCE:
                shown = f"relative error {error:.2g}" if error < float("inf") else "another shape, or NaN"
                raise UnsupportedError(
                    f"the traced graph does not give what the module gives at batch {batch} ({shown}): its "
                    "code depends on values or on the batch in a way that cannot be traced"
                )


def _structured(program: torch.export.ExportedProgram, tensors: Sequence[torch.Tensor]) -> Any:
    """The arguments as the program's module takes them, with the constants that it was traced with."""
    from torch.utils import _pytree as pytree

    feed = iter(tensors)
    specs = [each.arg for each in program.graph_signature.input_specs if each.kind.name == "USER_INPUT"]
    leaves = [arg.value if type(arg).__name__ == "ConstantArgument" else next(feed) for arg in specs]
    return pytree.tree_unflatten(leaves, program.call_spec.in_spec)


def _tensors(tree: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def refuse_non_finite(module: torch.nn.Module) -> None:
    """Raise `ModelFileError` that names the first parameter with NaN or Inf: it would give no answers."""
    for name, value in module.named_parameters():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            kind = "NaN" if bool(value.isnan().any()) else "Inf"
            raise ModelFileError(f"the model's weight '{name}' holds {kind}; train or export the model again")


def program_digest(program: torch.export.ExportedProgram, specs: Sequence[TensorSpec]) -> str:
    """SHA-256 (hex) over the graph's text, its weights and constants, and its inputs and outputs."""
    import torch

    total = hashlib.sha256("\n".join(map(str, specs)).encode())
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            total.update(str(module.graph).encode())
    for name, value in (*program.state_dict.items(), *program.constants.items()):
        total.update(f"{name}\0{getattr(value, 'dtype', None)}\0{getattr(value, 'shape', value)}\0".encode())
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            total.update(plain.numpy().data)
    return total.hexdigest()


def first_line(error: BaseException) -> str:
    """An exception's kind and the first line of what it says, for a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
