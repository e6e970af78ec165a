"""Even out the ranges of channels between neighbouring layers for 8 bits: ONNX in, ONNX out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import DataError, UsageError
from compressor.model import Model
from compressor.stages._outcome import unchanged, written

if TYPE_CHECKING:
    from onnx import ModelProto

    from compressor.quantization.scaling import Link

__all__ = ["FORM", "VERSION", "calibrate", "calibration", "run"]

VERSION = 2
FORM = "onnx"
METHODS = ("smooth", "weights")
WHERE = ("rows", "all")
_ALPHA = 0.5  # the paper's, for links whose loss is not measured
_RANGES = "channels.npz"


def calibration(parameters: dict[str, Any]) -> str:
    """Smoothing looks at activations, equalization at weights alone."""
    return "none" if parameters.get("method") == "weights" else "required"


def calibrate(
    model: dict[str, Any],
    data: dict[str, Any],
    folder: str,
    scheme: str | None = None,
    where: str = "all",
    alpha: float | None = None,
) -> dict[str, Any]:
    """The task: choose a factor for every channel that can be scaled; writes `channels.npz`.

    Returns how many `tensors` have factors, and the `alpha` of each. Parameters are those of `run`.
    """
    from compressor.data import stream
    from compressor.quantization import graph, smooth
    from compressor.quantization.scheme import named
    from compressor.quantization.view import View

    _check(where, alpha)
    prepared = graph.prepare(Path(model["path"]))
    links = [] if graph.already_quantized(prepared) else _links(prepared, scheme, where)
    batches = ((batch.indices, batch.inputs) for batch in stream(data))
    seen = smooth.observe(prepared, links, batches, Path(folder), data.get("n")) if links else {}
    view, limit = View(prepared), named(scheme).pair_limit if scheme else None
    chosen = {}
    for link in links:
        channels = seen[link.tensor]
        if alpha is None and smooth.judged(link):
            found = smooth.search(view, link, channels, limit)
        else:
            share = _ALPHA if alpha is None else alpha
            found = (share, smooth.of_alpha(view, link, channels, share))
        if found:
            chosen[link.tensor] = found
    _save(Path(folder, _RANGES), {name: factors for name, (_, factors) in chosen.items()})
    return {"tensors": len(chosen), "alpha": {name: share for name, (share, _) in chosen.items()}}


def run(
    model: dict[str, Any],
    folder: str,
    method: str = "smooth",
    alpha: float | None = None,
    ranges: str | None = None,
    scheme: str | None = None,
    where: str = "all",
) -> dict[str, Any]:
    """The task: an ONNX model that computes the same with channels of more even range.

    `method` smooth applies what `calibrate` left in the folder `ranges`: it moves `alpha` (0 to 1) of the
    difference between channels from activations to weights, or as much as each layer's measured loss asks
    for (None). With a `scheme` it also puts Muls before layers whose input no layer before can scale;
    `where` "rows" leaves images alone. weights equalizes neighbouring layers' weights. The facts that are
    given back hold `method`, how many `links` were scaled, `inserted` of them by a Mul, and the names of the
    tensors that layers now read (`smoothed`), all of whose channels end near the tensor's range.
    """
    from compressor.quantization import equalize, graph, smooth

    source = Model.of(model)
    if method not in METHODS:
        raise UsageError(f"equalize: method '{method}' is unknown; known are {', '.join(METHODS)}")
    _check(where, alpha)
    prepared = graph.prepare(source.path)
    facts: dict[str, Any] = {"method": method}
    if graph.already_quantized(prepared):
        return unchanged(source, folder, facts, "already quantized: the model holds quantization operators")
    if method == "weights":
        return written(source, folder, prepared, {**facts, "links": equalize.equalize(prepared)})
    links, chosen = _links(prepared, scheme, where), _load(ranges)
    smoothed = smooth.smooth(prepared, [link for link in links if link.tensor in chosen], chosen)
    facts |= {"links": len(smoothed), "smoothed": smoothed}
    facts["inserted"] = sum(link.tensor in chosen and not link.constants for link in links)
    return written(source, folder, prepared, facts)


def _links(prepared: ModelProto, scheme: str | None, where: str) -> list[Link]:
    from compressor.quantization import scaling
    from compressor.quantization.scheme import named

    links = scaling.links(prepared)
    if scheme:
        links += scaling.multiplied(prepared, named(scheme))
    return [link for link in links if where == "all" or link.axis == -1]


def _check(where: str, alpha: float | None) -> None:
    if where not in WHERE:
        raise UsageError(f"equalize: where '{where}' is unknown; known are {', '.join(WHERE)}")
    if alpha is not None and not 0 <= alpha <= 1:
        raise UsageError(f"equalize: alpha {alpha:g} is not a share; give 0 to 1")


def _save(path: Path, arrays: dict[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.partial")
    with beside.open("wb") as file:
        np.savez(file, np.array(list(arrays)), *arrays.values())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _load(ranges: str | None) -> dict[str, Any]:
    try:
        with np.load(Path(ranges or "", _RANGES)) as file:
            names = file["arr_0"].tolist()
            return {name: file[f"arr_{place}"] for place, name in enumerate(names, 1)}
    except OSError as error:
        raise DataError("equalize: smoothing needs ranges of channels; gather them first") from error
