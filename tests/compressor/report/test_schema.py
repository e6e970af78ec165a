"""report.json is held to its schema, and an error names the place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compressor.report.schema import validate


def test_a_whole_report_passes_and_survives_json(report: Any) -> None:
    data = report()
    validate(data)
    again = json.loads(json.dumps(data, allow_nan=False))
    validate(again)
    assert again == data


def test_further_keys_are_allowed_everywhere(report: Any) -> None:
    data = report()
    data["added"] = {"any": [1, "thing"]}
    data["engines"][1]["energy_joule"] = 0.4
    data["engines"][1]["latency"]["ratio_to_baseline"]["verdict"] = "faster"
    validate(data)


def test_what_was_not_measured_is_null(report: Any) -> None:
    data = report()
    for key in ("metric", "drop", "agreement", "latency", "cpu_ms", "peak_rss_bytes", "precision"):
        data["engines"][1][key] = None
    data["engines"][0]["latency"]["p99_ms"] = None
    validate(data)


def breaking(path: list[Any], value: Any) -> Any:
    return pytest.param(path, value, id=".".join(map(str, path)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        breaking(["engines", 1, "size_bytes"], "4930112"),
        breaking(["engines", 1, "size_bytes"], None),
        breaking(["engines", 1, "role"], "winner"),
        breaking(["engines", 1, "recommended"], 1),
        breaking(["engines", 1, "metric", "value"], float("nan")),
        breaking(["engines", 1, "metric", "value"], True),
        breaking(["engines", 1, "drop", "verdict"], "fine"),
        breaking(["engines", 1, "agreement", "top1"], 97.7),
        breaking(["engines", 1, "precision", "share_int8"], 1.2),
        breaking(["engines", 1, "latency", "p99_ms"], 0.001),
        breaking(["engines", 1, "latency", "ratio_to_baseline", "low"], 3.0),
        breaking(["engines", 1, "latency", "aa_noise", "high"], float("inf")),
        breaking(["rungs", 0, "seconds"], None),
        breaking(["layers", "int8:onnx:cpu", 3, "sqnr_db"], "12"),
        breaking(["command"], "compress model.onnx"),
        breaking(["machine", "cpu"], {1, 2}),
        breaking(["notes"], [None]),
        breaking(["verdict", 0, "text"], None),
    ],
)
def test_an_error_names_the_place(report: Any, path: list[Any], value: Any) -> None:
    data = report()
    item = data
    for key in path[:-1]:
        item = item[key]
    item[path[-1]] = value
    parents = [key for key in path[:-1] if isinstance(key, str)]
    with pytest.raises(ValueError) as caught:
        validate(data)
    assert all(parent in str(caught.value).split(": ")[0] + str(caught.value) for parent in parents)
    assert str(caught.value).startswith(parents[0] if parents else path[0])


def test_a_missing_key_is_named(report: Any) -> None:
    data = report()
    del data["engines"][1]["latency"]["threads"]
    with pytest.raises(ValueError, match=r"^engines\[1\]\.latency\.threads: is missing$"):
        validate(data)


def test_a_newer_version_says_so(report: Any) -> None:
    with pytest.raises(ValueError, match="version: is 2; this release reads up to 1"):
        validate({**report(), "version": 2, "engines": "of another form"})


def test_targets_are_unique_and_one_is_recommended(report: Any, engine: Any) -> None:
    data = report()
    for row in data["engines"]:
        row["recommended"] = True
    with pytest.raises(ValueError, match="more than one is recommended"):
        validate(data)
    data = report([engine("int8:onnx:cpu"), engine("int8:onnx:cpu")])
    with pytest.raises(ValueError, match=r"engines\[1\]\.target: 'int8:onnx:cpu' is there twice"):
        validate(data)


@pytest.mark.parametrize("value", [None, [], "report", 3])
def test_what_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not an object"):
        validate(value)
