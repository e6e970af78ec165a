"""Numbers as people read them; the same in the page, the terminal and the verdict.

A value of None is printed as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "NONE",
    "Form",
    "amount",
    "between",
    "budget",
    "decibels",
    "differences",
    "factor",
    "factors",
    "interval",
    "metric_name",
    "milliseconds",
    "percent",
    "points",
    "quantities",
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


Form = Callable[[float | None], str]


def metric_name(metric: Mapping[str, Any] | None, otherwise: str = "metric") -> str:
    """What a metric is called; a function of the user's by its name, without the file that holds it."""
    return str(metric["name"]).rpartition(":")[2] if metric else otherwise


def quantities(metric: Mapping[str, Any] | None) -> Form:
    """How values of the metric are written: two decimals in percent, else four significant digits."""
    return amount if metric is None or unit(metric) == "%" else lambda value: _significant(value, 4)


def differences(metric: Mapping[str, Any] | None) -> Form:
    """How differences of the metric are written: two decimals in percent, else three significant digits."""
    return amount if metric is None or unit(metric) == "%" else lambda value: _significant(value, 3)


def _significant(value: float | None, digits: int) -> str:
    if not value:
        return NONE if value is None else "0"
    rounded = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    if not -5 < exponent < 7:
        return f"{value:.{digits - 1}e}".replace("-", _MINUS)
    return f"{rounded:.{max(0, digits - 1 - exponent)}f}".replace("-", _MINUS)


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
    """The bounds of a ratio's interval: 1.37–1.45, 1.108–1.113; empty where none is known."""
    if not value or value["low"] is None or value["high"] is None:
        return ""
    low, high = factor(value["low"]), factor(value["high"])
    if low == high and 0.095 <= value["low"] < value["high"] < 9.995:
        low, high = f"{value['low']:.3f}", f"{value['high']:.3f}"
    return f"{low}–{high}"


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


def between(low: float | None, high: float | None, form: Form = amount) -> str:
    """The bounds of an interval; `to` where a minus sign would meet a dash."""
    if low is None or high is None:
        return ""
    word = " to " if low < 0 or high < 0 else "–"
    ends = form(low), form(high)
    if form is amount and ends[0] == ends[1] and low != high:
        ends = amount(low, 3), amount(high, 3)
    return word.join(ends)


def interval(value: Mapping[str, Any] | float | None, form: Form = amount) -> str:
    """`value (low–high)`, or the bare value where no interval is known."""
    if value is None:
        return NONE
    if not isinstance(value, Mapping):
        return form(value)
    bounds = between(value["low"], value["high"], form)
    return form(value["value"]) + (f" ({bounds})" if bounds else "")


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
