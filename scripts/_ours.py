"""Our own engines of a subject, as the command line makes them."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _subjects import CALIBRATION, ROOT, Subject

__all__ = ["FailedError", "Made", "Variant", "make", "variants"]


class FailedError(Exception):
    """Our own command line failed."""


@dataclass(frozen=True)
class Variant:
    """What is asked: a target with a scheme; `step` None is the first rung of the ladder.

    With `search`, the budget of the subject is given, the labelled data to keep it on, and time to measure
    speed: it is the engine that a user gets, which may leave layers in float.
    """

    name: str
    target: str
    scheme: str
    step: dict[str, Any] | None = None
    search: bool = False


@dataclass(frozen=True)
class Made:
    """An engine, the float engine of its runtime, and what making it cost and left in float.

    `verdict` is what the report of a search says of its engine, for others None.
    """

    engine: Path
    float_engine: Path
    cpu_seconds: float
    peak_bytes: int
    left: str
    verdict: str | None = None


def variants(vnni: bool) -> tuple[Variant, ...]:
    """The engines to compare on kernels with VNNI or without."""
    kind = "vnni" if vnni else "avx2"
    plain = {"observer": "minmax"}
    return (
        Variant("modelpress, pair-safe", "int8:onnx:cpu", "ort-x86-avx2"),
        Variant("modelpress, pair-safe, plain min-max", "int8:onnx:cpu", "ort-x86-avx2", plain),
        Variant("modelpress, full range (for VNNI)", "int8:onnx:cpu", "ort-x86-vnni"),
        Variant("modelpress, search in the budget", "int8:onnx:cpu", f"ort-x86-{kind}", search=True),
        Variant("modelpress on OpenVINO", "int8:openvino:cpu", f"openvino-x86-{kind}"),
    )


_COUNTED = ("calibrate", "moments", "quantize", "equalize")


def make(subject: Subject, variant: Variant, scratch: Path) -> Made:
    """Run `compress`; what runs of one subject have in common is made once and counts each time.

    Raises `FailedError`.
    """
    work, number = scratch / "work", len(list(scratch.glob("ours-*")))
    command = [ROOT / ".venv/bin/compress", "--target", variant.target, subject.file]
    command += ["--scheme", variant.scheme, "--out", work, "--calib", CALIBRATION]
    command += ["--arch", subject.arch] if subject.arch else []
    left_out = () if variant.search else ("--eval-data", "--metric")
    for name, value in subject.given.items():
        command += [] if name in left_out else [name, value]
    command += ["--max-drop", subject.max_drop] if variant.search else ["--bench", "0"]
    if variant.step:
        recipe = scratch / "recipe.json"
        recipe.write_text(json.dumps({"version": 1, "steps": [{"stage": "quantize", **variant.step}]}))
        command += ["--recipe", recipe]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise FailedError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    report = json.loads((work / "report.json").read_text())
    kept = scratch / f"ours-{number}"
    shutil.copytree(work / "engines", kept)
    baseline, row = report["engines"][:2]
    steps = [step for step in report["steps"] if step["name"] in _COUNTED]
    return Made(
        kept / Path(row["path"]).relative_to("engines"),
        kept / Path(baseline["path"]).relative_to("engines"),
        sum(step["cpu_seconds"] for step in steps),
        max((step["peak_rss_bytes"] for step in steps), default=0),
        _left(row["quantization"].get("float", [])),
        report["headline"] if variant.search else None,
    )


def _left(operators: list[dict[str, str]]) -> str:
    """Compute operators that were left in float, by reason."""
    reasons: dict[str, list[str]] = {}
    for operator in operators:
        reasons.setdefault(operator["reason"], []).append(operator["name"] or operator["op"])
    shown = []
    for reason, names in reasons.items():
        some = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        shown.append(f"{len(names)} {'layer' if len(names) == 1 else 'layers'} ({some}): {reason}")
    return "; ".join(shown)
