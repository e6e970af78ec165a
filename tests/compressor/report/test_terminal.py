"""What a terminal shows."""

from __future__ import annotations

import io
import unicodedata
from typing import Any

import pytest

from compressor.report import Report
from compressor.report.terminal import render, render_doctor, render_inspection, show

LONG = "int8+prune50:a_runtime_with_a_really_long_name_from_a_plugin:cuda_device_0"


def widest(text: str) -> int:
    return max(
        sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)
        for line in text.splitlines()
    )


def many(engine: Any) -> list[Any]:
    rows = [engine(f"int8+prune{share}:onnx:cpu", speed=1 + share / 50) for share in range(10, 65, 5)]
    return [engine("fp32:onnx:cpu", role="baseline"), *rows]


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40])
def test_nothing_is_wider_than_the_terminal(report: Any, engine: Any, width: int) -> None:
    base = engine("fp32:onnx:cpu", role="baseline")
    for rows in (None, many(engine), [base, engine(LONG, drop=40.2, p50=9000.0)]):
        text = render(Report(report(rows, notes=["a_word_without_a_gap_" * 12])), width)
        assert widest(text) <= width


@pytest.mark.parametrize("width", range(30, 150))
def test_no_number_is_cut(report: Any, engine: Any, width: int) -> None:
    rows = [engine("fp32:onnx:cpu", role="baseline"), engine("int8:onnx:cpu", drop=40.2, p50=9000.0)]
    rows[0]["precision"] = {"share_int8": 1.0, "float_islands": []}
    data = report(rows)
    for row in data["engines"]:
        row["target"] = row["role"][:4]
    data.update(headline="", verdict=[], notes=[], skipped=[])
    text = render(Report(data), width)
    assert "…" not in text
    assert widest(text) <= width


def test_eighty_columns_hold_what_matters(report: Any) -> None:
    lines = render(Report(report())).splitlines()
    head = next(line for line in lines if "engine" in line)
    for name in ("size", "p50 ms", "speed", "top1 %", "drop", "budget"):
        assert name in head
    row = next(line for line in lines if line.startswith("★"))
    assert row.split()[1:] == [
        "int8:onnx:cpu",
        "4.9",
        "MB",
        "12.3",
        "1.41×",
        "81.70",
        "0.15",
        *row.split()[8:],
    ]
    assert row.endswith("kept")


def test_a_narrow_terminal_keeps_the_budget_and_a_wide_one_shows_all(report: Any) -> None:
    narrow = render(Report(report()), 40)
    assert "budget" in narrow
    assert "p50" not in narrow
    wide = render(Report(report()), 200)
    for name in ("p99 ms", "speed 95 %", "drop 95 %", "agree", "SQNR", "int8", "memory"):
        assert name in wide


def test_notes_skipped_targets_and_verdicts_are_there(report: Any, engine: Any) -> None:
    text = render(Report(report(many(engine))), 160)
    assert "note: 650 labels cannot separate" in text
    assert "not made: int8:openvino: openvino is not installed (pip install 'modelpress[openvino]')" in text
    assert text.count("ecommended") >= 11


def test_markup_in_names_is_text(report: Any, engine: Any) -> None:
    rows = [engine("int8:[red]onnx[/red]:cpu")]
    assert "int8:[red]onnx[/red]:cpu" in render(Report(report(rows, notes=["[bold]x[/bold] :smile:"])), 120)
    assert "[bold]x[/bold] :smile:" in render(Report(report(notes=["[bold]x[/bold] :smile:"])), 120)


def test_a_file_gets_plain_text_in_its_encoding(report: Any) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    show(Report(report()), file)
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "1.41x the speed of float (1.37-1.45)" in text
    assert "\x1b" not in text
    assert "?" not in text


def test_a_terminal_gets_colour(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"  # type: ignore[assignment]

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    show(Report(report()), file)
    assert "\x1b[" in file.getvalue()
    assert "int8:onnx:cpu" in file.getvalue()


def doctor(**changes: Any) -> dict[str, Any]:
    def entry(module: str, status: str, reason: str = "", required: bool = False) -> dict[str, Any]:
        return {
            "module": module,
            "role": "runs engines",
            "status": status,
            "version": "1.2" if status == "ok" else None,
            "reason": reason,
            "install": f"pip install 'modelpress[{module}]'",
            "required": required,
        }

    machine = {
        "cpu": "AMD EPYC",
        "instruction_set": "avx2",
        "cores": 4,
        "usable_cores": 2.0,
        "memory_bytes": 16_000_000_000,
        "gpus": [
            {"name": "NVIDIA T4", "memory": "15360 MiB", "driver": "550.1", "compute_capability": "7.5"}
        ],
        "os": "Linux",
        "python": "3.11.7",
    }
    frameworks = [
        entry("torch", "ok", required=True),
        entry("openvino", "missing", "not installed"),
        entry("tensorrt", "broken", "the import fails: OSError: libnvinfer.so.11: cannot open"),
    ]
    found = {"machine": machine, "frameworks": frameworks, "providers": ["CPUExecutionProvider"]}
    return {**found, "problems": ["tensorrt: the import fails; mend it"], "notes": [], "ok": False, **changes}


def test_the_doctor_says_what_to_do() -> None:
    text = render_doctor(doctor(), 100)
    assert widest(text) <= 100
    for words in (
        "AMD EPYC (avx2), 2 of 4 cores, 16.0 GB",
        "NVIDIA T4, 15360 MiB, driver 550.1",
        "pip install 'modelpress[openvino]'",
        "libnvinfer.so.11",
        "problem: tensorrt: the import fails; mend it",
        "1 problem",
    ):
        assert words in text
    fine = render_doctor(doctor(problems=[], ok=True), 100)
    assert "everything installed that this version uses can be imported" in fine


def test_the_doctor_promises_nothing_that_is_not_used_or_not_there() -> None:
    found = doctor(providers=["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"])
    found["frameworks"][1] |= {"module": "tensorflow", "status": "unused", "install": "pip install it"}
    assert "no GPU" not in render_doctor(found, 200)
    found["machine"]["gpus"] = []
    text = render_doctor(found, 200)
    assert "not used by this version: tensorflow" in text
    assert "pip install it" not in text
    line = next(line for line in text.splitlines() if "CUDAExecutionProvider" in line)
    assert line.count("(built in, but no GPU found)") == 2
    assert line.endswith("CPUExecutionProvider")


def test_facts_about_a_file_are_aligned() -> None:
    facts = {
        "kind": "onnx",
        "size_bytes": 18_595_034,
        "inputs": [{"name": "image", "dtype": "float32", "shape": ["batch", 3, 224, 224]}],
        "operators": {"Conv": 49, "Relu": 35},
        "external": False,
        "architecture": None,
    }
    lines = render_inspection(facts).splitlines()
    assert lines[0].split() == ["kind", "onnx"]
    assert "18,595,034" in lines[1]
    assert "image: float32 [batch, 3, 224, 224]" in lines[2]
    assert "Conv: 49" in lines[3]
    assert not any("architecture" in line for line in lines)
    assert len({line.index(line.split("  ")[-1].strip()) for line in lines[:3]}) == 1
