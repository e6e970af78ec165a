"""The report as one HTML file: no network, no dependency, light and dark, screen and paper."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compressor.report import charts, tables
from compressor.report.style import CSS, SCRIPT
from compressor.report.svg import escape
from compressor.report.text import (
    amount,
    between,
    decibels,
    interval,
    milliseconds,
    percent,
    ratio,
    shorten,
    size,
    span,
    unit,
)

__all__ = ["notebook", "render"]

WIDE, NARROW = 900, 350
WORST, HINTED = 8, 300
Data = Mapping[str, Any]


def render(data: Data) -> str:
    """The whole page for validated report data; below 300 kB for a dozen engines of 200 layers."""
    sections = (
        _top(data),
        _scatter(data),
        _section("Engines", tables.engines(data)),
        _forest(data),
        _islands(data),
        _layers(data),
        _attempts(data),
        _section("Targets not made", tables.skipped(data)) if data["skipped"] else "",
        _section("Files", tables.files(data)) if data["engines"] else "",
        _run(data),
    )
    name = escape(shorten(str(data["model"]["path"]).rsplit("/", 1)[-1], 80))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name}: compression report</title><style>{CSS}</style>"
    )
    body = f"<main>{''.join(sections)}</main><script>{SCRIPT}</script>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def notebook(data: Data) -> str:
    """Verdict and a compact table for a notebook cell, styled in place."""
    cell = 'style="text-align:left;padding:3px 12px 3px 0"'
    names = (
        "engine",
        "size",
        "p50, ms",
        "speed",
        data["metric"]["name"] if data["metric"] else "metric",
        "drop",
    )
    head = "".join(f"<th {cell}>{escape(name)}</th>" for name in names)
    rows = []
    for engine in data["engines"]:
        latency = engine["latency"] or {"p50_ms": None, "ratio_to_baseline": None}
        drop = interval(engine["drop"]) + (f" {engine['drop']['verdict'] or ''}" if engine["drop"] else "")
        values = (
            engine["target"] + (" ★" if engine["recommended"] else ""),
            size(engine["size_bytes"]),
            milliseconds(latency["p50_ms"]),
            interval(latency["ratio_to_baseline"]),
            interval(engine["metric"]),
            drop,
        )
        rows.append("<tr>" + "".join(f"<td {cell}>{escape(value)}</td>" for value in values) + "</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div><p><strong>{escape(data['headline'])}</strong></p>{table}</div>"


def _section(title: str, *parts: str, lead: str = "") -> str:
    said = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{said}{''.join(parts)}</section>"


# ------------------------------------------------------------------ top


def _top(data: Data) -> str:
    headline = escape(data["headline"])
    for engine in data["engines"]:
        if engine["recommended"]:
            headline = headline.replace(escape(engine["target"]), tables.code(engine["target"]), 1)
    lines = [
        f"<li>{tables.code(line['target'], 120)}<br>{escape(line['text'])}</li>" for line in data["verdict"]
    ]
    notes = "".join(f"<li>{escape(shorten(note, 600))}</li>" for note in data["notes"][:40])
    what = f"Compression of {tables.code(data['model']['path'])}, {escape(data['created'])}"
    return (
        f'<header><p class="over">{what}</p>'
        f'<div class="verdict {_tone(data)}"><h1>{headline}</h1></div></header>{_tiles(data)}'
        f'<ul class="lines" aria-label="Verdict on each engine">{"".join(lines)}</ul>'
        + (f'<aside class="notes" aria-label="Notes"><ul>{notes}</ul></aside>' if notes else "")
    )


def _tone(data: Data) -> str:
    candidates = [engine for engine in data["engines"] if engine["role"] == "candidate"]
    verdicts = [engine["drop"]["verdict"] if engine["drop"] else None for engine in candidates]
    if verdicts and all(verdict == "broken" for verdict in verdicts):
        return "bad"
    chosen = [engine for engine in candidates if engine["recommended"]]
    return "good" if chosen and chosen[0]["drop"] and chosen[0]["drop"]["verdict"] != "undecided" else "warn"


def _tiles(data: Data) -> str:
    """The four numbers of the engine that matters most: the recommended candidate, else the first."""
    candidates = [engine for engine in data["engines"] if engine["role"] == "candidate"]
    if not candidates:
        return ""
    engine = next((item for item in candidates if item["recommended"]), candidates[0])
    tiles = [_speed_tile(engine), _size_tile(data, engine), *_quality_tiles(data, engine)]
    found = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{value}</b><span>{escape(under)}</span></div>'
        for name, value, under in tiles
    )
    return f'<div class="tiles" aria-label="{escape(engine["target"])} in numbers">{found}</div>'


Tile = tuple[str, str, str]


def _speed_tile(engine: Data) -> Tile:
    speed = engine["latency"] and engine["latency"]["ratio_to_baseline"]
    if not speed:
        return "Speed against float", "–", "not measured"
    return (
        "Speed against float",
        ratio(speed["value"]),
        f"{between(speed['low'], speed['high'])}, 95 % interval",
    )


def _size_tile(data: Data, engine: Data) -> Tile:
    place = engine["target"].split(":")[1:]
    for other in data["engines"]:
        if other["role"] == "baseline" and other["target"].split(":")[1:] == place:
            return "Size", size(engine["size_bytes"]), f"float: {size(other['size_bytes'])}"
    return "Size", size(engine["size_bytes"]), ""


def _quality_tiles(data: Data, engine: Data) -> list[Tile]:
    agreement, drop = engine["agreement"], engine["drop"]
    tiles = []
    if drop:
        name = f"{data['metric']['name'] if data['metric'] else 'Accuracy'} drop"
        points = ", points" if unit(data["metric"]) == "%" else ""
        bounds = between(drop["low"], drop["high"])
        budget = f"; {drop['verdict']} (budget {amount(data['max_drop'])})" if drop["verdict"] else ""
        tiles.append((name + points, amount(drop["value"]), bounds + budget))
    else:
        tiles.append(("Accuracy", "unknown", "no labels"))
    if agreement and agreement["top1"] is not None:
        under = f"SQNR {decibels(agreement['sqnr_db'])}" if agreement["sqnr_db"] is not None else ""
        tiles.append(("Predictions as in float", percent(agreement["top1"]), under))
    elif agreement and agreement["sqnr_db"] is not None:
        tiles.append(("Outputs against float", decibels(agreement["sqnr_db"]), "SQNR"))
    return tiles


# ------------------------------------------------------------------ drawings


def _drawing(draw: Callable[[int], str]) -> str:
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


def _legend(*items: tuple[str, str]) -> str:
    found = "".join(f'<li><i class="i-{kind}"></i>{escape(words)}</li>' for kind, words in items)
    return f'<ul class="legend">{found}</ul>'


def _scatter(data: Data) -> str:
    """Quality against latency: the metric, else agreement, else SQNR, whichever was measured."""
    quality, title, up = _quality(data["engines"], data["metric"])
    points, left_out = [], []
    for engine in data["engines"]:
        value = quality(engine)
        if value is None or not engine["latency"]:
            left_out.append(f"{engine['target']} ({'no latency' if value is not None else 'no quality'})")
            continue
        kind = "rec" if engine["recommended"] else "base" if engine["role"] == "baseline" else "cand"
        bounds = None if value["low"] is None or value["high"] is None else (value["low"], value["high"])
        spread = charts.spread(engine["latency"])
        points.append(
            charts.Point(
                engine["target"],
                engine["latency"]["p50_ms"],
                value["value"],
                spread,
                bounds,
                kind,
                charts.hint(engine),
            )
        )
    if not points:
        return ""
    legend = [
        ("base", "float baseline"),
        ("cand", "candidate"),
        ("rec", "recommended"),
        ("fr", "Pareto front"),
    ]
    budget = _budget(data) if title.startswith(data["metric"]["name"] if data["metric"] else "\0") else None
    legend += [("bu", f"budget: {amount(data['max_drop'])} below float")] if budget is not None else []
    missing = f" Not shown: {', '.join(left_out[:20])}." if left_out else ""
    caption = (
        f"Up and to the left is better. Vertical bars: 95 % interval of the {title.split(',')[0]}; "
        f"horizontal: of the speed ratio.{missing}"
    )

    def draw(width: int) -> str:
        found = charts.scatter(points, title, width, up=up, budget=budget)
        keys = "; ".join(f"{key or '–'}: {name}" for key, name in found.keys)
        return found.svg + (f"<figcaption>{escape(keys)}</figcaption>" if keys else "")

    figure = f"<figure>{_legend(*legend)}{_drawing(draw)}<figcaption>{escape(caption)}</figcaption></figure>"
    return _section("Accuracy and latency", figure)


Quality = Callable[[Data], dict[str, Any] | None]


def _quality(engines: Sequence[Data], metric: Data | None) -> tuple[Quality, str, bool]:
    if metric and any(engine["metric"] and engine["latency"] for engine in engines):
        percent_sign = ", %" if unit(metric) else ""
        return (
            (lambda engine: engine["metric"]),
            f"{metric['name']}{percent_sign}",
            metric["higher_is_better"],
        )

    def agreement(engine: Data) -> dict[str, Any] | None:
        share = 1.0 if engine["role"] == "baseline" else (engine["agreement"] or {}).get("top1")
        return None if share is None else {"value": 100 * share, "low": None, "high": None}

    def sqnr(engine: Data) -> dict[str, Any] | None:
        value = (engine["agreement"] or {}).get("sqnr_db")
        return None if value is None else {"value": value, "low": None, "high": None}

    if any((engine["agreement"] or {}).get("top1") is not None for engine in engines):
        return agreement, "agreement with float, %", True
    return sqnr, "SQNR, dB", True


def _budget(data: Data) -> float | None:
    """The value of the metric at which the budget breaks, where all baselines agree on it within it."""
    bases = [
        engine["metric"]["value"]
        for engine in data["engines"]
        if engine["role"] == "baseline" and engine["metric"]
    ]
    if data["max_drop"] is None or not bases or max(bases) - min(bases) > 0.1 * data["max_drop"]:
        return None
    sign = 1 if data["metric"]["higher_is_better"] else -1
    return float(bases[0] - sign * data["max_drop"])


def _forest(data: Data) -> str:
    engines = [
        engine for engine in data["engines"] if engine["latency"] and engine["latency"]["ratio_to_baseline"]
    ]
    if not engines:
        return ""
    legend = [("eq", "±2 %: the same speed")]
    if any(engine["latency"]["aa_noise"] for engine in engines):
        legend.append(("aa", "float against itself (A/A): the noise of this machine"))
    figure = f"<figure>{_legend(*legend)}{_drawing(lambda width: charts.forest(engines, width))}</figure>"
    return _section(
        "Speed against float", figure, lead="Above 1 is faster. Measured in alternation, with 95 % intervals."
    )


def _islands(data: Data) -> str:
    parts = []
    for engine in data["engines"]:
        if engine["role"] == "candidate" and engine["precision"] and engine["precision"]["float_islands"]:
            share = percent(engine["precision"]["share_int8"])
            parts.append(
                f"<h3>{tables.code(engine['target'], 120)}: {share} in int8</h3>{tables.islands(engine)}"
            )
    if not parts:
        return ""
    return _section("What runs in float", *parts, lead="Shares of the compute, as the runtime executes it.")


def _layers(data: Data) -> str:
    found = {target: items for target, items in data["layers"].items() if items}
    if not found:
        return ""
    hints = sum(map(len, found.values())) <= HINTED
    parts = [
        _layer_part(target, items, is_open=index == 0, hints=hints)
        for index, (target, items) in enumerate(found.items())
    ]
    lead = "Signal to quantization noise of each layer's output; higher is better. The worst are in red."
    return _section("Error by layer", *parts, lead=lead)


def _layer_part(target: str, items: Sequence[Data], *, is_open: bool, hints: bool) -> str:
    known = [index for index, item in enumerate(items) if item["sqnr_db"] is not None]
    worst = sorted(known, key=lambda index: items[index]["sqnr_db"])[:WORST]
    drawn = _drawing(lambda width: charts.layers(items, set(worst), width, hints=hints and width == WIDE))
    return (
        f"<details{' open' if is_open else ''}><summary>{tables.code(target, 120)}</summary>"
        f"<figure>{drawn}</figure>{tables.worst_layers(items, worst)}</details>"
    )


def _attempts(data: Data) -> str:
    if not data["rungs"]:
        return ""
    total = span(sum(rung["seconds"] for rung in data["rungs"]))
    lead = f"{len(data['rungs'])} in {total}, the cheapest first, until one keeps the budget."
    return _section("What was tried", tables.rungs(data), lead=lead)


# ------------------------------------------------------------------ run


def _run(data: Data) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in _facts(data))
    command = escape(shlex.join(data["command"]))
    copy = f'<div class="command"><button type="button" hidden>Copy</button><pre>{command}</pre></div>'
    return (
        _section("Reproduce", copy)
        + _section("Model, data, machine", f"<dl>{facts}</dl>")
        + (_section("Cost of each step", tables.steps(data)) if data["steps"] else "")
    )


def _facts(data: Data) -> list[tuple[str, str]]:
    model = data["model"]
    count = "" if model["parameters"] is None else f", {model['parameters']:,} parameters".replace(",", " ")
    facts = [
        ("Model", f"{tables.code(model['path'])}{escape(count.replace('  ', ', '))}"),
        ("Model SHA-256", tables.code(model["sha256"])),
    ]
    for name, part in (
        ("Calibration", data["data"]["calibration"]),
        ("Evaluation", data["data"]["evaluation"]),
    ):
        if part:
            source = f" from {tables.code(part['source'])}" if part.get("source") else ""
            facts.append(
                (f"{name} data", f"{part['n']} samples{source}, SHA-256 {tables.code(part['sha256'])}")
            )
        else:
            facts.append((f"{name} data", "none"))
    budget = "none" if data["max_drop"] is None else amount(data["max_drop"])
    facts += [("Budget (--max-drop)", budget), ("Seed", str(data["seed"]))]
    return facts + [(_words(key), _value(key, value)) for key, value in data["machine"].items() if value]


def _words(key: str) -> str:
    known = {"cpu": "CPU", "gpus": "GPUs", "os": "System", "memory_bytes": "Memory", "python": "Python"}
    return known.get(key, key.replace("_", " ").capitalize())


def _value(key: str, value: Any) -> str:
    """A fact about the machine, whatever its form."""
    if key.endswith("_bytes"):
        return escape(size(value))
    if isinstance(value, Mapping):
        return escape(", ".join(f"{name} {item}" for name, item in value.items()))
    if isinstance(value, list):
        return (
            "; ".join(_value("", item) for item in value)
            if any(isinstance(item, Mapping) for item in value)
            else escape(" ".join(map(str, value)))
        )
    return escape(f"{value:g}" if isinstance(value, float) else value)
