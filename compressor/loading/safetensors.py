"""safetensors files: weights by name, without code and without pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ModelFileError
from compressor.model import Model

if TYPE_CHECKING:
    from compressor.loading import LoadOptions

DESCRIPTION = "safetensors weights"


def recognise(path: Path) -> bool:
    """Eight bytes of length, then a JSON object as long; `ModelFileError` if the file ends too early."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file.read(1) != b"{" or length > 100_000_000:
            return False
        file.seek(8)
        try:
            header = json.loads(file.read(length))
        except ValueError:
            header = None
    size = path.stat().st_size
    if header is None and size >= 8 + length:
        return False
    ends = [entry["data_offsets"][1] for name, entry in (header or {}).items() if name != "__metadata__"]
    if header is None or size < 8 + length + max(ends, default=0):
        raise ModelFileError(f"{path} is a truncated or damaged safetensors file; get it again")
    return True


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """The network of `--arch`, or the one known network that fits, with these weights."""
    from safetensors.torch import load_file

    from compressor.torch_weights import load_weights

    return load_weights(load_file(path), path, options, folder, "safetensors")


def inspect(path: Path) -> dict[str, Any]:
    """The tensors and the known architectures that they fit."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import _TYPES

    from compressor.architectures import fitting
    from compressor.state_dicts import summary

    with safe_open(path, "pt") as file:
        parts = {name: file.get_slice(name) for name in sorted(file.keys())}
        weights = {
            name: torch.empty(part.get_shape(), dtype=_TYPES[part.get_dtype()], device="meta")
            for name, part in parts.items()
        }
    return {**summary(weights), "architectures": fitting(weights)}
