"""Why a layer's output is wrong: its own error, split by cause.

Each layer is looked at alone: it gets the float graph's input, so errors of layers before it do not count.
Its integers are then brought in one after the other, and each step's change of the output is that cause's
error; together they are the layer's whole error, exactly:

- clipping: values of the input, then of the output, that lie outside the range of their codes;
- activation rounding: rounding to codes, of the input, then of the output;
- weight rounding: the weights' codes (after all corrections) against the float weights;
- saturation: pairs of products cut at 16 bits by x86 kernels without VNNI (VPMADDUBSW), emulated here;
- bias: what rounding moves all positions of a channel by: the mean, over the samples, of the summed errors
  of activation, weight and bias rounding, which a corrected bias removes, and what else the bias's own
  rounding does. Activation and weight rounding are counted without their means.

Shares are those of the summed powers, so they add up to 1;
errors that compensate each other are counted in full. Positions of a Conv's output are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.layers import Use, clip_bounds, weight_uses
from compressor.quantization.lint.graph import Parameters, QuantizedGraph
from compressor.quantization.patches import rows_of
from compressor.quantization.scheme import SCHEMES, Scheme
from compressor.quantization.view import View, attribute

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["CAUSES", "LayerCauses", "layer_causes"]

CAUSES = ("clipping", "activation_rounding", "weight_rounding", "saturation", "bias")
_STEPS = (
    "clipping", "activation_rounding", "weight_rounding", "bias", "saturation", "clipping",
    "activation_rounding",
)  # fmt: skip
_POSITIONS = 32  # of a sample
_LIMITS = {2: (0, 255), 3: (-128, 127), 4: (0, 65535), 5: (-32768, 32767)}
_INT16 = 2**15
_SAFE = 2**15 // 255  # two weights of one sign that sum to no more cannot overflow
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Codes:
    """The codes of an activation: one scale and zero point."""

    scale: float
    zero: float
    least: int
    most: int

    @classmethod
    def of(cls, given: Parameters) -> _Codes | None:
        """None for what is not one scale and zero point of 8 or 16 bits."""
        if given.scale is None or given.zero is None or given.kind not in _LIMITS:
            return None
        if len(np.unique(given.scale)) != 1 or len(np.unique(given.zero)) != 1:
            return None
        return cls(float(given.scale.flat[0]), float(given.zero.flat[0]), *_LIMITS[given.kind])

    def clipped(self, value: Floats) -> Floats:
        low, high = (self.least - self.zero) * self.scale, (self.most - self.zero) * self.scale
        return np.asarray(np.clip(value, low, high), np.float32)

    def codes(self, value: Floats) -> Floats:
        real = np.rint(value / np.float32(self.scale)) + np.float32(self.zero)
        return np.asarray(np.clip(real, self.least, self.most), np.float32)

    def rounded(self, value: Floats) -> Floats:
        return np.asarray((self.codes(value) - self.zero) * self.scale, np.float32)


@dataclass(frozen=True)
class _Overflows:
    """Codes of weights [groups, channels, k], what one is worth [channels], pairs that can overflow."""

    codes: Floats
    step: Floats
    starts: NDArray[np.intp]


@dataclass
class LayerCauses:
    """Sums over the positions of one layer's output, each step's error in a row.

    `weights` are rows [groups, channels, k], in float and as their codes stand for.
    """

    node: NodeProto
    kernel: tuple[int, ...]
    weights: tuple[Floats, Floats]
    biases: tuple[Floats, Floats]
    before: _Codes | None
    after: _Codes | None
    bounds: tuple[float, float]
    overflows: _Overflows | None
    count: int = 0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    signal: float = 0.0
    noise: float = 0.0

    def add(self, value: NDArray[Any], ordinal: int) -> None:
        """Take in the float graph's input of the layer, the `ordinal`-th sample."""
        rows = rows_of(self.node, self.kernel, value, _POSITIONS, ordinal).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            outputs = [output.astype(np.float64) for output in self.outputs(rows)]
            errors = np.stack([later - sooner for sooner, later in pairwise(outputs)])
            self.count += errors.shape[1]
            self.sums = errors.sum(axis=1) + (self.sums if self.sums.size else 0)
            self.squares = np.square(errors).sum(axis=1) + (self.squares if self.squares.size else 0)
            self.signal += float(np.square(outputs[0]).sum())
            self.noise += float(np.square(outputs[-1] - outputs[0]).sum())

    def outputs(self, rows: Floats) -> list[Floats]:
        """The output [n, channels] for input vectors [groups, n, k], in float and after each of the steps."""
        inside = rows if self.before is None else self.before.clipped(rows)
        coded = inside if self.before is None else self.before.rounded(inside)
        (float_weight, weight), (float_bias, bias) = self.weights, self.biases
        sums = [_product(rows, float_weight), _product(inside, float_weight), _product(coded, float_weight)]
        sums = [total + float_bias for total in (*sums, _product(coded, weight))]
        sums.append(sums[-1] + (bias - float_bias))
        sums.append(sums[-1] + self.lost(rows) if self.overflows is not None else sums[-1])
        found = [np.asarray(np.clip(total, *self.bounds), np.float32) for total in sums]
        found.append(found[-1] if self.after is None else self.after.clipped(found[-1]))
        found.append(found[-1] if self.after is None else self.after.rounded(found[-1]))
        return found

    def lost(self, rows: Floats) -> Floats:
        """What saturation takes away (adds, where sums are negative), [n, channels], for input vectors."""
        assert self.overflows is not None
        assert self.before is not None
        lost = [
            _saturation(self.before.codes(part), weight, self.overflows.starts)
            for part, weight in zip(rows, self.overflows.codes, strict=True)
        ]
        return np.asarray(np.concatenate(lost, axis=1) * self.overflows.step, np.float32)

    def powers(self) -> dict[str, float] | None:
        """The summed power of each cause's error; None if nothing finite was seen."""
        if not self.count or not np.isfinite([self.noise, self.signal]).all():
            return None
        rounding = np.array([step not in ("clipping", "saturation") for step in _STEPS])
        means = np.square(self.sums) / self.count * rounding[:, None]
        found = dict.fromkeys(CAUSES, 0.0)
        for cause, power in zip(_STEPS, np.maximum(self.squares - means, 0).sum(axis=1), strict=True):
            found[cause] += float(power)
        found["bias"] += float(np.square(self.sums[rounding].sum(axis=0)).sum() / self.count)
        return found

    def split(self) -> dict[str, float] | None:
        """The share of each cause; all 0 where there is no error."""
        powers = self.powers()
        if powers is None:
            return None
        total = sum(powers.values())
        return {cause: power / total if total > 0 else 0.0 for cause, power in powers.items()}


def layer_causes(
    reference: ModelProto, quantized: ModelProto, scheme: Scheme | None = None
) -> dict[str, LayerCauses]:
    """By output tensor: Conv, Gemm and MatMul with constant weights that are in both graphs, by node name.

    `scheme` is the one that the graph was quantized for; without it, nothing saturates.
    """
    view, graph = View(reference), QuantizedGraph(quantized)
    twins = {node.name: node for node in graph.nodes()}
    found = {}
    for use in weight_uses(view, scheme or SCHEMES["ort-x86-vnni"]):
        node = view.producers[use.node]
        twin = twins.get(node.name)
        if twin is not None and twin.op_type == node.op_type and _plain(node):
            made = _layer(view, graph, use, twin, scheme)
            if made is not None:
                found[use.node] = made
    return found


def _plain(node: NodeProto) -> bool:
    return node.op_type != "Gemm" or bool(attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1)


def _layer(
    view: View, graph: QuantizedGraph, use: Use, twin: NodeProto, scheme: Scheme | None
) -> LayerCauses | None:
    node, weight = view.producers[use.node], view.array(use.weight)
    coded = graph.real(twin.input[use.index])
    if weight is None or coded is None:
        return None
    coded = coded.T if use.transposed else coded
    groups = int(attribute(node, "group", 1)) if node.op_type == "Conv" else 1
    biases = [
        _bias(view.array(use.bias) if use.bias else None),
        _bias(graph.real(twin.input[2]) if use.bias else None),
    ]
    if coded.shape != weight.shape or any(bias is None for bias in biases):
        return None
    before = graph.dequantizer(twin.input[0])
    after, bounds = _output(graph, twin)
    codes = None if before is None else _Codes.of(graph.parameters(before))
    return LayerCauses(
        node,
        tuple(weight.shape[2:]),
        (_rows(weight, use, groups), _rows(coded, use, groups)),
        (biases[0], biases[1]),  # type: ignore[arg-type]
        codes,
        after,
        bounds,
        _overflows(graph, use, twin, groups, codes) if scheme is not None else None,
    )


def _bias(value: NDArray[Any] | None) -> Floats | None:
    row = np.zeros(1) if value is None else value
    return np.asarray(row, np.float32) if row.ndim == 1 else None


def _rows(weight: NDArray[Any], use: Use, groups: int) -> Floats:
    rows = weight.transpose(use.order).astype(np.float32)
    return np.ascontiguousarray(rows.reshape(groups, len(rows) // groups, -1))


def _output(graph: QuantizedGraph, node: NodeProto) -> tuple[_Codes | None, tuple[float, float]]:
    """The codes that a layer writes, if it writes only codes, and the bounds of a Relu or Clip before."""
    name, bounds = str(node.output[0]), (-np.inf, np.inf)
    reader = graph.only_reader(name)
    if reader is not None and (absorbed := clip_bounds(graph, reader)) is not None:
        name, bounds = str(reader.output[0]), absorbed
    if not graph.read_by_quantizers_only(name):
        return None, (-np.inf, np.inf)
    return _Codes.of(graph.parameters(graph.readers(name)[0])), bounds


def _overflows(
    graph: QuantizedGraph, use: Use, twin: NodeProto, groups: int, before: _Codes | None
) -> _Overflows | None:
    """Where the pairs of a layer can saturate; None where none can."""
    weight = graph.weight_dequantizer(twin)
    codes = None if weight is None else graph.codes(weight)
    if not use.paired or before is None or before.least != 0 or codes is None or codes.dtype != np.int8:
        return None
    assert weight is not None
    scale = graph.parameters(weight).scale
    if scale is None:
        return None
    turned = use.transposed and graph.dequantizer(twin.input[use.index]) is not None
    rows = _rows(codes.T if turned else codes, use, groups)
    starts = _pair_starts(rows.shape[-1], use.span)
    sums = np.abs(rows[..., starts] + rows[..., starts + 1]).max(axis=(0, 1), initial=0)
    starts = starts[sums > _SAFE] if rows.size else starts[:0]
    step = np.asarray(scale.reshape(-1) * before.scale, np.float32)
    return _Overflows(rows, step, starts) if len(starts) else None


def _pair_starts(width: int, span: int) -> NDArray[np.intp]:
    """Where pairs begin in a row; those of a span do not run on into the next."""
    span = span or width
    first = np.arange(0, span - 1, 2)
    return np.asarray(
        (np.arange(0, width, span)[:, None] + first).reshape(-1) if width else first[:0], np.intp
    )


def _product(rows: Floats, weights: Floats) -> Floats:
    """[groups, n, k] times [groups, channels, k] as [n, groups x channels]."""
    sums = np.matmul(rows, weights.transpose(0, 2, 1))
    return np.asarray(np.concatenate(list(sums), axis=1))


def _saturation(codes: Floats, weights: Floats, starts: NDArray[np.intp]) -> Floats:
    """Sum over pairs of what int16 cuts off, [n, channels], for codes [n, k] and weights [channels, k]."""
    lost = np.zeros((len(codes), len(weights)), np.float32)
    for place in starts:
        channels = np.nonzero(np.abs(weights[:, place] + weights[:, place + 1]) > _SAFE)[0]
        pair = codes[:, place : place + 2] @ weights[channels, place : place + 2].T
        lost[:, channels] += np.clip(pair, -_INT16, _INT16 - 1) - pair
    return lost
