"""How much of the network's output error each weight and each activation brings in, quantized alone.

The float graph and its Q/DQ form are merged into a graph of switches (`switched`), so none of them costs a
compilation of its own, and the error of one does not hide behind that of another. The samples are so many
that all of it takes about two passes over the calibration data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.errors import DataError
from compressor.quantization.switched import SWITCHES, merge
from compressor.store import digest, write_json

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["Simulator", "sensitivity"]

Array = NDArray[Any]
_PASSES = 2
_LEAST, _MOST = 4, 32  # samples
_EVERY = 20  # tensors between two checkpoints
_WORST = 1e6  # what stands for an error without bounds
_INLINE = 1 << 30  # bytes of a graph that fit into one file


def sensitivity(
    model: dict[str, Any], quantized: dict[str, Any], data: dict[str, Any], folder: str
) -> dict[str, Any]:
    """The task: the relative error that each quantized tensor alone adds to the network's outputs.

    Returns {"weights": {node: error, that of its bias included}, "activations": {tensor: error},
    "together": error of everything quantized, "samples"}. An error is the noise power over the signal
    power, averaged over the float outputs. Raises `DataError` if no sample is usable.
    """
    import onnx

    from compressor.quantization import graph

    prepared = graph.prepare(Path(model["path"]))
    simulator = Simulator(prepared, onnx.load(quantized["path"]))
    groups = _groups(simulator)
    simulator.batches = _batches(data, _PASSES * data.get("n", _MOST) // (len(groups) + 1))
    key = digest(model["sha256"], quantized["sha256"], simulator.samples)
    errors = _measured(simulator, groups, Path(folder, "sensitivity.json"), key)
    return {
        "weights": {name: errors[kind, name] for kind, name in groups if kind == "weight"},
        "activations": {name: errors[kind, name] for kind, name in groups if kind == "activation"},
        "together": simulator.error(range(len(simulator.edges))),
        "samples": simulator.samples,
    }


def _groups(simulator: Simulator) -> dict[tuple[str, str], list[int]]:
    """What is switched together: all that a node reads of constants, and all readings of an activation."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place, edge in enumerate(simulator.edges):
        constant = edge.tensor in simulator.constants
        key = ("weight", edge.reader) if constant else ("activation", edge.tensor)
        groups.setdefault(key, []).append(place)
    return groups


def _batches(data: dict[str, Any], wanted: int) -> list[dict[str, Array]]:
    """The inputs of about `wanted` finite samples, within bounds."""
    from compressor.data import stream

    count = max(_LEAST, min(_MOST, wanted))
    found, seen = [], 0
    for batch in stream({**data, "batch": min(count, int(data["batch"]))}):
        if all(np.isfinite(array).all() for array in batch.inputs.values() if array.dtype.kind == "f"):
            found.append(dict(batch.inputs))
            seen += len(batch.indices)
        if seen >= count:
            break
    if not found:
        raise DataError("sensitivity: no sample is free of NaN and Inf; mend the data")
    return found


class Simulator:
    """The error of the network's outputs for any choice of what is quantized, on fixed samples."""

    def __init__(self, prepared: ModelProto, quantized: ModelProto) -> None:
        merged, self.edges = merge(prepared, quantized)
        self.constants = {item.name for item in merged.graph.initializer}
        self._session = _open(merged)
        self._batches: list[dict[str, Array]] = []
        self._reference: list[list[Array]] = []
        self.samples = 0

    @property
    def batches(self) -> list[dict[str, Array]]:
        """The inputs on which errors are measured; set them before the first measurement."""
        return self._batches

    @batches.setter
    def batches(self, batches: Sequence[dict[str, Array]]) -> None:
        self._batches = list(batches)
        self.samples = sum(len(next(iter(batch.values()))) for batch in batches)
        self._reference = [self._run(batch, ()) for batch in batches]

    def error(self, on: Iterable[int]) -> float:
        """Noise power over signal power with the edges `on` quantized, averaged over the float outputs."""
        edges = list(on)
        noise = np.zeros(len(self._reference[0]))
        signal = np.zeros_like(noise)
        for batch, wanted in zip(self._batches, self._reference, strict=True):
            for place, (expected, got) in enumerate(zip(wanted, self._run(batch, edges), strict=True)):
                difference = np.where(np.isfinite(expected), got - expected, 0.0)
                known = np.where(np.isfinite(expected), expected, 0.0)
                noise[place] += np.square(difference).sum()
                signal[place] += np.square(known).sum()
        some = signal > 0
        found = np.nan_to_num(noise[some] / signal[some], nan=_WORST, posinf=_WORST)
        return float(np.minimum(found, _WORST).mean()) if some.any() else 0.0

    def _run(self, batch: Mapping[str, Array], on: Sequence[int]) -> list[Array]:
        switches = np.zeros(max(1, len(self.edges)), bool)
        switches[list(on)] = True
        outputs = self._session.run(None, {**batch, SWITCHES: switches})
        return [array.astype(np.float64) for array in outputs if array.dtype.kind == "f"]


def _open(model: ModelProto) -> Any:
    """A session that keeps the simulated pairs as they are written."""
    import tempfile

    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "switched.onnx")
        onnx.save_model(model, path, save_as_external_data=model.ByteSize() > _INLINE, location="weights")
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _measured(
    simulator: Simulator, groups: Mapping[tuple[str, str], Sequence[int]], checkpoint: Path, key: str
) -> dict[tuple[str, str], float]:
    """Each group's error; what an earlier call with this `key` left in `checkpoint` is kept."""
    known = _known(checkpoint, key)
    for done, (group, edges) in enumerate(groups.items()):
        if group not in known:
            known[group] = simulator.error(edges)
        if done % _EVERY == _EVERY - 1:
            write_json(checkpoint, {"key": key, "errors": [[*name, error] for name, error in known.items()]})
        events.progress("sensitivity", done + 1, len(groups))
    checkpoint.unlink(missing_ok=True)
    return known


def _known(checkpoint: Path, key: str) -> dict[tuple[str, str], float]:
    try:
        left = json.loads(checkpoint.read_text())
    except (OSError, ValueError):
        return {}
    return {(kind, name): error for kind, name, error in left["errors"]} if left.get("key") == key else {}
