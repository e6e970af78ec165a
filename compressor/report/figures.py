"""The report's figures as HTML: each drawing in a wide and a narrow version, with legend and caption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from compressor.report import causes, charts, tables
from compressor.report.svg import escape
from compressor.report.text import budget, metric_name, unit

__all__ = ["accuracy_and_latency", "layer_errors", "quality_name", "speed"]

WIDE, NARROW = 1150, 350
NAMED_WIDE, NAMED_NARROW = 14, 4
WORST, HINTED, FEW = 8, 300, 8
Data = Mapping[str, Any]
Value = tuple[float, charts.Bounds | None]


class _Axis(NamedTuple):
    """What the vertical axis shows; `up`: more is better."""

    read: Callable[[Data], Value | None]
    title: str
    up: bool
    is_metric: bool = False
    limits: charts.Bounds | None = None


def _both(draw: Callable[[int], str]) -> str:
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


def _legend(*items: tuple[str, str]) -> str:
    found = "".join(f'<li><i class="i-{kind}"></i>{escape(words)}</li>' for kind, words in items)
    return f'<ul class="legend">{found}</ul>'


def accuracy_and_latency(data: Data) -> str:
    """Quality against latency: the metric, else agreement, else SQNR, whichever was measured."""
    axis = _axis(data)
    points, left_out = [], []
    for engine in data["engines"]:
        value = axis.read(engine)
        if value is None or not engine["latency"]:
            left_out.append(f"{engine['target']} ({'no value' if value is None else 'no latency'})")
        else:
            points.append(_point(engine, value, data["metric"]))
    if not points:
        return ""
    tried = _tried(data, axis)
    points += tried
    line = _budget_line(data) if axis.is_metric else None
    missing = f" Not shown: {', '.join(left_out[:20])}." if left_out else ""
    bars = "vertical of the drop, horizontal of the speed" if axis.is_metric else "horizontal of the speed"
    caption = f"Up and to the left is better. Bars are 95 % intervals: {bars}, against float.{missing}"
    caption += _said_of_tried(data, tried)

    def draw(width: int) -> str:
        named = len(points) - len(tried) <= (NAMED_WIDE if width == WIDE else NAMED_NARROW)
        found = charts.scatter(
            points, axis.title, width, up=axis.up, budget=line, named=named, limits=axis.limits
        )
        keys = "".join(f"<li><b>{key or '–'}</b> {escape(name)}</li>" for key, name in found.keys)
        return found.svg + (f'<ul class="legend">{keys}</ul>' if keys else "")

    drawn = _both(draw)
    legend = _scatter_legend(data, points, drawn, line is not None)
    return f"<figure>{legend}{drawn}<figcaption>{escape(caption)}</figcaption></figure>"


def quality_name(data: Data) -> str:
    """What `accuracy_and_latency` shows on its vertical axis, for the heading."""
    return "Accuracy" if _axis(data).is_metric else "Agreement"


def _scatter_legend(data: Data, points: Sequence[charts.Point], drawn: str, with_budget: bool) -> str:
    """What is drawn, and nothing else."""
    words = {"base": "float baseline", "cand": "candidate", "tried": "tried", "rec": "recommended"}
    kinds = {point.kind for point in points} | {"base" for point in points if point.base}
    items = [(kind, said) for kind, said in words.items() if kind in kinds]
    if '<path class="fr"' in drawn:
        items.append(("fr", "Pareto front"))
    if with_budget:
        items.append(("bu", f"budget, {budget(data['max_drop'], data['metric'])} from float"))
    return _legend(*items)


def _tried(data: Data, axis: _Axis) -> list[charts.Point]:
    """Candidates of the search that were not delivered, where their time is known well enough to be drawn."""
    found = []
    for engine in data["engines"]:
        rungs = [rung for rung in data["rungs"] if rung["target"] == engine["target"]]
        kept = next((rung for rung in rungs if rung["kept"]), None)
        for rung in rungs:
            ms = _time(data, engine, kept, rung)
            shown = axis.is_metric and isinstance(rung["metric"], Mapping)
            value = axis.read(rung) if shown and not rung["kept"] and not rung.get("partial") else None
            if value is not None and ms is not None:
                hint = f"{engine['target']}, tried: {rung['name']}"
                found.append(charts.Point(rung["name"], ms, value[0], None, None, False, False, hint, True))
    return found


def _time(data: Data, engine: Data, kept: Data | None, rung: Data) -> float | None:
    """Milliseconds of a candidate: as raced against float, else as profiles tell beside the chosen one."""
    speed, ms = rung.get("speed"), rung.get("expected_ms")
    base = next(
        (item for item in data["engines"] if item["role"] == "baseline" and _place(item) == _place(engine)),
        None,
    )
    if speed and base and base["latency"]:
        return float(base["latency"]["p50_ms"] / speed)
    chosen = kept and kept.get("expected_ms")
    if ms and chosen and engine["latency"]:
        return float(engine["latency"]["p50_ms"] * ms / chosen)
    return None


def _place(engine: Data) -> str:
    """Runtime and device."""
    return str(engine["target"]).partition(":")[2]


def _said_of_tried(data: Data, drawn: Sequence[charts.Point]) -> str:
    left_out = sum(not rung["kept"] for rung in data["rungs"]) - len(drawn)
    said = " Latency of what was only tried is expected from profiles, or raced briefly." if drawn else ""
    if left_out:
        what = "candidate that was" if left_out == 1 else "candidates that were"
        said += f" Not shown: {left_out} {what} tried and not timed."
    return said


def _point(engine: Data, value: Value, metric: Data | None) -> charts.Point:
    return charts.Point(
        name=engine["target"],
        x=engine["latency"]["p50_ms"],
        y=value[0],
        x_bounds=charts.spread(engine["latency"]),
        y_bounds=value[1],
        base=engine["role"] == "baseline",
        chosen=engine["recommended"],
        hint=charts.hint(engine, metric),
    )


def _axis(data: Data) -> _Axis:
    engines, metric = data["engines"], data["metric"]
    if metric and any(engine["metric"] and engine["latency"] for engine in engines):
        title = f"{metric_name(metric)}{', %' if unit(metric) == '%' else ''}"
        up = metric["higher_is_better"]
        limits = (0.0, 100.0) if unit(metric) == "%" else None
        return _Axis(lambda engine: _metric(engine, up, limits), title, up, True, limits)
    if any((engine["agreement"] or {}).get("top1") is not None for engine in engines):
        return _Axis(_agreement, "agreement with float, %", True, limits=(0.0, 100.0))
    return _Axis(_sqnr, "SQNR, dB", True)


def _metric(engine: Data, up: bool, limits: charts.Bounds | None) -> Value | None:
    """The metric with the bounds of the paired drop, which leaves out the chance that all engines share.

    The bounds are held within `limits`, which the metric cannot leave.
    """
    metric, drop = engine["metric"], engine["drop"]
    if not metric:
        return None
    if not drop or drop["low"] is None or drop["high"] is None:
        return metric["value"], None
    worse, better = max(0.0, drop["high"] - drop["value"]), max(0.0, drop["value"] - drop["low"])
    below, above = (worse, better) if up else (better, worse)
    low, high = metric["value"] - below, metric["value"] + above
    return metric["value"], (max(low, limits[0]), min(high, limits[1])) if limits else (low, high)


def _agreement(engine: Data) -> Value | None:
    share = 1.0 if engine["role"] == "baseline" else (engine["agreement"] or {}).get("top1")
    return None if share is None else (100 * share, None)


def _sqnr(engine: Data) -> Value | None:
    value = (engine["agreement"] or {}).get("sqnr_db")
    return None if value is None else (value, None)


def _budget_line(data: Data) -> float | None:
    """The metric at which the budget breaks, if all baselines agree on it within a tenth of the budget."""
    bases = [
        engine["metric"]["value"]
        for engine in data["engines"]
        if engine["role"] == "baseline" and engine["metric"]
    ]
    if data["max_drop"] is None or not bases or max(bases) - min(bases) > 0.1 * data["max_drop"]:
        return None
    sign = 1 if data["metric"]["higher_is_better"] else -1
    return float(bases[0] - sign * data["max_drop"])


def speed(data: Data) -> str:
    """Speed ratios against the float engine of the same runtime, with intervals and noise."""
    engines = [
        engine for engine in data["engines"] if engine["latency"] and engine["latency"]["ratio_to_baseline"]
    ]
    if not engines:
        return ""
    legend = [("eq", "±2 %: the same speed")]
    if any(engine["latency"]["aa_noise"] for engine in engines):
        legend.append(("aa", "float against itself (A/A): the noise of this machine"))
    missing = tables.without_interval(engines)
    lead = '<p class="lead">Above 1 is faster. Measured in alternation, with 95 % intervals.</p>'
    drawn = _both(lambda width: charts.forest(engines, width))
    return f"{lead}<figure>{_legend(*legend)}{drawn}</figure>{missing}"


def layer_errors(data: Data) -> str:
    """SQNR of each layer, per target; the first target is unfolded."""
    found = {target: items for target, items in data["layers"].items() if items}
    if not found:
        return ""
    hints = sum(map(len, found.values())) <= HINTED
    parts = [
        _layer_part(target, items, is_open=index == 0, hints=hints)
        for index, (target, items) in enumerate(found.items())
    ]
    lead = "Signal to quantization noise of each layer's output; higher is better."
    lead += " The worst are in red." if any(len(items) >= FEW for items in found.values()) else ""
    return f'<p class="lead">{lead}</p>{"".join(parts)}'


def _layer_part(target: str, items: Sequence[Data], *, is_open: bool, hints: bool) -> str:
    known = [index for index, item in enumerate(items) if item["sqnr_db"] is not None]
    worst = sorted(known, key=lambda index: items[index]["sqnr_db"])[:WORST]
    red = set(worst[: max(1, len(items) // 4)])
    drawn = ""
    if len(items) >= FEW:
        drawn = _both(lambda width: charts.layers(items, red, width, hints=hints and width == WIDE))
    return (
        f"<details{' open' if is_open else ''}><summary>{tables.code(target, 120)}</summary>"
        f"<figure>{drawn}</figure>{tables.worst_layers(items, worst)}{causes.page(items)}</details>"
    )
