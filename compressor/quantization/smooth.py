"""Smoothing: channels of an activation that differ in range get closer, weights take the difference.

Source: Xiao et al., SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models, 2023 (arXiv:2211.10438), equation 4: s = max|X| ^ alpha / max|W| ^ (1 - alpha) for each channel. A
depthwise Conv has a scale of its own for every channel that it reads, so there alpha is 1 and one range for
the tensor does as well as one for each channel.

Where rows meet matrices alpha is found for each link by the loss of the layers' outputs (`search`): ranges
and factors come from one half of the samples and are judged on the other. Judged on the same samples the
largest alpha always looks best, and values that the samples did not hold are then clipped in every channel
instead of one (a sentence encoder: 19.9 dB behind such factors, 24.4 behind those that are judged apart).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.errors import DataError
from compressor.quantization import scaling
from compressor.quantization.activations import Activations, Batches, samples, unusable
from compressor.quantization.equalize import read_ranges
from compressor.quantization.observers.statistics import LIMIT
from compressor.quantization.pairs import quantize_rows
from compressor.quantization.scaling import Link
from compressor.quantization.segments import write_segments
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["Channels", "factors", "judged", "observe", "of_alpha", "search", "smooth"]

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
LEAST = 1 / 64  # a channel that hardly ever moves is not blown up without end
_LEASTS = (LEAST, 1 / 8)
_ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
_WORTH = 10**0.1  # a Mul has to take 1 dB off the loss
_ROWS = 1024  # of a tensor, on which choices are judged
_MEMORY = 256 << 20  # bytes of all rows
_OF_SAMPLE = 16


@dataclass
class Channels:
    """What a link's tensor held: the least and the largest value of each channel, and some rows.

    `low` and `high` are [2, channels]: samples at even and odd places apart. `rows` [n, channels] come from
    odd places.
    """

    low: Floats
    high: Floats
    rows: Singles

    @classmethod
    def empty(cls, channels: int) -> Channels:
        return cls(np.zeros((2, channels)), np.zeros((2, channels)), np.zeros((0, channels), np.float32))

    @property
    def largest(self) -> Floats:
        """The largest magnitude of each channel over all samples."""
        return np.asarray(np.maximum(self.high, -self.low).max(axis=0))

    def add(self, half: int, rows: Singles, keep: int) -> None:
        """Take in the rows [n, channels] of a sample; `keep` of them, evenly spaced, are kept."""
        usable = np.where(np.abs(rows) < LIMIT, rows, 0)  # not those of masks, and not NaN
        self.low[half] = np.minimum(self.low[half], usable.min(axis=0, initial=0.0))
        self.high[half] = np.maximum(self.high[half], usable.max(axis=0, initial=0.0))
        if keep and half:
            step = max(1, -(-len(usable) // keep))
            self.rows = np.concatenate([self.rows, usable[len(self.rows) % step :: step]])


def factors(seen: Floats, read: Floats, alpha: float, least: float = LEAST) -> Floats:
    """s [channels] from the largest magnitudes of activations (`seen`) and of weights that read them.

    The largest s is 1, so no range grows, and none is below `least`; a channel that was always 0, or that
    nothing reads, keeps 1.
    """
    usable = (seen > 0) & (read > 0)
    if not usable.any():
        return np.ones_like(seen)
    found = np.where(usable, seen, 1.0) ** alpha / np.where(usable, read, 1.0) ** (1 - alpha)
    found = np.where(usable, found / found[usable].max(), 1.0)
    return np.asarray(np.maximum(found, least))


def observe(
    model: ModelProto, links: Sequence[Link], batches: Batches, folder: Path, total: int | None = None
) -> dict[str, Channels]:
    """What each link's tensor holds over all usable samples.

    Values of 1e30 and more (masks) and NaN do not count. Raises `DataError` if no sample is usable.
    """
    axes = {link.tensor: link.axis for link in links}
    segments = write_segments(model, list(axes), folder, "channels")
    activations = Activations(segments, list(axes))
    for path in segments:
        path.unlink()
    seen = {link.tensor: Channels.empty(link.channels) for link in links}
    most = min(_ROWS, _MEMORY // max(1, 4 * sum(link.channels for link in links if judged(link))))
    wanted = {link.tensor: most if judged(link) else 0 for link in links}
    count = 0
    clean = (sample for sample in samples(batches) if not unusable(sample))
    for count, unit in enumerate(activations.units(clean), 1):
        for name, value in activations.run(unit):
            found = np.moveaxis(value, axes[name], -1).reshape(-1, value.shape[axes[name]])
            keep = min(_OF_SAMPLE, wanted[name] - len(seen[name].rows))
            seen[name].add((count - 1) % 2, found, keep)
        events.progress("channel ranges", count, total)
    if not count:
        raise DataError("smoothing: no sample is free of NaN and Inf; mend the data")
    return seen


def judged(link: Link) -> bool:
    """Whether the loss of a link's factors can be measured: rows meet matrices."""
    return link.axis == -1


def search(view: View, link: Link, channels: Channels, limit: int | None) -> tuple[float, Floats] | None:
    """The alpha and the factors [channels] of least loss for a link; None if those of 1 do as well.

    `limit` is the scheme's for pairs of weights. The factors that are given back are of all samples; one
    sample alone cannot tell.
    """
    weights = [_columns(view, consumer.weight, consumer.index) for consumer in link.consumers]
    read = read_ranges(view, link.consumers, link.channels)
    if not len(channels.rows):
        return None
    low, high = channels.low[0], channels.high[0]
    judge, seen = _Judge(channels.rows, weights, limit), np.maximum(high, -low)
    trials = [
        (judge.loss(factors(seen, read, alpha, least), low, high), alpha, least)
        for alpha in _ALPHAS
        for least in _LEASTS
    ]
    best, alpha, least = min(trials)
    plain = judge.loss(np.ones(link.channels), low, high)
    if plain <= best * (1 if link.constants else _WORTH):
        return None
    return alpha, factors(channels.largest, read, alpha, least)


class _Judge:
    """Measures the error of layers that read `rows` [n, channels] in 8 bits, against their output's power."""

    def __init__(self, rows: Singles, weights: Sequence[Singles], limit: int | None) -> None:
        self.rows, self.weights, self.limit = rows, weights, limit
        self.wanted = [rows @ weight for weight in weights]
        self.power = [float(np.square(value - value.mean(axis=0)).sum()) or 1.0 for value in self.wanted]

    def loss(self, scale: Floats, low: Floats, high: Floats) -> float:
        """The mean over layers of error / power with channels divided by `scale`, in the range low to high.

        Weights are rounded to nearest.
        """
        bottom, top = float((low / scale).min()), float((high / scale).max())
        step = (top - bottom) / 255 or 1.0
        zero = np.float32(np.rint(-bottom / step))
        codes = np.clip(np.rint(self.rows * (1 / (scale * step)).astype(np.float32)) + zero, 0, 255)
        got = (codes - zero) * np.float32(step)
        total = 0.0
        for weight, wanted, power in zip(self.weights, self.wanted, self.power, strict=True):
            floor = np.full(weight.shape[1], np.finfo(np.float32).tiny, np.float64)
            rounded, size = quantize_rows((weight * scale[:, None]).T, floor, self.limit)
            error = got @ (rounded * size[:, None]).T.astype(np.float32) - wanted
            total += float(np.square(error).sum()) / power
        return total / len(self.weights)


def smooth(model: ModelProto, links: Sequence[Link], chosen: Mapping[str, Floats]) -> list[str]:
    """Apply factors, known by a link's tensor, to a prepared model in place.

    Gives the tensors that the layers read afterwards, which are other ones where a Mul was inserted.
    """
    return [scaling.apply(model, link, chosen[link.tensor]) for link in links]


def of_alpha(view: View, link: Link, channels: Channels, alpha: float) -> Floats:
    """The factors of one alpha; where every consumer reads one channel only, of alpha 1."""
    free = all(consumer.free for consumer in link.consumers)
    read = read_ranges(view, link.consumers, link.channels)
    return factors(channels.largest, read, 1.0 if free else alpha)


def _columns(view: View, name: str, index: NDArray[np.intp]) -> Singles:
    """A matrix [channels, outputs]."""
    value: Any = view.array(name)
    return np.asarray(value.T if index[-1, 0] == 0 and index[0, -1] > 0 else value, np.float32)
