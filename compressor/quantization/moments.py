"""First and second moments of what layers read: E[x] and E[x x^T] of the vectors that meet a weight's rows.

A Conv multiplies its weight with patches of its input, a Gemm or MatMul with rows, a recurrent layer with
rows of its input (W) and its own states (R); the moments are those of
these vectors in the kernel's order of summation, so they fit the rows that are rounded. One pass over
samples through the float graph gives all of them. A few dozen vectors of every sample suffice, fewer where
they are short; which ones depends on the sample's place in the data alone.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.errors import DataError
from compressor.quantization.activations import Activations, Batches, samples, unusable
from compressor.quantization.layers import Use
from compressor.quantization.patches import RECURRENT, rows_of, states_of
from compressor.quantization.segments import write_segments
from compressor.quantization.view import View

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["Moments", "gather", "known_by", "load", "save"]

MOMENTS = "moments.npz"
_VECTORS = 64  # of a sample, at most
_FEWEST = 16  # of a sample: short vectors, as those of depthwise layers, are soon known
_TOGETHER, _WAITING = 16, 2 << 20  # samples, or bytes of a layer, whose products are formed at once
_MEMORY = 1 << 30  # bytes of second moments of a whole model
_WIDEST = 4608  # a 3x3 Conv over 512 channels
Floats = NDArray[np.float64]


@dataclass
class Moments:
    """Sums over `count` vectors: `total` [groups, k], and `products` [groups, w, w] for each span of k.

    A layer whose second moments would not fit into memory has several spans: its correlations across them
    are taken as zero. Groups are those of a Conv, 1 for all else.
    """

    total: Floats
    products: list[NDArray[np.float32]]
    count: int = 0
    waiting: list[NDArray[np.floating]] = field(default_factory=list)

    @classmethod
    def empty(cls, groups: int, k: int, widest: int, unit: int = 2) -> Moments:
        """Nothing seen yet; spans are no wider than `widest` and `unit`, and begin at multiples of it."""
        spans = _spans(k, widest, unit)
        products = [np.zeros((groups, stop - start, stop - start), np.float32) for start, stop in spans]
        return cls(np.zeros((groups, k)), products)

    def add(self, rows: NDArray[np.floating]) -> None:
        """Take in vectors [groups, n, k]; they count from the next `flush` on, which comes by itself."""
        self.waiting.append(rows)
        if sum(part.nbytes for part in self.waiting) > _WAITING or len(self.waiting) >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Add up what waits: products of many vectors at once cost less."""
        if not self.waiting:
            return
        rows = np.concatenate(self.waiting, axis=1)
        self.waiting.clear()
        self.count += rows.shape[1]
        self.total += np.ones(rows.shape[1], np.float32) @ rows  # faster than a sum
        start = 0
        for product in self.products:
            part = rows[:, :, start : start + product.shape[1]]
            product += part.transpose(0, 2, 1) @ part
            start += product.shape[1]

    @property
    def mean(self) -> Floats:
        """E[x], [groups, k]."""
        return self.total / max(self.count, 1)

    def second(self, *, centred: bool = False) -> list[Floats]:
        """E[x x^T] [groups, w, w] of each span; `centred`, the covariance: what counts if biases are free."""
        found, start = [], 0
        for product in self.products:
            part = product.astype(np.float64) / max(self.count, 1)
            if centred:
                mean = self.mean[:, start : start + product.shape[1]]
                part -= mean[:, :, None] * mean[:, None, :]
            found.append(part)
            start += product.shape[1]
        return found

    def shrunk(self, *, centred: bool = False) -> list[Floats]:
        """As `second`, with correlations reduced by k / (k + count): few vectors tell little of them.

        Source: Ledoit and Wolf, A Well-Conditioned Estimator for Large-Dimensional Covariance Matrices,
        2004, here towards the diagonal and with the share that their estimate has for white noise.
        """
        found = self.second(centred=centred)
        for part in found:
            diagonal = np.einsum("gii->gi", part).copy()
            part *= self.count / (part.shape[1] + self.count)
            np.einsum("gii->gi", part)[:] = diagonal
        return found


def known_by(use: Use) -> str:
    """What the moments of a use are known by: its node, and the input unless it is the first weight."""
    return use.node if use.index < 2 else f"{use.node}[{use.index}]"


def gather(
    model: ModelProto, uses: Sequence[Use], batches: Batches, folder: Path, limit: int = 32
) -> dict[str, Moments]:
    """Moments of what meets the weight of every use in a prepared model, as `known_by` names it.

    Recurrent layers whose R is in use get a name for their output Y if it has none. The first `limit`
    usable samples count. Raises `DataError` if there is none.
    """
    view = View(model)
    nodes = {known_by(use): view.producers[use.node] for use in uses}
    shapes = {known_by(use): _shape(view, use, nodes[known_by(use)]) for use in uses}
    met = {known_by(use): _met(view, use, nodes[known_by(use)]) for use in uses}
    tensors = list(dict.fromkeys(met.values()))
    segments = write_segments(model, tensors, folder, "moments")
    activations = Activations(segments, tensors)
    for path in segments:
        path.unlink()
    widest = _widest(list(shapes.values()))
    found = {known_by(use): Moments.empty(*shapes[known_by(use)], widest, _unit(use)) for use in uses}
    readers: dict[str, list[Use]] = {}
    for use in uses:
        readers.setdefault(met[known_by(use)], []).append(use)
    clean = itertools.islice((sample for sample in samples(batches) if not unusable(sample)), limit)
    for ordinal, unit in enumerate(activations.units(clean)):
        for name, value in activations.run(unit):
            for use in readers[name]:
                key = known_by(use)
                count = min(_VECTORS, max(_FEWEST, shapes[key][1]))
                found[key].add(_vectors(view, use, nodes[key], value, count, ordinal))
        events.progress("moments", ordinal + 1, limit)
    for moments in found.values():
        moments.flush()
    if not any(moments.count for moments in found.values()):
        raise DataError("moments: no sample is free of NaN and Inf; mend the data")
    return found


def save(moments: dict[str, Moments], folder: Path) -> None:
    """Write `moments.npz` beside and rename it."""
    arrays: dict[str, Any] = {"facts": np.array(json.dumps([[k, m.count] for k, m in moments.items()]))}
    for number, entry in enumerate(moments.values()):
        arrays[f"{number}.total"] = entry.total
        arrays |= {f"{number}.{span}": product for span, product in enumerate(entry.products)}
    beside = folder / f"{MOMENTS}.partial"
    with beside.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / MOMENTS)


def load(folder: Path) -> dict[str, Moments]:
    """What `save` wrote; raises `DataError` if it is not there."""
    try:
        file = np.load(folder / MOMENTS)
    except OSError as error:
        raise DataError(f"{folder / MOMENTS} is missing or damaged; gather moments again") from error
    with file:
        facts = json.loads(str(file["facts"]))
        found = {}
        for number, (key, count) in enumerate(facts):
            spans = itertools.count()
            names = itertools.takewhile(file.files.__contains__, (f"{number}.{span}" for span in spans))
            found[key] = Moments(file[f"{number}.total"], [file[name] for name in names], count)
    return found


def _met(view: View, use: Use, node: NodeProto) -> str:
    """The tensor whose vectors meet the weight: the input, for R of a recurrent layer the output."""
    if not _recurs(use, node):
        return str(node.input[0])
    node.output[0] = node.output[0] or view.new_name(f"{use.node}_steps")
    return str(node.output[0])


def _recurs(use: Use, node: NodeProto) -> bool:
    return node.op_type in RECURRENT and use.index == 2


def _vectors(
    view: View, use: Use, node: NodeProto, value: NDArray[Any], count: int, ordinal: int
) -> NDArray[Any]:
    if _recurs(use, node):
        return states_of(node, value, count, ordinal)
    return rows_of(node, view.initializers[use.weight].dims[2:], value, count, ordinal)


def _shape(view: View, use: Use, node: NodeProto) -> tuple[int, int]:
    """Groups and length of the vectors that a use multiplies its weight with."""
    from compressor.quantization.view import attribute

    dims = view.initializers[use.weight].dims
    groups = int(attribute(node, "group", 1)) if node.op_type == "Conv" else 1
    groups = dims[0] if _recurs(use, node) else groups  # each direction has states of its own
    return groups, int(np.prod(dims)) // int(np.prod([dims[axis] for axis in use.channels]))


def _widest(shapes: Sequence[tuple[int, int]]) -> int:
    """The widest span with which all second moments fit into memory."""
    widest = _WIDEST
    while widest > 64 and 4 * sum(groups * k * min(k, widest) for groups, k in shapes) > _MEMORY:
        widest //= 2
    return widest


def _unit(use: Use) -> int:
    """How many inputs must not be parted: pairs, or two stretches of odd length, filled up to pairs."""
    return 2 * use.span if use.span % 2 else 2


def _spans(k: int, widest: int, unit: int) -> list[tuple[int, int]]:
    width = max(widest // unit, 1) * unit
    return [(start, min(start + width, k)) for start in range(0, k, width)]
