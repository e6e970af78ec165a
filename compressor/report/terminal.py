"""The report, the doctor's findings and a file's facts for the terminal; plain text where there is none."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from compressor.report.portability import portability
from compressor.report.text import (
    NONE,
    Form,
    between,
    decibels,
    differences,
    factors,
    metric_name,
    milliseconds,
    percent,
    quantities,
    ratio,
    shorten,
    size,
    unit,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from compressor.report import Report

__all__ = ["render", "render_doctor", "render_inspection", "show"]

WIDTH = 80
_ON_GPU = ("CUDA", "Tensorrt", "NvTensorRT")  # in names of execution providers
Data = Mapping[str, Any]


def render(report: Report, width: int = WIDTH) -> str:
    """Verdict, table of engines and notes as plain text of at most `width` columns."""
    return _plain(width, lambda console: _print_report(console, report.data))


def show(report: Report, file: IO[str]) -> None:
    """Print the report: in colour and the terminal's width on a terminal, plain in 80 columns elsewhere.

    Characters that the file's encoding lacks are replaced by plain ones.
    """
    if file.isatty() and _speaks_unicode(file):
        from rich.console import Console

        _print_report(Console(file=file, highlight=False), report.data)
    else:
        file.write(_spoken(render(report), file) + "\n")


def render_doctor(found: Data, width: int = WIDTH) -> str:
    """What `compressor.machine.doctor` found: the machine, a line per framework, what to mend."""
    return _plain(width, lambda console: _print_doctor(console, found))


def render_inspection(facts: Data, width: int = WIDTH) -> str:
    """Facts about a model file as aligned lines."""
    return _plain(width, lambda console: _print_facts(console, facts))


def _plain(width: int, print_to: Callable[[Console], None]) -> str:
    from rich.console import Console

    buffer = io.StringIO()
    print_to(Console(file=buffer, width=max(width, 20), color_system=None, highlight=False, emoji=False))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _speaks_unicode(file: IO[str]) -> bool:
    return (getattr(file, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")


def _spoken(text: str, file: IO[str]) -> str:
    """`text` without what the file's encoding cannot say, lone surrogates included."""
    plain = text.encode("utf-8", "replace").decode("utf-8")
    if _speaks_unicode(file):
        return plain
    table: dict[str, str | int | None] = {
        "×": "x",
        "–": "-",
        "−": "-",
        "…": "~",
        "★": "*",
        "─": "-",
        "━": "-",
        "±": "+-",
        "≤": "<=",
    }
    encoding = getattr(file, "encoding", None) or "ascii"
    return plain.translate(str.maketrans(table)).encode(encoding, "replace").decode(encoding)


# ------------------------------------------------------------------ report


def _print_report(console: Console, data: Data) -> None:
    _say(console, data["headline"], style="bold")
    if data["engines"]:
        console.print()
        console.print(_fitting(console, data))
    lines = [line for line in data["verdict"] if len(data["verdict"]) > 1]
    for line in lines:
        _say(console, f"{line['target']}: {line['text']}")
    for engine in data["engines"]:
        if said := portability(engine):
            _say(console, f"{engine['target']}: {said}")
    for skipped in data["skipped"]:
        _say(console, f"not made: {skipped['target']}: {skipped['reason']}", style="dim")
    for note in data["notes"]:
        _say(console, f"note: {note}", style="yellow")


def _say(console: Console, line: str, style: str = "") -> None:
    """A line of text in which nothing is markup; further lines of it are indented."""
    from rich.padding import Padding
    from rich.text import Text

    first = Text(line, style=style).wrap(console, max(20, console.width - 2))
    for index, part in enumerate(first):
        console.print(part if not index else Padding(part, (0, 0, 0, 2)))


Column = tuple[int, str, Callable[[Data], str]]


def _columns(data: Data) -> list[Column]:
    """Columns as (rank, head, cell): a higher rank is dropped first where the terminal is narrow."""
    metric = data["metric"]
    name = metric_name(metric) + (" %" if unit(metric) == "%" else "") if metric else "metric"
    value, lost = quantities(metric), differences(metric)
    return [
        (4, "size", lambda engine: size(engine["size_bytes"])),
        (2, "p50 ms", lambda engine: milliseconds(_of(engine["latency"], "p50_ms"))),
        (8, "p99 ms", lambda engine: milliseconds(_of(engine["latency"], "p99_ms"))),
        (1, "speed", lambda engine: ratio(_of(_of(engine["latency"], "ratio_to_baseline"), "value"))),
        (6, "speed 95 %", lambda engine: factors(_of(engine["latency"], "ratio_to_baseline")) or NONE),
        (3, name, lambda engine: value(_of(engine["metric"], "value"))),
        (1, "drop", lambda engine: lost(_of(engine["drop"], "value"))),
        (5, "drop 95 %", lambda engine: _bounds(engine["drop"], lost)),
        (0, "budget", lambda engine: _of(engine["drop"], "verdict") or NONE),
        (6, "agree", lambda engine: percent(_of(engine["agreement"], "top1"))),
        (7, "SQNR", lambda engine: decibels(_of(engine["agreement"], "sqnr_db"))),
        (9, "int8", lambda engine: percent(_of(engine["precision"], "share_int8"))),
        (10, "memory", lambda engine: size(engine["peak_rss_bytes"])),
    ]


def _of(part: Data | None, key: str) -> Any:
    return part[key] if part else None


def _bounds(value: Data | None, form: Form) -> str:
    return (between(value["low"], value["high"], form) if value else "") or NONE


def _fitting(console: Console, data: Data) -> Table:
    """The table of engines with as many columns as fit; one that says nothing is left out."""
    made = [(rank, head, list(map(make, data["engines"]))) for rank, head, make in _columns(data)]
    columns = [column for column in made if set(column[2]) != {NONE}]
    names = [engine["target"] for engine in data["engines"]]
    room = console.width - 3  # the mark and its gap
    width = min(max(map(len, ("engine", *names))), max(16, room // 2))
    while columns and width + sum(2 + _width(head, cells) for _, head, cells in columns) > room:
        columns.remove(max(columns, key=lambda column: column[0]))
    return _table(data["engines"], names, width, columns)


def _width(head: str, cells: Sequence[str]) -> int:
    return max(map(len, (head, *cells)))


def _table(
    engines: Sequence[Data], names: Sequence[str], width: int, columns: Sequence[tuple[int, str, list[str]]]
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", width=1)
    table.add_column("engine", width=width, no_wrap=True)
    for _, head, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for index, engine in enumerate(engines):
        row = [shorten(names[index], width), *(cells[index] for _, _, cells in columns)]
        style = "green" if engine["recommended"] else ""
        mark = "★" if engine["recommended"] else ""
        table.add_row(*(Text(cell, style=style) for cell in (mark, *row)))
    return table


# ------------------------------------------------------------------ doctor, inspection


def _print_doctor(console: Console, found: Data) -> None:
    from rich.table import Table
    from rich.text import Text

    machine = found["machine"]
    cores = f"{machine['usable_cores']:g} of {machine['cores']} cores"
    _say(
        console, f"{machine['cpu']} ({machine['instruction_set']}), {cores}, {size(machine['memory_bytes'])}"
    )
    for gpu in machine["gpus"]:
        _say(console, f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}")
    _say(console, f"{machine['os']}, Python {machine['python']}")
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for head in ("", "module", "version", "for"):
        table.add_column(head, overflow="fold")
    marks = {"ok": ("ok", "green"), "missing": (NONE, "dim"), "broken": ("!!", "red")}
    for entry in (entry for entry in found["frameworks"] if entry["status"] != "unused"):
        mark, style = marks[entry["status"]]
        told = entry["role"] if entry["status"] == "ok" else f"{entry['role']}: {_remedy(entry)}"
        row = (mark, entry["module"], entry["version"] or NONE, told)
        table.add_row(*(Text(cell, style=style if not index else "") for index, cell in enumerate(row)))
    console.print(table)
    if unused := [entry["module"] for entry in found["frameworks"] if entry["status"] == "unused"]:
        _say(console, f"not used by this version: {', '.join(unused)}", style="dim")
    if found["providers"]:
        _say(console, f"onnxruntime is built for: {', '.join(_providers(found))}")
    console.print()
    for problem in found["problems"]:
        _say(console, f"problem: {problem}", style="red")
    for note in found["notes"]:
        _say(console, f"note: {note}", style="yellow")
    count = len(found["problems"])
    _say(
        console,
        "everything installed that this version uses can be imported"
        if found["ok"]
        else f"{count} problem{'s' * (count > 1)}",
    )


def _providers(found: Data) -> list[str]:
    """Execution providers; those for a GPU are of no use where there is none."""
    absent = "" if found["machine"]["gpus"] else " (built in, but no GPU found)"
    return [f"{name}{absent if any(word in name for word in _ON_GPU) else ''}" for name in found["providers"]]


def _remedy(entry: Data) -> str:
    if entry["status"] == "broken":
        return str(entry["reason"])
    return str(entry["install"])


def _print_facts(console: Console, facts: Data) -> None:
    known = {key: value for key, value in facts.items() if value not in (None, [], {}, "")}
    width = max((len(key) for key in known), default=0)
    for key, value in known.items():
        lines = _lines(value)
        for index, line in enumerate(lines):
            head = key.replace("_", " ") if not index else ""
            _say(console, f"{head:<{width}}  {line}")


def _lines(value: Any) -> list[str]:
    """A fact as text: a list of things one a line, a mapping as key and value."""
    if isinstance(value, Mapping):
        return [f"{key}: {_inline(item)}" for key, item in value.items()]
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        return [_inline(item) for item in value]
    return [_inline(value)]


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        if {"name", "dtype", "shape"} <= value.keys():
            return f"{value['name']}: {value['dtype']} [{_inline(value['shape'])}]"
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_inline(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    return "yes" if value is True else "no" if value is False else str(value)
