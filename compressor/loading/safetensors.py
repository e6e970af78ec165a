"""safetensors files: weights by name, without code and without pickle."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ModelFileError
from compressor.model import Model

if TYPE_CHECKING:
    from compressor.loading import LoadOptions

DESCRIPTION = "safetensors weights"
USES: tuple[str, ...] = ("architecture", "inputs")

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of an element by the format's dtype."""


def recognise(path: Path) -> bool:
    """Eight bytes of length, then a JSON object as long; `ModelFileError` if it and the file do not agree."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file.read(1) != b"{" or length > 100_000_000:
            return False
        file.seek(8)
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            header = None
    size = path.stat().st_size
    if header is None and size >= 8 + length:
        return False
    entries = {name: entry for name, entry in (header or {}).items() if name != "__metadata__"}
    for name, entry in entries.items():
        problem = _problem(entry)
        if problem:
            raise ModelFileError(f"{path} is a damaged safetensors file: tensor '{name[:80]}' {problem}")
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    if header is None or size < 8 + length + max(ends, default=0):
        raise ModelFileError(f"{path} is a truncated or damaged safetensors file; get it again")
    return True


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """The network of `--arch`, or the one known network that fits, with these weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from compressor.torch_weights import load_weights

    try:
        weights = load_file(path)
    except (SafetensorError, KeyError) as error:
        raise ModelFileError(f"{path} cannot be read by safetensors: {error}") from error
    return load_weights(weights, path, options, folder, "safetensors")


def inspect(path: Path) -> dict[str, Any]:
    """The tensors and the known architectures that they fit."""
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import _TYPES

    from compressor.architectures import fitting
    from compressor.state_dicts import summary

    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in sorted(file.keys())}
            weights = {
                name: torch.empty(part.get_shape(), dtype=_TYPES[part.get_dtype()], device="meta")
                for name, part in parts.items()
            }
    except (SafetensorError, KeyError) as error:
        raise ModelFileError(f"{path} cannot be read by safetensors: {error}") from error
    return summary(weights, fitting(weights))


def _problem(entry: Any) -> str | None:
    """What is wrong with a tensor's entry in the header, by the format's description; None: nothing."""
    if not isinstance(entry, dict):
        return "has no description"
    bits = _BITS.get(str(entry.get("dtype")))
    if bits is None:
        return f"has the unknown dtype '{str(entry.get('dtype'))[:40]}'"
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "has no valid shape and place"
    if math.prod(shape) * bits != 8 * (offsets[1] - offsets[0]):
        return f"has shape {shape}, but {offsets[1] - offsets[0]} bytes of data"
    return None


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
