"""How an int8 file for x86 does on the other kind of processor: with VNNI, or without it.

Kernels without VNNI add two products of uint8 and int8 in saturating int16 (see `pairs`). That no pair of a
file's weights can overflow is a property of the weights, and is proven here; where pairs can, the loss is
measured: the network runs sample by sample with float kernels, and behind every layer what its pairs lose is
taken away, computed exactly from the codes that it reads. So errors add up as they would on the processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor import events
from compressor.errors import DataError
from compressor.metrics import Agreement
from compressor.quantization.activations import Activations, Array, Batches, Sample, usable
from compressor.quantization.causes import LayerCauses, layer_causes
from compressor.quantization.lint.graph import QuantizedGraph
from compressor.quantization.patches import places_of, rows_of
from compressor.quantization.scheme import SCHEMES, Scheme
from compressor.quantization.segments import write_segments
from compressor.quantization.view import tensor_types

if TYPE_CHECKING:
    from onnx import ModelProto

    from compressor.quantization.corrections import Corrections

__all__ = ["pair_cost", "portability", "portable", "simulate"]

_EVERY = 1 << 62  # positions of an output


def portable(
    model: dict[str, Any],
    quantized: dict[str, Any],
    data: dict[str, Any],
    folder: str,
    kernels: str,
    moments: str | None = None,
    samples: int = 16,
) -> dict[str, Any]:
    """The task: what `quantized`, made of the float `model`, would do without VNNI, or costs for it.

    `kernels` names the pair-safe scheme of the runtime that the engine is for: its kernels form the pairs,
    whichever scheme the file was made by. Returns `scheme` (the file's), `without` (`kernels`: what
    processors without VNNI want), `layers` (how many of them
    could overflow) `of` (how many have pairs), and `proven`: none can, so that the file gives the same on
    both. If so, and the file was made under the limit, `cost_db` and `worst_db` are the mean and the largest
    rise of a layer's weight error that comes from it (see `pair_cost`; `moments` is the folder of that
    task). If not, `measured` is what `simulate` finds over `samples` samples.
    """
    import onnx

    from compressor.data import stream
    from compressor.quantization import corrections, graph
    from compressor.quantization import moments as gathering

    facts, prepared = quantized["facts"], graph.prepare(Path(model["path"]))
    scheme = SCHEMES[facts["scheme"]]
    limited = _pairing(SCHEMES[kernels], scheme)
    made = onnx.load(quantized["path"])
    found = portability(prepared, made, limited)
    answer: dict[str, Any] = {"scheme": scheme.name, "without": limited.name, **found, "measured": None}
    if found["proven"] and scheme.pair_limit:
        known = gathering.load(Path(moments)) if moments else {}
        chosen = corrections.Corrections(
            facts["weights"], facts["rounding"], facts["bias_correction"] is not None, known
        )
        answer |= pair_cost(prepared, made, scheme, chosen)
    if found["layers"]:
        batches = ((batch.indices, batch.inputs) for batch in stream(data))
        answer["measured"] = simulate(prepared, made, batches, Path(folder), limited, samples)
    return answer


def _pairing(kernels: Scheme, made: Scheme) -> Scheme:
    """How a runtime's kernels pair the weights of a file: only a scheme that widens layers has wide ones."""
    return replace(kernels, channels=min(kernels.channels, made.channels))


def portability(reference: ModelProto, quantized: ModelProto, scheme: Scheme) -> dict[str, Any]:
    """`layers` whose pairs could overflow for some input, `of` how many, and whether it is `proven` of none.

    `scheme` says how the kernels form pairs.
    """
    causes = layer_causes(reference, quantized, scheme)
    known = {cause.node.name for cause in causes.values()}
    graph = QuantizedGraph(quantized)
    integer = [
        node.name for node, data, weight in graph.weighted() if data is not None and weight is not None
    ]
    unsafe = sum(cause.overflows is not None for cause in causes.values())
    return {"layers": unsafe, "of": len(integer), "proven": not unsafe and set(integer) <= known}


def pair_cost(
    reference: ModelProto, quantized: ModelProto, scheme: Scheme, corrections: Corrections
) -> dict[str, float]:
    """By how much the pair limit raises the error that rounded weights bring into a layer's output.

    Against the same weights rounded the same way without the limit, in dB: `cost_db` is the mean over the
    layers with pairs, `worst_db` the largest. Errors are weighted by the second moments of the layer's input
    where `corrections` knows them.
    """
    from compressor.quantization.layers import weight_uses
    from compressor.quantization.rounding import losses
    from compressor.quantization.view import View

    view, graph = View(reference), QuantizedGraph(quantized)
    twins = {node.name: node for node in graph.nodes()}
    rises = []
    for use in weight_uses(view, scheme):
        twin = twins.get(view.producers[use.node].name)
        coded = None if twin is None or not use.paired else graph.real(twin.input[use.index])
        weight = view.array(use.weight)
        if coded is None or weight is None or (coded.T if use.transposed else coded).shape != weight.shape:
            continue
        exact, limited = (
            part.transpose(use.order).reshape(weight.shape[use.channels[0]], -1).astype(np.float64)
            for part in (weight, coded.T if use.transposed else coded)
        )
        second = corrections.second([use]) or [np.eye(exact.shape[1])[None]]
        codes, scale = corrections.quantizer([use])(exact, np.full(len(exact), 2.0**-60), None)
        free = losses(exact - codes * scale[:, None].astype(np.float64), second).sum()
        if free > 0:
            rises.append(10 * np.log10(max(losses(exact - limited, second).sum(), 1e-300) / free))
    if not rises:
        return {}
    return {"cost_db": float(np.mean(rises)), "worst_db": float(np.max(rises))}


def simulate(
    reference: ModelProto,
    quantized: ModelProto,
    batches: Batches,
    folder: Path,
    scheme: Scheme,
    limit: int,
) -> dict[str, Any]:
    """The network with saturating pairs over the first `limit` usable samples.

    Returns `samples`; `sqnr_db` of all float outputs against the float graph as quantized, and
    `saturated_sqnr_db` with the losses; `top1` and `saturated_top1`, the share of samples whose class is
    that of the float graph (None without class scores; both as `metrics.Agreement` has them); `outputs`,
    the share of the values of layers with overflowing pairs that are wrong. Raises `DataError` without a
    usable sample.
    """
    causes = layer_causes(reference, quantized, scheme)
    losing = {key: cause for key, cause in causes.items() if cause.overflows is not None}
    outputs = [item.name for item in reference.graph.output]
    network = _Network.of(quantized, losing, folder)
    floats, plain = (_session(model, outputs, folder) for model in (reference, quantized))
    saturated, rounded, count = Agreement(), Agreement(), 0
    for unit in floats.units(usable(batches, limit)):
        wanted = dict(floats.run(unit))
        rounded.update(wanted, dict(plain.run(unit)))
        saturated.update(wanted, network.run(unit, outputs))
        count += 1
        events.progress("without VNNI", count, limit)
    if not count:
        raise DataError("portability: no sample is free of NaN and Inf; mend the data")
    without, exact = saturated.result(), rounded.result()
    return {
        "samples": count,
        "sqnr_db": exact["sqnr_db"],
        "saturated_sqnr_db": without["sqnr_db"],
        "top1": exact["top1"],
        "saturated_top1": without["top1"],
        "outputs": network.wrong / max(network.seen, 1),
    }


def _session(model: ModelProto, outputs: list[str], folder: Path) -> Activations:
    paths = write_segments(model, outputs, folder, "portable")
    try:
        return Activations(paths, outputs, exact=True)
    finally:
        for path in paths:
            path.unlink()


@dataclass
class _Network:
    """The quantized graph with an input behind every losing layer, for what its pairs lose.

    `inputs` maps these to the layers. The graph is cut behind what such a layer reads, so that its losses
    are known before it runs.
    """

    activations: Activations
    inputs: dict[str, LayerCauses]
    reads: dict[str, str]
    values: dict[str, Array] = field(default_factory=dict)
    seen: int = 0
    wrong: int = 0

    @classmethod
    def of(cls, quantized: ModelProto, losing: Mapping[str, LayerCauses], folder: Path) -> _Network:
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(quantized)
        types = tensor_types(model)
        nodes, inputs, reads = [], {}, {}
        twins = {cause.node.name: cause for cause in losing.values()}
        for node in model.graph.node:
            nodes.append(node)
            if node.name not in twins:
                continue
            name = node.output[0]
            exact, lost = f"{name}__exact", f"{name}__lost"
            node.output[0] = exact
            nodes.append(onnx.helper.make_node("Add", [exact, lost], [name], name=lost))
            model.graph.input.append(onnx.helper.make_tensor_value_info(lost, *types.get(name, (1, None))))
            inputs[lost], reads[lost] = twins[node.name], node.input[0]
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del model.graph.node[:]
        model.graph.node.extend(copies)
        wanted = [*dict.fromkeys(reads.values()), *(item.name for item in model.graph.output)]
        paths = write_segments(model, wanted, folder, "saturated", 1)
        try:
            return cls(Activations(paths, wanted, exact=True), inputs, reads)
        finally:
            for path in paths:
                path.unlink()

    def run(self, unit: Sample, outputs: list[str]) -> dict[str, Array]:
        """The outputs for one unit of samples."""
        self.values = {}
        for name, value in self.activations.run(unit, self._lost):
            self.values[name] = value
        return {name: self.values[name] for name in outputs}

    def _lost(self, name: str) -> Array:
        """What the pairs of a layer lose on the input that was just computed, in the layout of its output."""
        cause, value = self.inputs[name], self.values[self.reads[name]]
        rows = rows_of(cause.node, cause.kernel, value, _EVERY, 0).astype(np.float32)
        lost = np.concatenate(list(_parts(cause, rows)))
        self.seen += lost.size
        self.wrong += int(np.count_nonzero(lost))
        shape = places_of(cause.node, cause.kernel, value.shape)
        lost = lost.reshape(*shape, -1)
        return np.ascontiguousarray(np.moveaxis(lost, -1, 1) if cause.node.op_type == "Conv" else lost)


def _parts(cause: LayerCauses, rows: Array, most: int = 4096) -> Iterator[Array]:
    """The losses of vectors [groups, n, k], some at a time."""
    for start in range(0, rows.shape[1], most):
        yield cause.lost(rows[:, start : start + most])
