"""Metrics of the subjects that no label of a class speaks for, as `--metric scripts/_metrics.py:NAME`.

Each takes an engine's outputs and the labels, in any selection of samples, as resampling draws them.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path(os.environ.get("MODELPRESS_SHARED", ROOT.parent / "shared")) / "assets"


def spearman(outputs: np.ndarray, labels: np.ndarray) -> float:
    """100 x rank correlation of the cosines of two sentences' embeddings with people's scores.

    The two sentences of a pair follow each other; a label is the number of the pair and its score.
    """
    vectors = outputs / np.linalg.norm(outputs, axis=1, keepdims=True)
    cosines = np.einsum("ij,ij->i", vectors[0::2], vectors[1::2])
    return float(100 * np.corrcoef(_ranks(cosines), _ranks(labels[0::2, 1]))[0, 1])


spearman.groups = lambda labels: labels[:, 0].astype(int)  # type: ignore[attr-defined]


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, equal values having their mean one."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def equal_error_rate(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Per cent of errors of either kind, over all pairs of utterances, at the threshold where both are equal.

    A label is a speaker and the number of the utterance; an utterance is not compared with itself.
    """
    vectors = outputs / np.linalg.norm(outputs, axis=1, keepdims=True)
    first, second = np.triu_indices(len(labels), 1)
    apart = labels[first, 1] != labels[second, 1]
    first, second = first[apart], second[apart]
    scores = np.einsum("ij,ij->i", vectors[first], vectors[second])
    same = (labels[first, 0] == labels[second, 0])[np.argsort(-scores)]
    found, wrong = np.cumsum(same) / same.sum(), np.cumsum(~same) / (~same).sum()
    nearest = np.argmin(np.abs((1 - found) - wrong))
    return float(100 * ((1 - found[nearest]) + wrong[nearest]) / 2)


equal_error_rate.higher_is_better = False  # type: ignore[attr-defined]


def mean_average_precision(outputs: np.ndarray, labels: np.ndarray) -> float:
    """100 x mAP@[.5:.95] by the detector's own decoding, suppression and matching (its eval.py).

    A label is the place of a picture among the sorted names of labels.json.
    """
    detections = [_detections(output, int(number)) for output, number in zip(outputs, labels, strict=True)]
    return 100 * float(_eval().coco_map(detections, [_truth(int(number)) for number in labels])[0])


_KNOWN: dict[bytes, Any] = {}  # of outputs: resamples ask again and again


def _detections(output: np.ndarray, number: int) -> Any:
    key = hashlib.sha256(output.tobytes()).digest()
    if key not in _KNOWN:
        path = ASSETS / "_data/coco_val128" / _names()[number]
        _KNOWN[key] = _eval().detect(lambda _: [output], str(path))[0]
    return _KNOWN[key]


@cache
def _truth(number: int) -> list[tuple[int, np.ndarray]]:
    """Class and corners in pixels of each labelled box of a picture."""
    from PIL import Image

    name = _names()[number]
    width, height = Image.open(ASSETS / "_data/coco_val128" / name).size
    size = np.array([width, height, width, height])
    boxes = [(int(kind), np.array(centre), np.array(extent) / 2) for kind, centre, extent in _boxes(name)]
    return [(kind, np.concatenate([at - half, at + half]) * size) for kind, at, half in boxes]


def _boxes(name: str) -> list[tuple[float, list[float], list[float]]]:
    return [(box[0], box[1:3], box[3:5]) for box in _labels()[name]["boxes"]]


@cache
def _labels() -> Any:
    return json.loads((ASSETS / "_data/coco_val128/labels.json").read_text())


def _names() -> list[str]:
    return sorted(_labels())


@cache
def _eval() -> Any:
    """The eval.py beside the detector, as a module."""
    path = ASSETS / "yolox_nano_onnx/eval.py"
    spec = spec_from_file_location("yolox_eval", path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
