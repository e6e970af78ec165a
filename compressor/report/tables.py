"""The report's tables as HTML text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from compressor.report.portability import portability
from compressor.report.svg import escape
from compressor.report.text import (
    NONE,
    between,
    decibels,
    differences,
    factor,
    factors,
    metric_name,
    milliseconds,
    percent,
    quantities,
    ratio,
    shorten,
    size,
    span,
    unit,
)

__all__ = [
    "code",
    "engines",
    "files",
    "islands",
    "rungs",
    "skipped",
    "steps",
    "without_interval",
    "worst_layers",
]

MANY = 60
_HARD = ("In int8", "CPU, ms", "Memory")  # not to be understood from the head alone
_SIMULATION = (
    "simulation: SQNR of the engine against a float simulation of its own file, which is the error of the "
    "kernels alone (the higher, the smaller)"
)
Data = Mapping[str, Any]
Column = tuple[str, str, Callable[[Data], str | None]]


def code(value: object, length: int = 300) -> str:
    """A name in monospace, whole as far as `length` goes."""
    return f"<code>{escape(shorten(str(value), length))}</code>"


def _target(target: str) -> str:
    """A target that breaks between its parts."""
    return code(target, 120).replace(":", ":<wbr>")


def _table(name: str, heads: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    """A table in a box of its own that scrolls sideways; `heads` and `rows` are HTML.

    In one of the kind "cards" every row is a card on a narrow screen.
    """
    head = "".join(heads)
    body = "".join(rows)
    kind = kind and f" class={kind}"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table{kind}>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _head(name: str, kind: str = "", told: str = "") -> str:
    title = told and f' title="{escape(told)}"'
    return f'<th scope="col"{kind and f" class={kind}"}{title}>{escape(name)}</th>'


def _number(value: str, under: str = "", told: str = "") -> str:
    title = told and f' title="{escape(told)}"'
    return f'<td class="num"{title}>{value}{f"<small>{under}</small>" if under else ""}</td>'


def _rest(rows: Sequence[Any], shown: int) -> str:
    left = len(rows) - shown
    return f'<p class="lead">{left} more are in report.json.</p>' if left > 0 else ""


def engines(data: Data) -> str:
    """Every engine with everything that was measured; a column that nothing fills is left out and named."""
    columns = _engine_columns(data)
    cells = {name: [make(engine) for engine in data["engines"]] for name, _, make in columns}
    shown = [name for name, values in cells.items() if any(value is not None for value in values)]
    rows = []
    for index, engine in enumerate(data["engines"]):
        badge = ' <span class="badge good">recommended</span>' if engine["recommended"] else ""
        role = "<small>float baseline</small>" if engine["role"] == "baseline" else ""
        row = "".join(
            (cells[name][index] or _number(NONE)).replace("<td ", f'<td data-name="{escape(name)}" ', 1)
            for name in shown
        )
        chosen = ' class="chosen"' if engine["recommended"] else ""
        rows.append(f'<tr{chosen}><th scope="row">{_target(engine["target"])}{badge}{role}</th>{row}</tr>')
    heads = [_head("Engine"), *(_head(name, "num", told) for name, told, _ in columns if name in shown)]
    absent = [name for name, _, _ in columns if name not in shown]
    said = ["Below a figure: its 95 % interval."]
    said += [f"{name}: {told}." for name, told, _ in columns if name in _HARD and name in shown]
    said += [f"Not measured: {', '.join(absent)}."] if absent else []
    lead = f'<p class="lead">{escape(" ".join(said))}</p>'
    notes = [f"{row['target']}: {text}" for row in data["engines"] if (text := portability(row))]
    feet = without_interval(data["engines"]) + "".join(map(_foot, notes))
    return lead + _table("Engines", heads, rows, "cards") + feet


def _foot(words: str) -> str:
    return f'<p class="lead foot">{escape(words)}</p>'


def without_interval(engines: Iterable[Data]) -> str:
    """Why a speed has no interval or proves nothing, a sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for engine in engines:
        speed = engine["latency"] and engine["latency"]["ratio_to_baseline"]
        if speed and speed.get("reason"):
            reasons.setdefault(speed["reason"], []).append(engine["target"])
    said = (
        f"The speed of {', '.join(targets[:20])} is undecided: {reason}."
        for reason, targets in reasons.items()
    )
    return "".join(map(_foot, said))


def _engine_columns(data: Data) -> list[Column]:
    metric = data["metric"]
    name = f"{metric_name(metric)}{', %' if unit(metric) == '%' else ''}" if metric else "Metric"
    drop = "how much worse than the float engine on the same samples; below 0 is better than float"
    return [
        ("Speed", "times as fast as the float engine of the same runtime", _speed),
        ("Drop", drop, lambda engine: _drop(engine["drop"], metric)),
        (name, "", lambda engine: _estimate(engine["metric"], metric)),
        ("p50 / p90 / p99, ms", "of the wall time of a call", _latency),
        ("Size", "", lambda engine: _size(data, engine)),
        ("Agreement", "predictions equal to those of float; SQNR of the outputs below it", _agreement),
        ("In int8", f"share of the compute; {_SIMULATION}", _int8),
        (
            "CPU, ms",
            "processor time of a call, of all threads together",
            lambda engine: _plain(engine["cpu_ms"], milliseconds),
        ),
        (
            "Memory",
            "peak of a process that does nothing but load and run the engine, with the runtime itself",
            lambda engine: _plain(engine["peak_rss_bytes"], size),
        ),
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
    if not speed:
        return None
    reason = speed.get("reason") or ""
    under = factors(speed) or ("no interval" if reason else "")
    return _number(ratio(speed["value"]), under, reason)


def _estimate(value: Data | None, metric: Data | None) -> str | None:
    form = quantities(metric)
    return _number(form(value["value"]), between(value["low"], value["high"], form)) if value else None


def _drop(drop: Data | None, metric: Data | None) -> str | None:
    form = differences(metric)
    if not drop:
        return None
    verdict = drop.get("verdict")
    kind = {"kept": "good", "broken": "bad", "undecided": "warn"}.get(verdict or "", "")
    badge = f'<span class="badge {kind}">{verdict}</span>' if verdict else ""
    return _number(form(drop["value"]) + badge, between(drop["low"], drop["high"], form))


def _agreement(engine: Data) -> str | None:
    agreement = engine["agreement"]
    if not agreement or (agreement["top1"] is None and agreement["sqnr_db"] is None):
        return None
    sqnr = f"SQNR {decibels(agreement['sqnr_db'])}" if agreement["sqnr_db"] is not None else ""
    return _number(sqnr) if agreement["top1"] is None else _number(percent(agreement["top1"]), sqnr)


def _int8(engine: Data) -> str | None:
    precision, gap = engine["precision"], engine["simulation_gap"]
    under = f"simulation {decibels(gap['sqnr_db'])}" if gap and gap["sqnr_db"] is not None else ""
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
    metric, rows = data["metric"], []
    for item in data["rungs"][:MANY]:
        badge = ' <span class="badge good">used</span>' if item["kept"] else ""
        rows.append(
            f'<tr{" class=chosen" if item["kept"] else ""}><th scope="row">'
            f"{escape(shorten(item['name'], 120))}{badge}<small>{code(item['target'], 120)}</small></th>"
            f'<td class="text">{escape(shorten(item["what"], 400))}</td>{_rated(item["metric"], metric)}'
            f"{_lost(item['drop'], metric)}{_number(decibels(item['sqnr_db']))}"
            f"{_number(span(item['seconds']))}</tr>"
        )
    names = ("Metric", "Drop", "SQNR", "Time")
    heads = [_head("Attempt"), _head("What was done"), *(_head(name, "num") for name in names)]
    return _table("Attempts", heads, rows) + _rest(data["rungs"], MANY)


def _rated(value: Data | float | None, metric: Data | None) -> str:
    """A rung's metric, with or without interval."""
    if isinstance(value, Mapping):
        return _estimate(value, metric) or ""
    return _number(quantities(metric)(value))


def _lost(value: Data | float | None, metric: Data | None) -> str:
    """A rung's drop, with or without interval and verdict."""
    if isinstance(value, Mapping):
        return _drop(value, metric) or ""
    return _number(differences(metric)(value))


def skipped(data: Data) -> str:
    """Targets that were not made, with the reason."""
    rows = [
        f'<tr><th scope="row">{code(item["target"], 120)}</th>'
        f'<td class="text">{escape(shorten(item["reason"], 400))}</td></tr>'
        for item in data["skipped"][:MANY]
    ]
    return _table("Targets not made", [_head("Target"), _head("Why")], rows) + _rest(data["skipped"], MANY)


def steps(data: Data) -> str:
    """What each step did, and what it cost."""
    rows = [
        f'<tr><th scope="row">{escape(shorten(item["name"], 120))}'
        f"{'<small>from an earlier run</small>' if item['reused'] else ''}</th>"
        f'<td class="text">{escape(shorten(item.get("what") or NONE, 300))}</td>'
        f"{_number(span(item['seconds']))}{_number(span(item['cpu_seconds']))}{_number(size(item['peak_rss_bytes']))}</tr>"
        for item in data["steps"][:MANY]
    ]
    names = ("Time", "CPU time", "Peak memory")
    heads = [_head("Step"), _head("Of what"), *(_head(name, "num") for name in names)]
    return _table("Steps", heads, rows) + _rest(data["steps"], MANY)


def files(data: Data) -> str:
    """Where each engine lies and how to recognise it."""
    rows = [
        f'<tr><th scope="row">{code(engine["target"], 120)}</th><td class="text">{code(engine["path"])}</td>'
        f'{_number(size(engine["size_bytes"]))}<td class="hash">{code(engine["sha256"])}</td></tr>'
        for engine in data["engines"]
    ]
    heads = [_head("Engine"), _head("File"), _head("Size", "num"), _head("SHA-256")]
    return _table("Files", heads, rows)
