"""Even out the ranges of channels between neighbouring layers for 8 bits: ONNX in, ONNX out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import DataError, UsageError
from compressor.model import Model
from compressor.stages._outcome import unchanged, written

__all__ = ["FORM", "VERSION", "calibrate", "calibration", "run"]

VERSION = 1
FORM = "onnx"
METHODS = ("smooth", "weights")
_RANGES = "channels.npz"


def calibration(parameters: dict[str, Any]) -> str:
    """Smoothing looks at activations, equalization at weights alone."""
    return "none" if parameters.get("method") == "weights" else "required"


def calibrate(model: dict[str, Any], data: dict[str, Any], folder: str) -> dict[str, Any]:
    """The task: the largest magnitude of every channel that can be scaled; writes `channels.npz`.

    Returns how many `tensors` that are.
    """
    from compressor.data import stream
    from compressor.quantization import graph, scaling, smooth

    prepared = graph.prepare(Path(model["path"]))
    links = [] if graph.already_quantized(prepared) else scaling.links(prepared)
    batches = ((batch.indices, batch.inputs) for batch in stream(data))
    seen = smooth.observe(prepared, links, batches, Path(folder), data.get("n")) if links else {}
    beside = Path(folder, f"{_RANGES}.partial")
    with beside.open("wb") as file:
        names = list(seen)
        np.savez(file, np.array(names), *seen.values())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(Path(folder, _RANGES))
    return {"tensors": len(seen)}


def run(
    model: dict[str, Any],
    folder: str,
    method: str = "smooth",
    alpha: float = 0.5,
    ranges: str | None = None,
) -> dict[str, Any]:
    """The task: an ONNX model that computes the same with channels of more even range.

    `method` smooth takes what `calibrate` left in the folder `ranges` and moves `alpha` (0 to 1) of the
    difference between channels from activations to weights; weights equalizes neighbouring layers' weights.
    The facts that are given back hold `method` and how many `links` were scaled.
    """
    from compressor.quantization import equalize, graph, smooth

    source = Model.of(model)
    if method not in METHODS:
        raise UsageError(f"equalize: method '{method}' is unknown; known are {', '.join(METHODS)}")
    if not 0 <= alpha <= 1:
        raise UsageError(f"equalize: alpha {alpha:g} is not a share; give 0 to 1")
    prepared = graph.prepare(source.path)
    facts: dict[str, Any] = {"method": method}
    if graph.already_quantized(prepared):
        return unchanged(source, folder, facts, "already quantized: the model holds quantization operators")
    if method == "smooth":
        count = smooth.smooth(prepared, _load(ranges), alpha)
    else:
        count = equalize.equalize(prepared)
    return written(source, folder, prepared, {**facts, "links": count})


def _load(ranges: str | None) -> dict[str, Any]:
    try:
        with np.load(Path(ranges or "", _RANGES)) as file:
            names = file["arr_0"].tolist()
            return {name: file[f"arr_{place}"] for place, name in enumerate(names, 1)}
    except OSError as error:
        raise DataError("equalize: smoothing needs ranges of channels; gather them first") from error
