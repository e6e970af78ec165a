"""Scales, ticks and the placement of labels."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.report.svg import (
    Box,
    Mark,
    Scale,
    escape,
    fit,
    label_box,
    linear_ticks,
    log_ticks,
    place,
    text_width,
)

AREA = Box(52, 14, 336, 274)
SPOT = st.tuples(st.floats(60, 330), st.floats(20, 268), st.text("int8:onx_cpu+", min_size=1, max_size=30))


@settings(max_examples=150, deadline=None)
@given(st.lists(SPOT, min_size=1, max_size=15))
def test_labels_never_overlap(spots: list[tuple[float, float, str]]) -> None:
    marks = [Mark(x, y, name, str(index)) for index, (x, y, name) in enumerate(spots)]
    labels = place(marks, AREA, [Box(mark.x - 20, mark.y - 3, mark.x + 20, mark.y + 3) for mark in marks])
    boxes = [label_box(label) for label in labels if label.text is not None]
    assert [label.mark for label in labels] == marks
    assert not any(one.meets(other) for one, other in combinations(boxes, 2))
    for box in boxes:
        assert AREA.holds(box)
        assert not any(box.meets(Box(mark.x - 5, mark.y - 5, mark.x + 5, mark.y + 5)) for mark in marks)


def test_a_lonely_label_is_whole_and_near() -> None:
    (label,) = place([Mark(100, 100, "int8:onnx:cpu", "1")], AREA, [])
    assert label.text == "int8:onnx:cpu"
    assert not label.far


def test_a_name_without_room_gives_way_to_its_key() -> None:
    (label,) = place([Mark(100, 100, "x" * 60, "1")], AREA, [])
    assert label.text == "1"


def test_a_crowd_keeps_its_keys() -> None:
    marks = [Mark(190 + index % 3, 140 + index // 3, "int8:onnx:cpu", str(index)) for index in range(9)]
    labels = place(marks, AREA, [])
    assert all(label.text is not None for label in labels)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 10))
def test_linear_ticks_are_few_and_inside(low: float, width: float, count: int) -> None:
    high = low + width
    if high - low < 1e-9 * abs(low):
        return
    ticks = linear_ticks(low, high, count)
    assert len(ticks) <= count + 1
    assert all(low - 1e-6 * width <= tick <= high + 1e-6 * width for tick in ticks)


@given(st.floats(1e-4, 1e3), st.floats(1.08, 1e7), st.integers(3, 12))
def test_log_ticks_are_few_and_inside(low: float, factor: float, count: int) -> None:
    ticks = log_ticks(low, low * factor, count)
    assert 1 <= len(ticks) <= count + 2
    assert all(low * 0.999 <= tick <= low * factor * 1.001 for tick in ticks)


def test_log_ticks_of_a_narrow_range() -> None:
    assert log_ticks(11.5, 18.5, 3) == [12, 14, 16, 18]
    assert log_ticks(0.015, 1200, 6) == pytest.approx([0.1, 1, 10, 100, 1000])


def test_a_scale_maps_ends_and_clamps() -> None:
    scale = Scale(1, 100, 0, 200, log=True)
    assert [scale(value) for value in (1, 10, 100)] == pytest.approx([0, 100, 200])
    assert scale(1000) == 200
    assert scale(0.1) == 0


@pytest.mark.parametrize("name", ["int8:onnx:cpu", "模型" * 30, "x" * 200])
@pytest.mark.parametrize("width", [30, 100, 400])
def test_fit_fits(name: str, width: float) -> None:
    assert text_width(fit(name, width)) <= width


def test_escape_leaves_nothing_dangerous() -> None:
    said = escape("<b a='1'>\"&\x00\x1b[31m\udcff\u202e\n")
    assert said == "&lt;b a=&#39;1&#39;&gt;&quot;&amp;\ufffd\ufffd[31m\ufffd\ufffd\n"
    said.encode("utf-8")
