"""Samples of a subject as every quantizer gets them, and sections of a Markdown file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from _subjects import CALIBRATION, Subject

__all__ = ["files", "references", "write", "write_parts"]


def references(
    subject: Subject, scratch: Path, samples: int = CALIBRATION
) -> tuple[dict[str, Any], dict[str, Any]]:
    """References to calibration and evaluation samples, as `compress` binds them to the model."""
    from compressor.intake import load_data, load_model
    from compressor.options import Options
    from compressor.steps import Steps
    from compressor.store import Store

    named = {name.strip("-").replace("-", "_"): value for name, value in subject.given.items()}
    parsed = Options(subject.file, arch=subject.arch, calib=samples, **named)
    steps = Steps(Store(scratch / "intake"))
    data = load_data(parsed, load_model(parsed, steps), True, steps)
    return data.calibration or {}, data.evaluation or {}


def files(calibration: dict[str, Any], scratch: Path) -> dict[str, str]:
    """Calibration samples as one .npy an input, for the peers."""
    from compressor.data import stream

    feeds = [batch.inputs for batch in stream({**calibration, "batch": 1})]
    found = {}
    for number, name in enumerate(feeds[0]):
        found[name] = str(scratch / f"samples-{number}.npy")
        np.save(found[name], np.concatenate([feed[name] for feed in feeds]))
    return found


def write(file: Path, title: str, text: str) -> None:
    """Replace the section of this title, or append it."""
    head, _, after = _parted(file, title)
    file.write_text(head.rstrip() + "\n\n" + text.rstrip() + "\n" + (f"\n## {after}" if after else ""))


def write_parts(file: Path, title: str, start: str, parts: list[str]) -> None:
    """Replace the start of the section of this title, and those of its parts ("### Name: ...") that are given."""
    kept = {_name(part): part for part in _parted(file, title)[1].split("\n### ")[1:]}
    kept |= {_name(part): part for part in (text.removeprefix("### ") for text in parts)}
    write(file, title, "\n\n### ".join([start.rstrip(), *(part.strip() for part in kept.values())]))


def _name(part: str) -> str:
    return part.partition(":")[0]


def _parted(file: Path, title: str) -> tuple[str, str, str]:
    """A file's text before a section, the section after its title, and what follows behind the next "## "."""
    text = file.read_text() if file.exists() else "# Benchmarks\n\n"
    head, *tail = re.split(rf"^## {re.escape(title)}(?=[,\n])", text, maxsplit=1, flags=re.MULTILINE)
    section, _, after = "".join(tail).partition("\n## ")
    return head, section, after
