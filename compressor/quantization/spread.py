"""How well the inputs of layers bear uint8 with one range a tensor, as dynamic quantization gives them.

What counts are single vectors (tokens, time steps): one of small values beside one of large values is lost,
however little that shows in a sum of squares over the tensor. Power spectra are of that kind.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor import events
from compressor.errors import DataError
from compressor.quantization.activations import Activations, Batches, samples, unusable
from compressor.quantization.segments import write_segments
from compressor.store import write_json

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["load", "measure", "relative_error"]

_FILE = "spread.json"


def measure(
    model: ModelProto, tensors: Sequence[str], batches: Batches, folder: Path, limit: int = 32
) -> dict[str, float]:
    """Mean over samples of `relative_error` for each of `tensors`; also written to `folder/spread.json`.

    The first `limit` usable samples count. Raises `DataError` if there is none, unless `tensors` is empty.
    """
    segments = write_segments(model, tensors, folder, "spread")
    activations = Activations(segments, tensors)
    for path in segments:
        path.unlink()
    found: dict[str, list[float]] = {name: [] for name in tensors}
    count = 0
    clean = itertools.islice((sample for sample in samples(batches) if not unusable(sample)), limit)
    for count, unit in enumerate(activations.units(clean), 1):
        for name, value in activations.run(unit):
            found[name].append(relative_error(value))
        events.progress("spread of inputs", count, limit)
    if tensors and not count:
        raise DataError("calibration: no sample is free of NaN and Inf; mend the data")
    means = {name: float(np.mean(values)) for name, values in found.items() if values}
    write_json(folder / _FILE, means)
    return means


def load(folder: Path) -> dict[str, float]:
    """What `measure` wrote; raises `DataError` if it is not there."""
    try:
        return dict(json.loads((folder / _FILE).read_text()))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / _FILE} is missing or damaged; calibrate again") from error


def relative_error(value: NDArray[Any]) -> float:
    """Mean of |e|² / |x|² over the vectors x along the last axis, e what rounding to uint8 changes in them.

    Vectors of zeros are left out; at most 1 counts for a vector.
    """
    if not value.size:
        return 0.0
    vectors = np.asarray(value, np.float64).reshape(-1, value.shape[-1] if value.ndim else 1)
    step = (max(vectors.max(initial=0.0), 0.0) - min(vectors.min(initial=0.0), 0.0)) / 255
    power = np.square(vectors).sum(axis=1)
    vectors, power = vectors[power > 0], power[power > 0]
    if not len(vectors) or step == 0:
        return 0.0
    noise = np.square(np.rint(vectors / step) * step - vectors).sum(axis=1)
    return float(np.minimum(noise / power, 1).mean())
