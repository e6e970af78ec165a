"""Causes of error on the page and in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import main
from compressor.errors import UsageError
from compressor.report import Report, causes
from compressor.report.schema import validate

SPLIT = {
    "clipping": 0.02,
    "activation_rounding": 0.6,
    "weight_rounding": 0.3,
    "saturation": 0.0,
    "bias": 0.08,
}


def items(count: int = 12) -> list[dict[str, Any]]:
    return [
        {
            "name": f"/block{i}/Conv",
            "op": "Conv",
            "sqnr_db": 40.0 - i,
            "own_sqnr_db": 30.0 + i,
            "split": SPLIT,
        }
        for i in range(count)
    ] + [{"name": "/lstm", "op": "LSTM", "sqnr_db": 31.0, "own_sqnr_db": None, "split": None}]


def test_words_name_what_counts_largest_first() -> None:
    assert causes.words(SPLIT) == "activation rounding 60.0 %, weight rounding 30.0 %, bias 8.0 %"


def test_the_page_shows_the_layers_that_err_most_by_themselves() -> None:
    html = causes.page(items())
    assert html.count("<tr>") == 1 + 10
    assert html.index("/block0/Conv") < html.index("/block9/Conv")
    assert "/block10/Conv" not in html
    assert "/lstm" not in html
    assert 'class="c-activation_rounding" x="4.0" width="120.0"' in html
    assert "c-saturation" in html.split("<table>")[0]
    assert 'rect class="c-saturation"' not in html
    assert causes.page([item for item in items() if not item["split"]]) == ""
    assert "<script>" not in causes.page([{**items()[0], "name": "<script>"}])


def test_a_table_of_80_columns_for_the_terminal() -> None:
    text = causes.render_layers({"layers": {"int8:onnx:cpu": items(), "other": []}})
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["layer", "SQNR", "own", "clip", "activ.", "weights", "satur.", "bias"]
    assert lines[2].split() == ["/block0/Conv", "40.0", "30.0", "2", "60", "30", "0", "8"]
    assert lines[14].split() == ["/lstm", "31.0", *["–"] * 6]
    with pytest.raises(UsageError, match="no layers of fp32"):
        causes.render_layers({"layers": {"int8": items()}}, "fp32:onnx:cpu")


def test_an_engine_leads_to_its_report(tmp_path: Path, report: Any) -> None:
    data = report()
    target, place = data["engines"][-1]["target"], data["engines"][-1]["path"]
    Report(data).save(tmp_path)
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_bytes(b"")
    assert causes.find(tmp_path) == (tmp_path, None)
    assert causes.find(tmp_path / place) == (tmp_path, target)
    assert causes.find((tmp_path / place).parent) == (tmp_path, target)
    with pytest.raises(UsageError, match=r"no report\.json"):
        causes.find(tmp_path.parent / "nowhere" / "a" / "b" / "c.onnx")


def test_a_report_keeps_splits(report: Any) -> None:
    data = report()
    data["layers"] = {"int8:onnx:cpu": items()}
    validate(json.loads(json.dumps(data)))
    data["layers"]["int8:onnx:cpu"][0]["split"] = {"clipping": "much"}
    with pytest.raises(ValueError, match="split"):
        validate(data)


def test_the_command_prints_them(tmp_path: Path, report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = report()
    data["layers"] = {"int8:onnx:cpu": items()}
    Report(data).save(tmp_path)
    assert main(["inspect", str(tmp_path), "--layers"]) == 0
    assert "/block0/Conv" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--layers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["int8:onnx:cpu"][0]["split"] == SPLIT
