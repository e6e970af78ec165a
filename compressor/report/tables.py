"""The report's tables as HTML text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from compressor.report.svg import escape
from compressor.report.text import (
    NONE,
    amount,
    between,
    decibels,
    factor,
    factors,
    milliseconds,
    percent,
    ratio,
    shorten,
    size,
    span,
    unit,
)

__all__ = ["code", "engines", "files", "islands", "rungs", "skipped", "steps", "worst_layers"]

MANY = 60
Data = Mapping[str, Any]
Column = tuple[str, Callable[[Data], str | None]]


def code(value: object, length: int = 300) -> str:
    """A name in monospace, whole as far as `length` goes."""
    return f"<code>{escape(shorten(str(value), length))}</code>"


def _target(target: str) -> str:
    """A target that breaks between its parts."""
    return code(target, 120).replace(":", ":<wbr>")


def _table(name: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """A table in a box of its own that scrolls sideways; `heads` and `rows` are HTML."""
    head = "".join(heads)
    body = "".join(rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _head(name: str, kind: str = "") -> str:
    return f'<th scope="col"{kind and f" class={kind}"}>{escape(name)}</th>'


def _number(value: str, under: str = "") -> str:
    return f'<td class="num">{value}{f"<small>{under}</small>" if under else ""}</td>'


def _rest(rows: Sequence[Any], shown: int) -> str:
    left = len(rows) - shown
    return f'<p class="lead">{left} more are in report.json.</p>' if left > 0 else ""


def engines(data: Data) -> str:
    """Every engine with everything that was measured; a column that nothing fills is left out and named."""
    columns = _engine_columns(data)
    cells = {name: [make(engine) for engine in data["engines"]] for name, make in columns}
    shown = [name for name, values in cells.items() if any(value is not None for value in values)]
    rows = []
    for index, engine in enumerate(data["engines"]):
        badge = ' <span class="badge good">recommended</span>' if engine["recommended"] else ""
        role = "<small>float baseline</small>" if engine["role"] == "baseline" else ""
        row = "".join(cells[name][index] or _number(NONE) for name in shown)
        chosen = ' class="chosen"' if engine["recommended"] else ""
        rows.append(f'<tr{chosen}><th scope="row">{_target(engine["target"])}{badge}{role}</th>{row}</tr>')
    heads = [_head("Engine"), *(_head(name, "num") for name in shown)]
    absent = [name for name, _ in columns if name not in shown]
    known = (
        "Below a figure: its 95 % interval. Sim.: the engine against the float simulation of its own file."
    )
    lead = f"{known} Not measured: {', '.join(absent)}." if absent else known
    return f'<p class="lead">{escape(lead)}</p>' + _table("Engines", heads, rows)


def _engine_columns(data: Data) -> list[Column]:
    metric = data["metric"]
    name = f"{metric['name']}{', %' if unit(metric) else ''}" if metric else "Metric"
    return [
        ("Size", lambda engine: _size(data, engine)),
        ("p50 / p90 / p99, ms", _latency),
        ("Speed", _speed),
        (name, lambda engine: _estimate(engine["metric"])),
        ("Drop", lambda engine: _drop(engine["drop"])),
        ("Agreement", _agreement),
        ("In int8", _int8),
        ("CPU, ms", lambda engine: _plain(engine["cpu_ms"], milliseconds)),
        ("Memory", lambda engine: _plain(engine["peak_rss_bytes"], size)),
    ]


def _plain(value: float | None, form: Callable[[float | None], str]) -> str | None:
    return None if value is None else _number(form(value))


def _size(data: Data, engine: Data) -> str:
    place = engine["target"].split(":")[1:]
    bases = [
        other["size_bytes"]
        for other in data["engines"]
        if other["role"] == "baseline" and other["target"].split(":")[1:] == place
    ]
    known = bases and bases[0] and engine["size_bytes"] and engine["role"] == "candidate"
    return _number(
        size(engine["size_bytes"]), f"{factor(bases[0] / engine['size_bytes'])}× smaller" if known else ""
    )


def _latency(engine: Data) -> str | None:
    latency = engine["latency"]
    if not latency:
        return None
    values = " / ".join(milliseconds(latency[key]) for key in ("p50_ms", "p90_ms", "p99_ms"))
    threads = f"{latency['threads']} thread{'s' if latency['threads'] != 1 else ''}"
    return _number(values, f"batch {latency['batch']}, {threads}")


def _speed(engine: Data) -> str | None:
    speed = engine["latency"] and engine["latency"]["ratio_to_baseline"]
    return _number(ratio(speed["value"]), factors(speed)) if speed else None


def _estimate(value: Data | None) -> str | None:
    return _number(amount(value["value"]), between(value["low"], value["high"])) if value else None


def _drop(drop: Data | None) -> str | None:
    if not drop:
        return None
    verdict = drop.get("verdict")
    kind = {"kept": "good", "broken": "bad", "undecided": "warn"}.get(verdict or "", "")
    badge = f'<span class="badge {kind}">{verdict}</span>' if verdict else ""
    return _number(amount(drop["value"]) + badge, between(drop["low"], drop["high"]))


def _agreement(engine: Data) -> str | None:
    agreement = engine["agreement"]
    if not agreement or (agreement["top1"] is None and agreement["sqnr_db"] is None):
        return None
    sqnr = f"SQNR {decibels(agreement['sqnr_db'])}" if agreement["sqnr_db"] is not None else ""
    return _number(sqnr) if agreement["top1"] is None else _number(percent(agreement["top1"]), sqnr)


def _int8(engine: Data) -> str | None:
    precision, gap = engine["precision"], engine["simulation_gap"]
    under = f"sim. {decibels(gap['sqnr_db'])}" if gap and gap["sqnr_db"] is not None else ""
    return (
        _number(percent(precision["share_int8"] if precision else None), under)
        if precision or under
        else None
    )


def islands(engine: Data) -> str:
    """What an engine runs in float, largest share first."""
    found = sorted(engine["precision"]["float_islands"], key=lambda item: -(item["share"] or 0))
    rows = [
        f'<tr><th scope="row">{code(item["name"], 120)}</th><td class="hash">{code(item["op"], 60)}</td>'
        f'{_number(percent(item["share"]))}<td class="text">{escape(shorten(item["reason"], 400))}</td></tr>'
        for item in found[:MANY]
    ]
    heads = [_head("Layer"), _head("Op"), _head("Share of compute", "num"), _head("Why it is in float")]
    return _table(f"Float layers of {engine['target']}", heads, rows) + _rest(found, MANY)


def worst_layers(items: Sequence[Data], worst: Sequence[int]) -> str:
    """The layers with the largest error, by name and depth."""
    rows = [
        f'<tr>{_number(str(index + 1))}<th scope="row">{code(items[index]["name"], 160)}</th>'
        f'<td class="hash">{code(items[index]["op"], 60)}</td>'
        f"{_number(decibels(items[index]['sqnr_db']))}</tr>"
        for index in worst
    ]
    return _table(
        "Worst layers", [_head("Depth", "num"), _head("Layer"), _head("Op"), _head("SQNR", "num")], rows
    )


def rungs(data: Data) -> str:
    """Every attempt with its outcome and cost."""
    rows = []
    for item in data["rungs"][:MANY]:
        badge = ' <span class="badge good">used</span>' if item["kept"] else ""
        rows.append(
            f'<tr{" class=chosen" if item["kept"] else ""}><th scope="row">'
            f"{escape(shorten(item['name'], 120))}{badge}<small>{code(item['target'], 120)}</small></th>"
            f'<td class="text">{escape(shorten(item["what"], 400))}</td>{_any(item["metric"])}'
            f"{_any(item['drop'])}{_number(decibels(item['sqnr_db']))}{_number(span(item['seconds']))}</tr>"
        )
    names = ("Metric", "Drop", "SQNR", "Time")
    heads = [_head("Attempt"), _head("What was done"), *(_head(name, "num") for name in names)]
    return _table("Attempts", heads, rows) + _rest(data["rungs"], MANY)


def _any(value: Data | float | None) -> str:
    """A rung's metric or drop, with or without interval and verdict."""
    if isinstance(value, Mapping):
        return _drop(value) or ""
    return _number(amount(value))


def skipped(data: Data) -> str:
    """Targets that were not made, with the reason."""
    rows = [
        f'<tr><th scope="row">{code(item["target"], 120)}</th>'
        f'<td class="text">{escape(shorten(item["reason"], 400))}</td></tr>'
        for item in data["skipped"][:MANY]
    ]
    return _table("Targets not made", [_head("Target"), _head("Why")], rows) + _rest(data["skipped"], MANY)


def steps(data: Data) -> str:
    """What each step cost."""
    rows = [
        f'<tr><th scope="row">{escape(shorten(item["name"], 120))}'
        f"{'<small>from an earlier run</small>' if item['reused'] else ''}</th>"
        f"{_number(span(item['seconds']))}{_number(span(item['cpu_seconds']))}{_number(size(item['peak_rss_bytes']))}</tr>"
        for item in data["steps"][:MANY]
    ]
    names = ("Time", "CPU time", "Peak memory")
    return _table("Steps", [_head("Step"), *(_head(name, "num") for name in names)], rows) + _rest(
        data["steps"], MANY
    )


def files(data: Data) -> str:
    """Where each engine lies and how to recognise it."""
    rows = [
        f'<tr><th scope="row">{code(engine["target"], 120)}</th><td class="text">{code(engine["path"])}</td>'
        f'{_number(size(engine["size_bytes"]))}<td class="hash">{code(engine["sha256"])}</td></tr>'
        for engine in data["engines"]
    ]
    heads = [_head("Engine"), _head("File"), _head("Size", "num"), _head("SHA-256")]
    return _table("Files", heads, rows)
