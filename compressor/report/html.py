"""The report as one HTML file: no network, no dependency, light and dark, screen and paper."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.report import figures, tables
from compressor.report.style import CSS, SCRIPT
from compressor.report.svg import escape
from compressor.report.text import (
    between,
    budget,
    decibels,
    differences,
    factors,
    interval,
    metric_name,
    milliseconds,
    percent,
    points,
    quantities,
    ratio,
    shorten,
    size,
    span,
)
from compressor.report.verdict import unknown

__all__ = ["notebook", "render"]

FOLDED = 4
_ORIGINS = {"architecture": "the architecture", "default": "the defaults"}
Data = Mapping[str, Any]


def render(data: Data) -> str:
    """The whole page for validated report data; below 300 kB for a dozen engines of 200 layers."""
    sections = (
        _top(data),
        _figure(f"{figures.quality_name(data)} and latency", figures.accuracy_and_latency(data)),
        _section("Engines", tables.engines(data)),
        _figure("Speed against float", figures.speed(data)),
        _islands(data),
        _figure("Error by layer", figures.layer_errors(data)),
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
        metric_name(data["metric"]),
        "drop",
    )
    head = "".join(f"<th {cell}>{escape(name)}</th>" for name in names)
    rows = []
    for engine in data["engines"]:
        latency = engine["latency"] or {"p50_ms": None, "ratio_to_baseline": None}
        drop = interval(engine["drop"], differences(data["metric"])) + (
            f" {engine['drop']['verdict'] or ''}" if engine["drop"] else ""
        )
        values = (
            engine["target"] + (" ★" if engine["recommended"] else ""),
            size(engine["size_bytes"]),
            milliseconds(latency["p50_ms"]),
            _speed(latency["ratio_to_baseline"]),
            interval(engine["metric"], quantities(data["metric"])),
            drop,
        )
        rows.append("<tr>" + "".join(f"<td {cell}>{escape(value)}</td>" for value in values) + "</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div><p><strong>{escape(data['headline'])}</strong></p>{table}</div>"


def _speed(speed: Data | None) -> str:
    bounds = factors(speed)
    return ratio(speed["value"] if speed else None) + (f" ({bounds})" if bounds else "")


def _figure(title: str, figure: str) -> str:
    return _section(title, figure) if figure else ""


def _section(title: str, *parts: str, lead: str = "") -> str:
    said = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{said}{''.join(parts)}</section>"


# ------------------------------------------------------------------ top


def _top(data: Data) -> str:
    headline = escape(data["headline"])
    for engine in data["engines"]:
        if engine["recommended"]:
            headline = headline.replace(escape(engine["target"]), tables.code(engine["target"]), 1)
    notes = "".join(f"<li>{escape(shorten(note, 600))}</li>" for note in data["notes"][:40])
    what = f"Compression of {tables.code(data['model']['path'])}, {escape(_moment(data['created']))}"
    return (
        f'<header><p class="over">{what}</p>'
        f'<div class="verdict {_tone(data)}"><h1>{headline}</h1></div></header>{_tiles(data)}'
        + _lines(data["verdict"])
        + (f'<aside class="notes" aria-label="Notes"><ul>{notes}</ul></aside>' if notes else "")
    )


def _lines(verdict: Sequence[Data]) -> str:
    """A verdict per candidate; many of them are folded away. The headline speaks for a single one."""
    if len(verdict) < 2:
        return ""
    items = []
    for line in verdict:
        conclusion, _, facts = line["text"].partition(". ")
        said = f"<strong>{escape(conclusion)}.</strong> {escape(facts)}"
        items.append(f"<li>{tables.code(line['target'], 120)}<br>{said}</li>")
    body = f'<ul class="lines" aria-label="Verdict on each engine">{"".join(items)}</ul>'
    if len(verdict) <= FOLDED:
        return body
    return f"<details><summary>The verdict on each of {len(verdict)} engines</summary>{body}</details>"


def _moment(created: str) -> str:
    """2026-11-30T14:05:11+00:00 as people write it."""
    return created.replace("T", " ").replace("+00:00", " UTC")


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
    whose = f'<p class="whose">{tables.code(engine["target"], 120)} against float</p>'
    return f'{whose}<div class="tiles">{found}</div>'


Tile = tuple[str, str, str]


def _speed_tile(engine: Data) -> Tile:
    speed = engine["latency"] and engine["latency"]["ratio_to_baseline"]
    if not speed:
        return "Speed", "–", "not measured"
    return (
        "Speed",
        ratio(speed["value"]),
        f"{factors(speed)}, 95 % interval" if factors(speed) else "not proven",
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
        name = f"{metric_name(data['metric'], 'Accuracy')} drop"
        form = differences(data["metric"])
        bounds = between(drop["low"], drop["high"], form)
        judged = data["max_drop"] is not None
        held = (
            f"; {drop['verdict']} (budget {budget(data['max_drop'], data['metric'])})"
            if drop["verdict"] and judged
            else ""
        )
        counted = points(drop["value"], data["metric"]).strip()
        tiles.append((name, f"{form(drop['value'])} <small>{counted}</small>", bounds + held))
    else:
        tiles.append(("Accuracy", "unknown", shorten(unknown(data, engine), 160)))
    if agreement and agreement["top1"] is not None:
        under = f"SQNR {decibels(agreement['sqnr_db'])}" if agreement["sqnr_db"] is not None else ""
        tiles.append(("Predictions as in float", percent(agreement["top1"]), under))
    elif agreement and agreement["sqnr_db"] is not None:
        tiles.append(("Outputs against float", decibels(agreement["sqnr_db"]), "SQNR"))
    return tiles


# ------------------------------------------------------------------ middle


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


def _attempts(data: Data) -> str:
    if not data["rungs"]:
        return ""
    total = span(sum(rung["seconds"] for rung in data["rungs"]))
    count = len(data["rungs"])
    lead = f"1 attempt, {total}." if count == 1 else f"{count} attempts, {total} in all, in this order."
    return _section("What was tried", tables.rungs(data), lead=lead)


# ------------------------------------------------------------------ run


def _run(data: Data) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in _facts(data))
    command = escape(shlex.join(data["command"]))
    copy = f'<div class="command"><button type="button" hidden>Copy</button><pre>{command}</pre></div>'
    return (
        _section("Reproduce", copy, _options(data))
        + _section("Model, data, machine", f"<dl>{facts}</dl>")
        + (_section("Cost of each step", tables.steps(data)) if data["steps"] else "")
    )


def _options(data: Data) -> str:
    """The options that took effect, those of an options file and the defaults included."""
    options = data.get("options")
    if not isinstance(options, Mapping) or not options:
        return ""
    facts = "".join(
        f"<dt>{escape(_words(name))}</dt><dd>{_value(name, value)}</dd>" for name, value in options.items()
    )
    summary = "All options that took effect, defaults and options files included"
    return f"<details><summary>{summary}</summary><dl>{facts}</dl></details>"


def _facts(data: Data) -> list[tuple[str, str]]:
    model = data["model"]
    count = "" if model["parameters"] is None else f", {model['parameters']:,} parameters"
    facts = [
        ("Model", f"{tables.code(model['path'])}{count}"),
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
    if data["data"].get("disjoint"):
        facts.append(("Overlap", "none: no sample is in both calibration and evaluation"))
    facts += _preprocessing(data["data"])
    allowed = "none" if data["max_drop"] is None else budget(data["max_drop"], data["metric"])
    facts += [("Budget (--max-drop)", allowed), ("Seed", str(data["seed"]))]
    return facts + [(_words(key), _value(key, value)) for key, value in data["machine"].items() if value]


def _preprocessing(data: Data) -> list[tuple[str, str]]:
    """How samples are made into inputs and who says so; one row where it is the same for all data."""
    said = {}
    for role in ("calibration", "evaluation"):
        part = data[role]
        if part and "preprocess" in part:
            origin = part.get("preprocess_from")
            plan = ", ".join(
                _step(*item) for item in (part["preprocess"] or {}).items() if item[1] is not None
            )
            source = f" (from {escape(_ORIGINS.get(origin, origin))})" if origin and plan else ""
            said[role] = f"{escape(plan)}{source}" if plan else "none"
    if len(set(said.values())) <= 1:
        return [("Preprocessing", value) for value in list(said.values())[:1]]
    return [(f"Preprocessing, {role}", value) for role, value in said.items()]


def _step(name: str, value: Any) -> str:
    """A part of the preprocessing in the form that --preprocess takes."""
    sign = "x" if name in ("resize", "crop") else "/"
    values = value if isinstance(value, list | tuple) else [value]
    return f"{name} " + sign.join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in values)


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
