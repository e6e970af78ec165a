"""Builders of realistic reports."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from compressor.report import judge

Build = Callable[..., dict[str, Any]]


def spread(value: float, half: float) -> dict[str, Any]:
    return {"value": value, "low": value - half, "high": value + half}


def build_engine(target: str, **changes: Any) -> dict[str, Any]:
    """An engine row; by default a good int8 candidate. `speed`, `drop`, `budget` are short cuts."""
    candidate = changes.pop("role", "candidate") == "candidate"
    speed, drop, budget = changes.pop("speed", 1.41), changes.pop("drop", 0.15), changes.pop("budget", "kept")
    p50 = changes.pop("p50", 17.3) / (speed if candidate else 1.0)
    latency = {
        "batch": 1,
        "threads": 1,
        "p50_ms": p50,
        "p90_ms": p50 * 1.08,
        "p99_ms": p50 * 1.31,
        "ratio_to_baseline": spread(speed, 0.025 * speed) if candidate else None,
        "aa_noise": spread(1.001, 0.006) if candidate else None,
    }
    row = {
        "target": target,
        "role": "candidate" if candidate else "baseline",
        "path": f"engines/{target.replace(':', '-')}/model.onnx",
        "sha256": f"{random.Random(target).getrandbits(256):064x}",
        "size_bytes": 4_930_112 if candidate else 18_595_034,
        "metric": spread(81.85 - drop if candidate else 81.85, 2.9),
        "drop": {**spread(drop, 0.45), "verdict": budget} if candidate else None,
        "agreement": {"top1": 0.977, "sqnr_db": 19.4} if candidate else None,
        "latency": latency,
        "cpu_ms": p50 * 0.99,
        "peak_rss_bytes": 71_000_000 if candidate else 94_000_000,
        "precision": {"share_int8": 0.994, "float_islands": []} if candidate else None,
        "simulation_gap": {"sqnr_db": 38.2} if candidate else None,
        "recommended": False,
    }
    return {**row, **changes}


def build_layers(count: int, name: str = "/features/features.{i}/conv/Conv") -> list[dict[str, Any]]:
    rng = random.Random(count)
    return [
        {"name": name.format(i=i), "op": "Conv", "sqnr_db": round(34 - 8 * i / count + rng.gauss(0, 4), 2)}
        for i in range(count)
    ]


def build_report(engines: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """A judged report of EfficientNet-Lite0, int8 against float on onnxruntime."""
    base = build_engine("fp32:onnx:cpu", role="baseline")
    islands = [
        {
            "name": "/classifier/Softmax",
            "op": "Softmax",
            "share": 0.004,
            "reason": "no int8 kernel in onnxruntime",
        },
        {"name": "/stem/Mul", "op": "Mul", "share": 0.002, "reason": "its input is a float constant"},
    ]
    int8 = build_engine("int8:onnx:cpu", precision={"share_int8": 0.994, "float_islands": islands})
    data = {
        "version": 1,
        "created": "2026-11-30T14:05:11+00:00",
        "seed": 0,
        "command": [
            "compress",
            "--target",
            "int8",
            "--data",
            "imagenet/val 650",
            "--max-drop",
            "1",
            "lite0.onnx",
        ],
        "machine": {
            "cpu": "AMD EPYC 9R14",
            "cores": 2,
            "usable_cores": 2.0,
            "instruction_set": "avx2",
            "flags": ["avx", "avx2", "fma"],
            "memory_bytes": 25_276_502_016,
            "gpus": [],
            "os": "Debian GNU/Linux 12 (bookworm), kernel 6.18",
            "python": "3.11.7",
            "packages": {
                "modelpress": "0.1.0",
                "onnx": "1.23.2",
                "onnxruntime-gpu": "1.31.1",
                "numpy": "2.4.6",
            },
        },
        "model": {"path": "models/lite0.onnx", "sha256": "c3" * 32, "parameters": 4_652_008},
        "data": {
            "calibration": {"n": 300, "sha256": "1a" * 32, "source": "imagenet/val 650"},
            "evaluation": {"n": 650, "sha256": "9b" * 32, "source": "imagenet/val 650"},
        },
        "metric": {"name": "top1", "higher_is_better": True},
        "max_drop": 1.0,
        "engines": engines if engines is not None else [base, int8],
        "rungs": [
            {
                "target": "int8:onnx:cpu",
                "name": "minmax",
                "what": "per-channel weights, min-max activations",
                "metric": spread(79.39, 3.1),
                "drop": {**spread(2.46, 0.9), "verdict": "broken"},
                "sqnr_db": 8.6,
                "seconds": 41.2,
                "kept": False,
            },
            {
                "target": "int8:onnx:cpu",
                "name": "pair-safe",
                "what": "weight ranges that cannot saturate pairs of products",
                "metric": spread(81.70, 2.9),
                "drop": spread(0.15, 0.45),
                "sqnr_db": 19.4,
                "seconds": 38.0,
                "kept": True,
            },
        ],
        "skipped": [
            {
                "target": "int8:openvino",
                "reason": "openvino is not installed (pip install 'modelpress[openvino]')",
            }
        ],
        "layers": {"int8:onnx:cpu": build_layers(64)},
        "steps": [
            {
                "name": "load",
                "seconds": 2.1,
                "cpu_seconds": 1.9,
                "peak_rss_bytes": (2.1e8).__int__(),
                "reused": True,
            },
            {
                "name": "calibrate",
                "seconds": 33.9,
                "cpu_seconds": 58.2,
                "peak_rss_bytes": 612_000_000,
                "reused": False,
            },
            {
                "name": "latency-onnx-cpu",
                "seconds": 81.0,
                "cpu_seconds": 79.4,
                "peak_rss_bytes": 121_000_000,
                "reused": False,
            },
        ],
        "notes": ["650 labels cannot separate drops of less than about half a point."],
        **changes,
    }
    data = copy.deepcopy(data)
    judge(data)
    return data


@pytest.fixture
def engine() -> Build:
    return build_engine


@pytest.fixture
def layers() -> Build:
    return build_layers


@pytest.fixture
def report() -> Build:
    return build_report
