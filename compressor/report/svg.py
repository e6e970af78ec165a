"""Drawing without a plotting library: scales, ticks, text that fits, labels that do not collide.

Lengths are in px of the drawing. Labels are set in a monospace font, so their width is known.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compressor.report.text import NONE, shorten

__all__ = [
    "Box",
    "Label",
    "Mark",
    "Scale",
    "escape",
    "fit",
    "label_box",
    "linear_ticks",
    "log_ticks",
    "place",
    "text",
]

FONT = 12.0
ADVANCE = 0.62  # of the font size; monospace fonts have 0.60 to 0.61


def escape(value: object) -> str:
    """Text for HTML: markup escaped; control characters, surrogates and direction overrides replaced."""
    bad = ("Cc", "Cs", "Co", "Cn")
    plain = "".join(
        "\ufffd"
        if (unicodedata.category(char) in bad and char not in "\n\t") or char in "\u202a\u202b\u202d\u202e"
        else char
        for char in str(value)
    )
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        plain = plain.replace(char, entity)
    return plain


class Box(NamedTuple):
    """A rectangle: left, top, right, bottom."""

    x0: float
    y0: float
    x1: float
    y1: float

    def meets(self, other: Box) -> bool:
        """Whether the two overlap."""
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def holds(self, other: Box) -> bool:
        """Whether `other` lies inside."""
        return self.x0 <= other.x0 and other.x1 <= self.x1 and self.y0 <= other.y0 and other.y1 <= self.y1


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] of the data to [start, end] of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value; values outside lie on the edge."""
        low, high, value = (math.log(item) if self.log else item for item in (self.low, self.high, value))
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.start + share * (self.end - self.start)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count` + 1 round values within [low, high]: steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10((high - low) / max(1, count)))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first <= count:
            break
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values within [low, high] for a logarithmic axis."""
    if high / low < 5:
        return linear_ticks(low, high, count)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= count + 1:
            return ticks
    return ticks[:: math.ceil(len(ticks) / count)]


def text_width(value: str) -> float:
    """Width in the label font; wide East Asian characters count twice."""
    cells = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in value)
    return cells * FONT * ADVANCE


def fit(value: str, width: float) -> str:
    """Shorten a label in its middle until it is at most `width` wide."""
    length = len(value)
    while length > 1 and text_width(shorten(value, length)) > width:
        length -= 1
    return shorten(value, length)


def text(x: float, y: float, value: str, kind: str = "tk", anchor: str = "start") -> str:
    """A text element; `kind` is its CSS class, `anchor` start, middle or end."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{where}>{escape(value)}</text>'


class Mark(NamedTuple):
    """A point that wants a label. `key` stands for it where the name has no room."""

    x: float
    y: float
    name: str
    key: str


class Label(NamedTuple):
    """Where a label goes: baseline point and anchor; `far` asks for a leader line. text None: no room."""

    mark: Mark
    text: str | None
    x: float = 0.0
    y: float = 0.0
    anchor: str = "start"
    far: bool = False


def label_box(label: Label) -> Box:
    """The rectangle that a label's text covers, with a margin of a pixel."""
    width = text_width(label.text or NONE)
    left = label.x - {"start": 0.0, "middle": width / 2, "end": width}[label.anchor]
    return Box(left - 1, label.y - 0.85 * FONT - 1, left + width + 1, label.y + 0.25 * FONT + 1)


def place(marks: Sequence[Mark], area: Box, obstacles: Iterable[Box]) -> list[Label]:
    """Put a label to every mark so that none overlaps another, a mark, an obstacle or the edge of `area`.

    Earlier marks choose first. A name without room is tried across soft `obstacles`, then replaced by
    its key, which is tried ever further away; at last the mark stays without.
    """
    taken = [Box(mark.x - 7, mark.y - 7, mark.x + 7, mark.y + 7) for mark in marks]
    soft = list(obstacles)
    labels = []
    for mark in marks:
        tries = ((mark.name, 46.0, [*taken, *soft]), (mark.name, 30.0, taken), (mark.key, 150.0, taken))
        found = next(
            (label for name, reach, hard in tries if (label := _free(mark, name, reach, hard, area))), None
        )
        if found:
            taken.append(label_box(found))
        labels.append(found or Label(mark, None))
    return labels


def _free(mark: Mark, name: str, reach: float, taken: Sequence[Box], area: Box) -> Label | None:
    """The nearest place around a mark where `name` meets nothing."""
    for distance in (10.0, 18.0, 30.0, 46.0, 66.0, 90.0, 118.0, 150.0):
        if distance > reach:
            return None
        for degrees in (0, 180, 270, 90, 315, 45, 225, 135, 292, 248, 68, 112, 337, 23, 203, 157):
            label = _at(mark, name, distance, math.radians(degrees))
            box = label_box(label)
            if area.holds(box) and not any(box.meets(other) for other in taken):
                return label
    return None


def _at(mark: Mark, name: str, distance: float, angle: float) -> Label:
    x, y = mark.x + distance * math.cos(angle), mark.y + distance * math.sin(angle)
    side = math.cos(angle)
    anchor = "middle" if abs(side) < 0.1 else "start" if side > 0 else "end"
    shift = 0.3 * FONT + 0.5 * FONT * math.sin(angle)
    return Label(mark, name, x, y + shift, anchor, far=distance > 14)
