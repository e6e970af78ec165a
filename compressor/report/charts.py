"""The report's drawings as SVG text: accuracy against latency, speed ratios, error by layer.

Each takes a width, since a page holds a wide and a narrow version and shows the one that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compressor.report.svg import (
    Box,
    Label,
    Mark,
    Scale,
    escape,
    fit,
    label_box,
    linear_ticks,
    log_ticks,
    place,
    text,
)
from compressor.report.text import (
    decibels,
    differences,
    factors,
    interval,
    milliseconds,
    percent,
    quantities,
    ratio,
)

__all__ = ["Point", "Scatter", "forest", "hint", "layers", "scatter", "spread"]

Bounds = tuple[float, float]


class Point(NamedTuple):
    """An engine in the scatter; bounds None: no interval is known. `base`: a float baseline.

    `tried`: a candidate of the search that was not delivered; it has no label, only its hint.
    """

    name: str
    x: float
    y: float
    x_bounds: Bounds | None
    y_bounds: Bounds | None
    base: bool
    chosen: bool
    hint: str
    tried: bool = False

    @property
    def kind(self) -> str:
        """Its class in the style sheet."""
        return "rec" if self.chosen else "base" if self.base else "tried" if self.tried else "cand"


class Scatter(NamedTuple):
    """A drawing, and the names of the points that it shows by number only (None: not even that)."""

    svg: str
    keys: list[tuple[str | None, str]]


def scatter(
    points: Sequence[Point],
    title: str,
    width: int,
    *,
    up: bool,
    budget: float | None,
    named: bool,
    limits: Bounds | None = None,
) -> Scatter:
    """Latency (ms, logarithmic, left is better) against quality; `up`: more is better, else the axis turns.

    The axis of quality stays within `limits`. Both intervals are drawn; the line joins the points that no
    other beats in both. Without `named` every point is labelled by its number.
    """
    height = 400 if width > 500 else 320
    area = Box(52, 14, width - 14, height - 46)
    x, y = _axes(points, area, up, budget, limits or (float("-inf"), float("inf")))
    engines = [point for point in points if not point.tried]
    order = sorted(
        range(len(engines)), key=lambda index: (not engines[index].chosen, not engines[index].base)
    )
    keys = [str(index + 1) for index in range(len(engines))]
    marks = [
        Mark(
            x(engines[index].x),
            y(engines[index].y),
            engines[index].name if named else keys[index],
            keys[index],
        )
        for index in order
    ]
    labels = place(marks, area, _obstacles(points, x, y, area, budget))
    parts = [_grid(x, y, area, title), _budget(budget, y, area), _frontier(points, x, y, up)]
    parts += [_bars(point, x, y) for point in points]
    parts += [_marker(point, x(point.x), y(point.y)) for point in points]
    parts += [_label(label) for label in labels]
    shown = {key: (label.text, engines[index].name) for key, index, label in _keyed(order, keys, labels)}
    missing = [shown[key] for key in keys if shown[key][0] != shown[key][1]]
    names = ", ".join(point.name for point in engines)
    return Scatter(_svg(width, height, f"{title} against latency of {names}", parts), missing)


def _keyed(
    order: Sequence[int], keys: Sequence[str], labels: Sequence[Label]
) -> list[tuple[str, int, Label]]:
    return [(keys[index], index, label) for index, label in zip(order, labels, strict=True)]


def _obstacles(points: Sequence[Point], x: Scale, y: Scale, area: Box, budget: float | None) -> list[Box]:
    """Ground that a label should leave free if it can."""
    boxes = [box for point in points for box in _bar_boxes(point, x, y)]
    if budget is not None:
        boxes += [Box(area.x0, y(budget) - 2, area.x1, y(budget) + 2)]
        boxes += [Box(area.x0, y(budget) - 15, area.x0 + 60, y(budget))]
    return boxes


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'


def _axes(
    points: Sequence[Point], area: Box, up: bool, budget: float | None, limits: Bounds
) -> tuple[Scale, Scale]:
    times = [value for point in points for value in (point.x, *(point.x_bounds or ()))]
    margin = max((max(times) / min(times)) ** 0.12, 1.08)
    x = Scale(min(times) / margin, max(times) * margin, area.x0, area.x1, log=True)
    values = [value for point in points for value in (point.y, *(point.y_bounds or ()))]
    values += [budget] if budget is not None else []
    low, high = min(values), max(values)
    room = (high - low) * 0.1 or abs(high) * 0.02 or 1.0
    bottom, top = (area.y1, area.y0) if up else (area.y0, area.y1)
    return x, Scale(max(low - room, limits[0]), min(high + room, limits[1]), bottom, top)


def _grid(x: Scale, y: Scale, area: Box, title: str) -> str:
    parts = []
    for tick in log_ticks(x.low, x.high, 3 + int((area.x1 - area.x0) / 200)):
        place_x = x(tick)
        parts.append(f'<path class="gr" d="M{place_x:.1f} {area.y0}V{area.y1}"/>')
        parts.append(text(place_x, area.y1 + 16, _short(tick), anchor="middle"))
    for tick in linear_ticks(y.low, y.high, 6):
        parts.append(f'<path class="gr" d="M{area.x0} {y(tick):.1f}H{area.x1}"/>')
        parts.append(text(area.x0 - 6, y(tick) + 4, _short(tick), anchor="end"))
    middle_x, middle_y = (area.x0 + area.x1) / 2, (area.y0 + area.y1) / 2
    parts.append(text(middle_x, area.y1 + 36, "median latency, ms (log scale)", "ti", "middle"))
    turned = f'class="ti" text-anchor="middle" transform="translate(12 {middle_y:.0f}) rotate(-90)"'
    return "".join(parts) + f"<text {turned}>{escape(title)}</text>"


def _short(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def _budget(budget: float | None, y: Scale, area: Box) -> str:
    if budget is None:
        return ""
    line = f'<path class="bu" d="M{area.x0} {y(budget):.1f}H{area.x1}"/>'
    return line + text(area.x0 + 4, y(budget) - 4, "budget", "bt")


def _frontier(points: Sequence[Point], x: Scale, y: Scale, up: bool) -> str:
    """Steps along the points that no faster point matches in quality."""
    path, best = "", None
    for point in sorted(points, key=lambda point: (point.x, -point.y if up else point.y)):
        if best is None or (point.y > best if up else point.y < best):
            path += f"H{x(point.x):.1f}V{y(point.y):.1f}" if path else f"M{x(point.x):.1f} {y(point.y):.1f}"
            best = point.y
    return f'<path class="fr" d="{path}"/>' if "H" in path else ""


def _bar_boxes(point: Point, x: Scale, y: Scale) -> list[Box]:
    """The ground that a point's error bars cover."""
    boxes = []
    if point.x_bounds:
        left, right = (x(bound) for bound in point.x_bounds)
        boxes.append(Box(left, y(point.y) - 3, right, y(point.y) + 3))
    if point.y_bounds:
        top, bottom = sorted(y(bound) for bound in point.y_bounds)
        boxes.append(Box(x(point.x) - 3, top, x(point.x) + 3, bottom))
    return boxes


def _bars(point: Point, x: Scale, y: Scale) -> str:
    path = ""
    if point.x_bounds:
        left, right = (x(bound) for bound in point.x_bounds)
        path += f"M{left:.1f} {y(point.y) - 3:.1f}v6m0 -3H{right:.1f}m0 -3v6"
    if point.y_bounds:
        low, high = (y(bound) for bound in point.y_bounds)
        path += f"M{x(point.x) - 3:.1f} {low:.1f}h6m-3 0V{high:.1f}m-3 0h6"
    return f'<path class="eb {point.kind}" d="{path}"/>' if path else ""


def _marker(point: Point, x: float, y: float) -> str:
    hint = f"<title>{escape(point.hint)}</title>"
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' if point.chosen else ""
    if point.base:
        place_at = f'x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"'
        return f'{ring}<rect class="mk base {point.kind}" {place_at}>{hint}</rect>'
    radius = 4 if point.tried else 5
    return f'{ring}<circle class="mk {point.kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{hint}</circle>'


def _label(label: Label) -> str:
    if label.text is None:
        return ""
    line = ""
    if label.far:
        box = label_box(label)
        x = min(max(label.mark.x, box.x0), box.x1)
        y = min(max(label.mark.y, box.y0), box.y1)
        line = f'<path class="ld" d="M{label.mark.x:.1f} {label.mark.y:.1f}L{x:.1f} {y:.1f}"/>'
    return line + text(label.x, label.y, label.text, "lb", label.anchor)


def forest(engines: Sequence[Mapping[str, Any]], width: int) -> str:
    """Speed ratios with their intervals, a row each, over the ±2 % band and each row's A/A noise."""
    rows, row, top = [engine["latency"] for engine in engines], 46, 8
    height = top + row * len(rows) + 44
    bounds = [value for item in rows for value in _known(item["ratio_to_baseline"])]
    bounds += [value for item in rows if item["aa_noise"] for value in _known(item["aa_noise"])]
    low, high = min(0.95, *bounds), max(1.05, *bounds)
    x = Scale(low / 1.04, high * 1.04, 24, width - 24, log=True)
    floor = height - 40
    left, right = x(0.98), x(1.02)
    band = f'x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{floor - top}"'
    parts = [f'<rect class="eq" {band}/>']
    for tick in log_ticks(x.low, x.high, 2 + int(width / 200)):
        parts.append(f'<path class="gr" d="M{x(tick):.1f} {top}V{floor}"/>')
        parts.append(text(x(tick), floor + 16, f"{_short(tick)}×", anchor="middle"))
    parts.append(f'<path class="one" d="M{x(1):.1f} {top}V{floor}"/>')
    for index, engine in enumerate(engines):
        parts.append(_forest_row(engine, x, top + row * index, width))
    parts.append(text(width / 2, floor + 34, "speed against float, same runtime (log scale)", "ti", "middle"))
    return _svg(width, height, "Speed of each engine against the float engine of its runtime", parts)


def _known(value: Mapping[str, Any]) -> list[float]:
    return [bound for bound in (value["value"], value["low"], value["high"]) if bound is not None]


def _forest_row(engine: Mapping[str, Any], x: Scale, top: float, width: int) -> str:
    latency = engine["latency"]
    speed, noise = latency["ratio_to_baseline"], latency["aa_noise"]
    words = f"{ratio(speed['value'])} ({factors(speed)})" if factors(speed) else ratio(speed["value"])
    name = fit(engine["target"], width - 40 - len(words) * 7.5)
    middle, kind = top + 30, "rec" if engine["recommended"] else "cand"
    parts = [text(10, top + 16, name, "lb"), text(width - 10, top + 16, words, "lb", "end")]
    hint = f"{engine['target']}: {words}"
    if noise and noise["low"] is not None and noise["high"] is not None:
        left, right = x(noise["low"]), x(noise["high"])
        parts.append(
            f'<rect class="aa" x="{left:.1f}" y="{top + 22}" width="{right - left:.1f}" height="16"/>'
        )
        hint += f"; float against itself: {factors(noise)}"
    if speed["low"] is not None and speed["high"] is not None:
        left, right = x(speed["low"]), x(speed["high"])
        parts.append(f'<path class="eb {kind}" d="M{left:.1f} {middle - 5}v10m0 -5H{right:.1f}m0 -5v10"/>')
    mark = f'<circle class="mk {kind}" cx="{x(speed["value"]):.1f}" cy="{middle}" r="5">'
    return "".join(parts) + f"{mark}<title>{escape(hint)}</title></circle>"


def layers(items: Sequence[Mapping[str, Any]], worst: set[int], width: int, *, hints: bool) -> str:
    """SQNR of each layer by depth as bars; those whose index is in `worst` stand out and are numbered.

    `hints` adds a tooltip to every bar, which costs about 100 bytes each.
    """
    values = [item["sqnr_db"] for item in items]
    known = [value for value in values if value is not None]
    area = Box(40, 12, width - 8, 168)
    y = Scale(min(0.0, *known), max(10.0, *known) * 1.05, area.y1, area.y0)
    step = (area.x1 - area.x0) / len(items)
    parts = []
    for tick in linear_ticks(y.low, y.high, 4):
        parts.append(f'<path class="gr" d="M{area.x0} {y(tick):.1f}H{area.x1}"/>')
        parts.append(text(area.x0 - 6, y(tick) + 4, _short(tick), anchor="end"))
    for kind, chosen in (("bar", set(range(len(items))) - worst), ("bar bad", worst)):
        path = "".join(_bar(values[i], i, step, y, area) for i in sorted(chosen) if values[i] is not None)
        parts.append(f'<path class="{kind}" d="{path}"/>')
    if hints:
        parts += [_hint(item, index, step, area) for index, item in enumerate(items)]
    parts.append(text(area.x0, area.y1 + 18, "input", "tk"))
    parts.append(text(area.x1, area.y1 + 18, "output", "tk", "end"))
    parts.append(text((area.x0 + area.x1) / 2, area.y1 + 18, f"{len(items)} layers by depth", "ti", "middle"))
    return _svg(width, 194, f"SQNR in dB of {len(items)} layers by depth", parts)


def _bar(value: float, index: int, step: float, y: Scale, area: Box) -> str:
    gap = min(2.0, 0.2 * step)
    left, right = area.x0 + index * step + gap / 2, area.x0 + (index + 1) * step - gap / 2
    return f"M{left:.1f} {y(0):.1f}V{y(value):.1f}H{right:.1f}V{y(0):.1f}Z"


def _hint(item: Mapping[str, Any], index: int, step: float, area: Box) -> str:
    words = f"{item['name']} ({item['op']}): {decibels(item['sqnr_db'])}"
    left = area.x0 + index * step
    shape = f'x="{left:.1f}" y="{area.y0}" width="{step:.1f}" height="{area.y1 - area.y0}"'
    return f'<rect class="no" {shape}><title>{escape(words)}</title></rect>'


def hint(engine: Mapping[str, Any], metric: Mapping[str, Any] | None) -> str:
    """An engine in a few words, for a tooltip."""
    latency, agreement = engine["latency"], engine["agreement"]
    words = [engine["target"]]
    if latency:
        words.append(f"p50 {milliseconds(latency['p50_ms'])} ms")
        if latency["ratio_to_baseline"]:
            words.append(f"speed {ratio(latency['ratio_to_baseline']['value'])}")
    if engine["metric"]:
        words.append(f"metric {interval(engine['metric'], quantities(metric))}")
    if engine["drop"]:
        words.append(f"drop {interval(engine['drop'], differences(metric))}")
    if agreement and agreement["top1"] is not None:
        words.append(f"agreement {percent(agreement['top1'])}")
    return ", ".join(words)


def spread(latency: Mapping[str, Any]) -> Bounds | None:
    """The interval of the median latency, as far as the speed ratio's interval tells."""
    speed = latency["ratio_to_baseline"]
    if not speed or speed["low"] is None or speed["high"] is None:
        return None
    middle = latency["p50_ms"] * speed["value"]
    return middle / speed["high"], middle / speed["low"]
