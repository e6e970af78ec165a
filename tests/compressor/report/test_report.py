"""The report as an object: exit status, files, notebook."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import StoreError, UsageError
from compressor.report import Report

BASE, INT8 = "fp32:onnx:cpu", "int8:onnx:cpu"


def made(report: Any, engine: Any, *budgets: str | None, max_drop: float | None = 0.5) -> Report:
    rows = [engine(f"int8+prune{index + 10}:onnx:cpu", budget=budget) for index, budget in enumerate(budgets)]
    return Report(report([engine(BASE, role="baseline"), *rows], max_drop=max_drop))


@pytest.mark.parametrize(
    ("budgets", "status"),
    [
        (["kept"], 0),
        (["broken"], 3),
        (["broken", "broken"], 3),
        (["broken", "kept"], 0),
        (["undecided"], 0),
        (["broken", "undecided"], 0),
        ([], 0),
    ],
)
def test_exit_status(report: Any, engine: Any, budgets: list[str], status: int) -> None:
    assert made(report, engine, *budgets).exit_status == status


def test_exit_status_without_a_budget_or_labels(report: Any, engine: Any) -> None:
    assert made(report, engine, None, max_drop=None).exit_status == 0
    unlabelled = engine(INT8, drop=0.1)
    unlabelled["drop"] = None
    assert Report(report([unlabelled], max_drop=0.5)).exit_status == 0


def test_recommended_and_verdict(report: Any) -> None:
    wrapped = Report(report())
    assert wrapped.recommended is not None
    assert wrapped.recommended["target"] == INT8
    assert wrapped.verdict == wrapped.data["headline"]
    assert len(wrapped.engines) == 2


def test_save_and_load(report: Any, tmp_path: Path) -> None:
    wrapped = Report(report())
    wrapped.save(tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["report.html", "report.json"]
    for place in (tmp_path / "out", tmp_path / "out" / "report.json", str(tmp_path / "out")):
        assert Report.load(place).data == wrapped.data
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_saving_again_replaces(report: Any, tmp_path: Path) -> None:
    Report(report(notes=["old"])).save(tmp_path)
    Report(report(notes=["new"])).save(tmp_path)
    assert Report.load(tmp_path).data["notes"] == ["new"]
    assert "old" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_names_that_are_not_utf8_are_kept(report: Any, tmp_path: Path) -> None:
    name = os.fsdecode(b"models/caf\xe9.onnx")
    wrapped = Report(report(model={"path": name, "sha256": "00", "parameters": None}))
    wrapped.save(tmp_path)
    assert Report.load(tmp_path).data["model"]["path"] == name
    assert str(wrapped)


def test_a_folder_that_cannot_be_written(report: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="choose another --out"):
        Report(report()).save(tmp_path / "file" / "out")


def test_loading_what_is_no_report(report: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no report\.json here"):
        Report.load(tmp_path)
    (tmp_path / "report.json").write_text('{"version": 1, "engi')
    with pytest.raises(UsageError, match="is not a report of this program"):
        Report.load(tmp_path)
    data = report()
    data["engines"][0]["size_bytes"] = "large"
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"engines\[0\]\.size_bytes: is 'large'"):
        Report.load(tmp_path)


def test_a_report_of_wrong_data_is_refused(report: Any) -> None:
    data = report()
    del data["headline"]
    with pytest.raises(ValueError, match="headline: is missing"):
        Report(data)


def test_a_notebook_shows_a_table(report: Any) -> None:
    cell = Report(report())._repr_html_()
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(cell)
    assert tags.count("tr") == 3
    for words in ("1.41×", "1.37–1.45", "81.70", "kept", "Use int8:onnx:cpu"):
        assert words in cell
    assert repr(Report(report())) == str(Report(report()))
