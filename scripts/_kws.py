"""The DS-CNN of MLPerf Tiny's keyword spotting in PyTorch, with the weights of a TensorFlow checkpoint.

No TensorFlow is needed: the index of a checkpoint is a table of LevelDB (an uncompressed one) that says where
in the data file each variable lies (tensorflow/core/util/tensor_bundle).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

__all__ = ["build", "state_dict"]

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_FOOTER = 48


def build() -> nn.Module:
    """Images [n, 1, 49, 10] of MFCC in, probabilities of 12 words out (mlcommons/tiny, keras_model.py)."""
    layers: list[nn.Module] = [nn.ZeroPad2d((1, 1, 4, 5)), *_block(nn.Conv2d(1, 64, (10, 4), stride=2))]
    for _ in range(4):
        layers += _block(nn.Conv2d(64, 64, 3, padding=1, groups=64))
        layers += _block(nn.Conv2d(64, 64, 1))
    return nn.Sequential(*layers, nn.AvgPool2d((25, 5)), nn.Flatten(), nn.Linear(64, 12), nn.Softmax(1))


def _block(conv: nn.Module) -> list[nn.Module]:
    return [conv, nn.BatchNorm2d(64, eps=1e-3), nn.ReLU()]


def state_dict(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The parameters of `build()` from `checkpoint`.index and its data file."""
    variables = _variables(checkpoint)
    model, found = build(), {}
    weighted = [name for name, module in model.named_children() if list(module.parameters())]
    for number, name in enumerate(weighted):
        prefix = f"layer_with_weights-{number}/"
        for key, value in variables.items():
            if key.startswith(prefix) and "OPTIMIZER" not in key:
                found |= _parameter(name, key.removeprefix(prefix), value)
    return found


_NAMES = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}


def _parameter(layer: str, name: str, value: np.ndarray) -> dict[str, torch.Tensor]:
    """A Keras variable under PyTorch's name, in its order of axes."""
    if name == "depthwise_kernel":
        name, value = "weight", value.transpose(2, 3, 0, 1)
    elif name == "kernel":
        name, value = "weight", value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
    return {f"{layer}.{_NAMES.get(name, name)}": torch.from_numpy(value.copy())}


def _variables(checkpoint: Path) -> dict[str, np.ndarray]:
    """All float variables by name."""
    data = Path(f"{checkpoint}.data-00000-of-00001").read_bytes()
    found = {}
    for key, entry in _table(Path(f"{checkpoint}.index").read_bytes()):
        fields = dict(_fields(entry))
        if key.endswith(_SUFFIX) and fields.get(1) == 1:  # DT_FLOAT
            shape = [dict(_fields(dim)).get(1, 0) for number, dim in _fields(fields[2]) if number == 2]
            raw = data[fields.get(4, 0) :][: fields[5]]
            found[key.removesuffix(_SUFFIX)] = np.frombuffer(raw, "<f4").reshape(shape)
    return found


def _table(file: bytes) -> Iterator[tuple[str, bytes]]:
    """Keys and values of a LevelDB table: the index block of the footer names the data blocks."""
    place = 0
    _, place = _varint(file[-_FOOTER:], place)
    _, place = _varint(file[-_FOOTER:], place)
    for _, handle in _block_entries(file, file[-_FOOTER + place :]):
        yield from ((key.decode(), value) for key, value in _block_entries(file, handle))


def _block_entries(file: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    block = file[offset : offset + size]
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    key, at = b"", 0
    while at < end:
        shared, at = _varint(block, at)
        fresh, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + fresh]
        yield key, block[at + fresh : at + fresh + length]
        at += fresh + length


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protocol buffer: varints, and bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, at = _varint(message, at)
            yield tag >> 3, message[at : at + length]
            at += length
        else:  # a checksum
            at += 4


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
