"""Numbers as people read them; the same in the page, the terminal and the verdict.

A value of None is printed as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = [
    "NONE",
    "amount",
    "between",
    "budget",
    "decibels",
    "factor",
    "factors",
    "interval",
    "milliseconds",
    "percent",
    "points",
    "ratio",
    "shorten",
    "size",
    "span",
    "unit",
]

NONE = "–"
_MINUS = "−"


def amount(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals, more of them where it is small, none where it is large."""
    if value is None:
        return NONE
    if value and abs(value) < 0.5 * 10**-digits:
        text = f"{value:.1e}" if abs(value) < 1e-4 else f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"
    else:
        text = f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.{digits}f}"
    return text.replace("-", _MINUS)


def milliseconds(value: float | None) -> str:
    """Three significant digits: 0.0213, 1.37, 13.7, 914."""
    if value is None:
        return NONE
    if value <= 0:
        return "0"
    rounded = float(f"{value:.2e}")
    digits = max(0, 2 - math.floor(math.log10(rounded)))
    return f"{rounded:.{digits}f}"


def span(seconds: float | None) -> str:
    """A duration: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds is None:
        return NONE
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: float | None) -> str:
    """Bytes in decimal units: 812 B, 4.9 MB."""
    if count is None:
        return NONE
    for name, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.{1 if count < 100 * factor else 0}f} {name}"
    return f"{count:.0f} B"


def ratio(value: float | None) -> str:
    """A ratio: 1.41×, 0.87×, 12.3×, 0.012×."""
    return NONE if value is None else f"{factor(value)}×"


def factor(value: float) -> str:
    """A ratio without its sign: two decimals around 1, three significant digits elsewhere."""
    return f"{value:.2f}" if 0.095 <= value < 9.995 else milliseconds(value)


def factors(value: Mapping[str, Any] | None) -> str:
    """The bounds of a ratio's interval: 1.37–1.45; empty where none is known."""
    if not value or value["low"] is None or value["high"] is None:
        return ""
    return f"{factor(value['low'])}–{factor(value['high'])}"


def budget(value: float, metric: Mapping[str, Any] | None = None) -> str:
    """A budget as it was given, in the units of the metric: 0.5 points, 1 point."""
    return f"{value:g}{points(value, metric)}"


def points(value: float, metric: Mapping[str, Any] | None) -> str:
    """What follows a difference of the metric: points where the metric is in percent."""
    return "" if unit(metric) != "%" else " point" if value == 1 else " points"


def percent(share: float | None) -> str:
    """A share from 0 to 1; only all of it prints as 100 %."""
    if share is None:
        return NONE
    text = f"{100 * share:.1f}"
    if text == "100.0":
        text = "100" if share >= 1 else "99.9"
    return f"{text} %"


def decibels(value: float | None) -> str:
    """SQNR with one decimal; 200 dB stands for no difference."""
    if value is None:
        return NONE
    return "no difference" if value >= 200 else f"{amount(value, 1)} dB"


def between(low: float | None, high: float | None, digits: int = 2) -> str:
    """The bounds of an interval; `to` where a minus sign would meet a dash."""
    if low is None or high is None:
        return ""
    word = " to " if low < 0 or high < 0 else "–"
    return f"{amount(low, digits)}{word}{amount(high, digits)}"


def interval(value: Mapping[str, Any] | float | None, digits: int = 2) -> str:
    """`value (low–high)`, or the bare value where no interval is known."""
    if value is None:
        return NONE
    if not isinstance(value, Mapping):
        return amount(value, digits)
    bounds = between(value["low"], value["high"], digits)
    return amount(value["value"], digits) + (f" ({bounds})" if bounds else "")


def unit(metric: Mapping[str, Any] | None) -> str:
    """The metric's unit: "%" or ""."""
    if metric is None:
        return ""
    known = "%" if metric["name"].lower() in ("top1", "top5", "accuracy") else ""
    return str(metric.get("unit", known))


def shorten(text: str, length: int) -> str:
    """Cut out the middle, where names differ least, so that at most `length` characters remain."""
    if len(text) <= length:
        return text
    if length < 2:
        return "…"[:length]
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"
