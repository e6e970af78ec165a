"""Smoothing: channels of an activation that differ in range get closer, weights take the difference.

Source: Xiao et al., SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models, 2023 (arXiv:2211.10438), equation 4: s = max|X| ^ alpha / max|W| ^ (1 - alpha) for each channel. A
depthwise Conv has a scale of its own for every channel that it reads, so there alpha is 1 and one range for
the tensor does as well as one for each channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.errors import DataError
from compressor.quantization import scaling
from compressor.quantization.activations import Activations, Batches, samples, unusable
from compressor.quantization.equalize import read_ranges
from compressor.quantization.observers.statistics import LIMIT
from compressor.quantization.scaling import Link
from compressor.quantization.segments import write_segments
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["factors", "observe", "smooth"]

Floats = NDArray[np.float64]
_LEAST = 1 / 64  # a channel that hardly ever moves is not blown up without end


def factors(seen: Floats, read: Floats, alpha: float) -> Floats:
    """s [channels] from the largest magnitudes of activations (`seen`) and of weights that read them.

    The largest s is 1, so no range grows; a channel that was always 0, or that nothing reads, keeps 1.
    """
    usable = (seen > 0) & (read > 0)
    if not usable.any():
        return np.ones_like(seen)
    found = np.where(usable, seen, 1.0) ** alpha / np.where(usable, read, 1.0) ** (1 - alpha)
    found = np.where(usable, found / found[usable].max(), 1.0)
    return np.asarray(np.maximum(found, _LEAST))


def observe(
    model: ModelProto, links: Sequence[Link], batches: Batches, folder: Path, total: int | None = None
) -> dict[str, Floats]:
    """The largest magnitude of each channel of every link's tensor, over all usable samples.

    Values of 1e30 and more (masks) and NaN do not count. Raises `DataError` if no sample is usable.
    """
    axes = {link.tensor: link.axis for link in links}
    segments = write_segments(model, list(axes), folder, "channels")
    activations = Activations(segments, list(axes))
    for path in segments:
        path.unlink()
    seen = {link.tensor: np.zeros(link.channels) for link in links}
    count = 0
    clean = (sample for sample in samples(batches) if not unusable(sample))
    for count, unit in enumerate(activations.units(clean), 1):
        for name, value in activations.run(unit):
            magnitude = np.abs(np.moveaxis(value, axes[name], -1).reshape(-1, value.shape[axes[name]]))
            largest = np.where(magnitude < LIMIT, magnitude, 0).max(axis=0, initial=0.0)
            np.maximum(seen[name], largest, out=seen[name])
        events.progress("channel ranges", count, total)
    if not count:
        raise DataError("smoothing: no sample is free of NaN and Inf; mend the data")
    return seen


def smooth(model: ModelProto, seen: Mapping[str, Floats], alpha: float) -> int:
    """Smooth a prepared model in place; `seen` has the largest magnitude of each channel of tensors.

    Gives the number of links.
    """
    links = [link for link in scaling.links(model) if link.tensor in seen]
    for link in links:
        view = View(model)
        read = read_ranges(view, link.consumers, link.channels)
        scaling.apply(model, link, factors(seen[link.tensor], read, _alpha(link, alpha)))
    return len(links)


def _alpha(link: Link, alpha: float) -> float:
    return 1.0 if all(consumer.free for consumer in link.consumers) else alpha
