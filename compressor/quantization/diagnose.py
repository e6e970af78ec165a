"""Where a quantized graph loses accuracy: signal-to-noise of every layer against the float graph, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compressor import events
from compressor.errors import DataError
from compressor.quantization.activations import (
    Activations,
    Array,
    Batches,
    Sample,
    usable,
)
from compressor.quantization.causes import LayerCauses, layer_causes
from compressor.quantization.observers.statistics import LIMIT
from compressor.quantization.scheme import SCHEMES, Scheme
from compressor.quantization.segments import write_segments
from compressor.quantization.view import View

__all__ = ["COMPUTE", "compare", "diagnose", "sqnr"]

COMPUTE = (
    "Conv",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "Einsum",
    "LSTM",
    "GRU",
    "RNN",
    "Attention",
)
_CAP = 200.0  # dB; what stands for equal, and for nothing but noise


def diagnose(
    model: dict[str, Any], quantized: dict[str, Any], data: dict[str, Any], folder: str, samples: int = 32
) -> dict[str, Any]:
    """The task: SQNR of each compute layer's output over the first usable `samples` samples.

    Returns `layers`, a list in the graph's order of `name` and `op` of the node, `tensor` (its first
    output that has a name), `sqnr_db`, `own_sqnr_db` (of this layer alone, with float inputs) and `split`
    (the shares of that error's causes, see `causes`; both None for what is not a Conv, Gemm or MatMul with
    constant weights), and `samples`. The quantized graph runs with all optimizations off, as a float
    simulation of its Q/DQ pairs. Errors add up along the graph: a layer is to blame where the figure
    falls, not where it is low.
    """
    import onnx

    from compressor.data import stream
    from compressor.quantization import graph

    batches = ((batch.indices, batch.inputs) for batch in stream(data))
    prepared = graph.prepare(Path(model["path"]))
    name = (quantized.get("facts") or {}).get("scheme")
    scheme = SCHEMES.get(name) if name else None
    return compare(prepared, onnx.load(quantized["path"]), batches, Path(folder), samples, scheme)


def compare(
    reference: Any,
    quantized: Any,
    batches: Batches,
    folder: Path,
    limit: int = 32,
    scheme: Scheme | None = None,
) -> dict[str, Any]:
    """As `diagnose`, for two `onnx.ModelProto`s whose nodes and tensors bear the same names."""
    made = {name for node in quantized.graph.node for name in node.output}
    layers = [node for node in reference.graph.node if node.op_type in COMPUTE and View.key(node) in made]
    tensors = [View.key(node) for node in layers]
    causes = layer_causes(reference, quantized, scheme)
    inputs = dict.fromkeys(cause.node.input[0] for cause in causes.values())
    pair = []
    for name, model, wanted in (
        ("float", reference, list(dict.fromkeys([*tensors, *inputs]))),
        ("quantized", quantized, tensors),
    ):
        segments = write_segments(model, wanted, folder, f"diagnose-{name}")
        pair.append(Activations(segments, wanted, exact=name == "quantized"))
        for path in folder.glob(f"diagnose-{name}-*"):
            path.unlink()
    sums = {tensor: np.zeros(2) for tensor in tensors}
    count = _accumulate(pair[0], pair[1], usable(batches, limit), sums, causes, limit)
    if not count:
        raise DataError("diagnosis: no sample is free of NaN and Inf; mend the data")
    return {
        "samples": count,
        "layers": [
            {
                "name": node.name,
                "op": node.op_type,
                "tensor": tensor,
                "sqnr_db": sqnr(*sums[tensor]),
                **_own(causes.get(tensor)),
            }
            for node, tensor in zip(layers, tensors, strict=True)
        ],
    }


def _own(causes: LayerCauses | None) -> dict[str, Any]:
    split = None if causes is None else causes.split()
    if causes is None or split is None:
        return {"own_sqnr_db": None, "split": None}
    return {"own_sqnr_db": sqnr(causes.signal, causes.noise), "split": split}


def sqnr(signal: float, noise: float) -> float:
    """10 log10(signal / noise) for sums of squares, within ±200 dB; 0 noise is 200, 0 signal alone -200."""
    if noise <= 0:
        return _CAP
    if signal <= 0:
        return -_CAP
    return max(-_CAP, min(_CAP, 10 * (math.log10(signal) - math.log10(noise))))


def _accumulate(
    reference: Activations,
    other: Activations,
    found: Iterator[Sample],
    sums: dict[str, Array],
    causes: dict[str, LayerCauses],
    total: int,
) -> int:
    """Add up squares of signal and noise; one layer's pair of tensors is compared at a time."""
    count = 0
    for count, unit in enumerate(reference.units(found), 1):
        seen = _watched(reference.run(unit), sums, causes, count)
        for tensor, wanted, got in _paired(seen, other.run(unit)):
            sums[tensor] += _squares(wanted, got)
        events.progress("diagnosis", count, total)
    return count


def _watched(
    found: Iterator[tuple[str, Array]], sums: dict[str, Array], causes: dict[str, LayerCauses], ordinal: int
) -> Iterator[tuple[str, Array]]:
    """Pass the outputs of layers on; show the inputs of layers to their causes."""
    for name, value in found:
        for layer in causes.values():
            if layer.node.input[0] == name:
                layer.add(value, ordinal)
        if name in sums:
            yield name, value


def _paired(
    wanted: Iterator[tuple[str, Array]], got: Iterator[tuple[str, Array]]
) -> Iterator[tuple[str, Array, Array]]:
    """Meet tensors of one name; the two graphs may make them in slightly different orders."""
    waiting: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
    for both in zip(wanted, got, strict=True):
        for side, (name, value) in enumerate(both):
            waiting[side][name] = value
        for name in {both[0][0], both[1][0]}:
            if name in waiting[0] and name in waiting[1]:
                yield name, waiting[0].pop(name), waiting[1].pop(name)


def _squares(wanted: Array, got: Array) -> Array:
    """Sums of squares of the signal and of the noise, over the elements that both hold finite."""
    wanted, got = wanted.reshape(-1), got.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        noise = wanted - got
        sums = np.array([wanted @ wanted, noise @ noise], np.float64)
    if np.isfinite(sums).all():
        return sums
    both = (np.abs(wanted) < LIMIT) & (np.abs(got) < LIMIT)
    signal, noise = wanted[both].astype(np.float64), noise[both].astype(np.float64)
    return np.array([signal @ signal, noise @ noise])
