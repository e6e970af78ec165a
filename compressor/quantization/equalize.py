"""Cross-layer equalization: two layers in a row get the same range of weights, channel by channel.

Source: Nagel et al., Data-Free Quantization through Weight Equalization and Bias Correction, 2019
(arXiv:1906.04721), section 4.1. The activation between them is divided by
s = sqrt(r1 r2) / r2, with r1 the largest weight that makes a channel and r2 the largest that reads it;
sweeps over all links go on until the factors are near 1. It needs no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization import scaling
from compressor.quantization.scaling import Consumer, Link
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["equalize", "factors", "read_ranges"]

Floats = NDArray[np.float64]
_SWEEPS = 20
_NEAR = 1e-3
_MOST = 1e3


def factors(made: Floats, read: Floats) -> Floats:
    """s [channels] from the largest magnitudes of weights that make and that read each channel.

    A channel without weights on one side stays as it is.
    """
    usable = (made > 0) & (read > 0)
    ratio = np.where(usable, made, 1.0) / np.where(usable, read, 1.0)
    return np.asarray(np.clip(np.sqrt(ratio), 1 / _MOST, _MOST))


def equalize(model: ModelProto) -> int:
    """Equalize a prepared model in place; gives the number of links."""
    links = scaling.links(model)
    for _ in range(_SWEEPS):
        furthest = 0.0
        for link in links:
            view = View(model)
            found = factors(_made(view, link), read_ranges(view, link.consumers, link.channels))
            scaling.apply(model, link, found)
            furthest = max(furthest, float(np.abs(np.log(found)).max(initial=0.0)))
        if furthest < _NEAR:
            break
    return len(links)


def read_ranges(view: View, consumers: tuple[Consumer, ...], channels: int) -> Floats:
    """The largest magnitude [channels] of the weights that read each channel."""
    found = np.zeros(channels)
    for consumer in consumers:
        np.maximum.at(found, consumer.index.reshape(-1), np.abs(_array(view, consumer.weight)).reshape(-1))
    return found


def _made(view: View, link: Link) -> Floats:
    name, axis = link.constants[0]
    value = np.moveaxis(_array(view, name), axis, 0)
    return np.asarray(np.abs(value.reshape(len(value), -1)).max(axis=1), np.float64)


def _array(view: View, name: str) -> NDArray[Any]:
    value = view.array(name)
    assert value is not None
    return value
