"""Labels that fit no metric: a budget is refused, and the report says what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor import compress
from compressor.errors import DataError


def data(net: Path, folder: Path, change: str) -> Path:
    """The samples of `net` with other labels."""
    with np.load(net / "data.npz") as file:
        x, y = file["x"], file["y"].copy()
    if change == "beyond":
        y[-1] = 4
    elif change == "below":
        y[-1] = -1
    else:
        y = y.astype(np.float32)
        y[-1] += {"whole": 0.0, "fraction": 0.5, "nan": np.nan}[change]
    np.savez(folder / f"{change}.npz", x=x, y=y)
    return folder / f"{change}.npz"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("beyond", r"labels from \d to 4 fit none of the outputs \(.*4\)\)"),
        ("below", r"labels from -1 to \d fit none"),
        ("fraction", "are no class numbers"),
        ("nan", "are no class numbers"),
    ],
)
def test_a_budget_is_not_dropped_where_labels_are_unusable(
    net: Path, tmp_path: Path, change: str, said: str
) -> None:
    given = {"calib_data": net / "data.npz", "eval_data": data(net, tmp_path, change), "calib": 20}
    with pytest.raises(DataError, match=f"--max-drop needs an accuracy to hold.*{said}"):
        compress(net / "net.onnx", "int8:onnx", max_drop=1, bench=0, out=tmp_path / "o", **given)


def test_without_a_budget_the_report_says_what_is_wrong_with_the_labels(net: Path, tmp_path: Path) -> None:
    given = {"calib_data": net / "data.npz", "eval_data": data(net, tmp_path, "beyond"), "calib": 20}
    report = compress(net / "net.onnx", "int8:onnx", bench=0, out=tmp_path / "o", **given)
    assert report.engines[1]["drop"] is None
    page = (tmp_path / "o" / "report.html").read_text()
    for text in (report.verdict, page):
        assert "to 4 fit none of the outputs" in text
        assert "no labels" not in text


def test_class_numbers_may_be_floats(net: Path, tmp_path: Path) -> None:
    given = {"calib_data": net / "data.npz", "eval_data": data(net, tmp_path, "whole"), "calib": 20}
    report = compress(net / "net.onnx", "int8:onnx", max_drop=50, bench=0, out=tmp_path / "o", **given)
    assert report.engines[0]["metric"]["name"] == "top1"
    assert report.engines[0]["metric"]["value"] == 100
    assert report.engines[1]["drop"]["verdict"] == "kept"
