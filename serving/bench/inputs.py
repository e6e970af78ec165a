"""What engines are timed on: a few batches of the asked size, from real samples where there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import DataError, UnsupportedError
from compressor.model import DTYPES, TensorSpec

if TYPE_CHECKING:
    from serving.runtimes import Array

__all__ = ["batches_of", "fixed_batch", "specs_of"]

_ROTATING = 8
_MOST_BYTES = 64 << 20


def specs_of(data: dict[str, Any]) -> tuple[TensorSpec, ...]:
    """The inputs that a data reference is bound to."""
    return tuple(TensorSpec.of(spec) for spec in data["inputs"])


def fixed_batch(specs: tuple[TensorSpec, ...]) -> int | None:
    """The batch size that the engine is bound to, None when it takes any.

    Inputs whose first sizes are fixed and differ have no batch: a call is one sample then.
    """
    sizes = {spec.shape[0] for spec in specs if spec.shape}
    fixed = {size for size in sizes if isinstance(size, int)}
    if not fixed or fixed != sizes:
        return None
    return min(fixed) if len(fixed) == 1 else 1


def batches_of(data: dict[str, Any], size: int, seed: int = 0) -> list[dict[str, Array]]:
    """Up to 8 batches of `size` samples from a data reference, in its order.

    Samples are used again where there are too few. A reference whose "source" is None gives made-up
    values: normal for floats, zeros and ones for integers (valid as token ids and masks).
    """
    if data.get("source") is None:
        return _made_up(specs_of(data), size, seed)
    parts = _parts(data, size * _ROTATING)
    if any(array.shape[:1] != (count,) for part, count in parts for array in part.values()):
        return [part for part, _ in parts[:_ROTATING]]  # no batch axis: a batch is what the source gives
    samples = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0]}
    count = sum(count for _, count in parts)
    sample_bytes = sum(array.nbytes for array in samples.values()) / count
    rounds = max(1, min(_ROTATING, count // size, int(_MOST_BYTES / (sample_bytes * size))))
    places = [np.arange(start * size, (start + 1) * size) % count for start in range(rounds)]
    return [{name: np.ascontiguousarray(array[at]) for name, array in samples.items()} for at in places]


def _parts(data: dict[str, Any], wanted: int) -> list[tuple[dict[str, Array], int]]:
    """The first batches of the data with the number of samples in each, all of one shape."""
    from compressor.data import stream

    parts: list[tuple[dict[str, Array], int]] = []
    shapes, samples, size = None, 0, 0
    for batch in stream({"batch": wanted, **data}):
        here = {name: array.shape[1:] for name, array in batch.inputs.items()}
        if shapes not in (None, here):
            break  # samples of another length: one timing is of one shape
        shapes = here
        parts.append((batch.inputs, len(batch.indices)))
        samples += len(batch.indices)
        size += sum(array.nbytes for array in batch.inputs.values())
        if samples >= wanted or size > _MOST_BYTES:
            break
    if not parts:
        raise DataError(f"{data['source']}: there are no samples to time engines on")
    return parts


def _made_up(specs: tuple[TensorSpec, ...], size: int, seed: int) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [{spec.name: _values(spec, size, rng) for spec in specs} for _ in range(2)]


def _values(spec: TensorSpec, size: int, rng: np.random.Generator) -> Array:
    """A free first axis is the batch; a fixed one (a state that all samples share) keeps its size."""
    free = [name for name in spec.shape[1:] if isinstance(name, str)]
    if free:
        raise UnsupportedError(
            f"input '{spec.name}' has the free dimension '{free[0]}', so made-up inputs have no size; "
            "pass --data with real samples"
        )
    if spec.dtype not in DTYPES:
        raise UnsupportedError(
            f"input '{spec.name}' is of type {spec.dtype}, for which no values are made up; made-up inputs "
            "are numbers and bool"
        )
    shape = tuple(size if isinstance(length, str) else length for length in spec.shape)
    if spec.dtype == "bfloat16":
        import ml_dtypes

        return np.asarray(rng.normal(size=shape), ml_dtypes.bfloat16)
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "f":
        return np.asarray(rng.normal(size=shape), dtype)
    return np.asarray(rng.integers(0, 2, shape), dtype)
