"""Timings of engines outside of a run, as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compressor.report.text import NONE, between, milliseconds, ratio

__all__ = ["render_timings"]

Row = Mapping[str, Any]


def render_timings(answer: Mapping[str, Any]) -> str:
    """What `serving.bench.standalone` gave: how it was measured, engine by engine, what is not claimed."""
    rows: Sequence[Row] = answer["engines"]
    threads = answer["threads"]
    head = (
        f"{answer['runtime']}:{answer['device']}, {threads} thread{'s' * (threads != 1)}, "
        f"batch {answer['batch']}, inputs: {answer['inputs']}"
    )
    table: list[tuple[str, ...]] = [
        ("engine", "calls", "p50 ms", "p90 ms", "p99 ms", "mean ms", "per s", "speed", "95 %"),
        *map(_cells, rows),
    ]
    columns = [column for column in zip(*table, strict=True) if any(cell != NONE for cell in column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in zip(*columns, strict=True)
    ]
    return "\n".join([head, "", *lines, *_remarks(rows)])


def _cells(row: Row) -> tuple[str, ...]:
    speed = row.get("ratio_to_baseline")
    return (
        row["engine"],
        str(row.get("requests", row.get("n"))),
        *(milliseconds(row[name]) for name in ("p50_ms", "p90_ms", "p99_ms", "mean_ms")),
        f"{row['throughput_per_s']:.0f}",
        ratio(speed["value"]) if speed else NONE,
        between(speed["low"], speed["high"]) if speed and speed["low"] is not None else NONE,
    )


def _remarks(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        speed = row.get("ratio_to_baseline")
        if speed:
            why = f": {speed['reason']}" if speed["reason"] else ""
            found.append(f"{row['engine']}: {speed['verdict']} against {rows[0]['engine']}{why}")
    noise = rows[0].get("aa_noise")
    if noise and noise["low"] is not None and len(rows) > 1:
        found.append(f"the first against itself: {between(noise['low'], noise['high'])}")
    reasons = {row[key] for row in rows for key in ("p90_reason", "p99_reason") if row.get(key)}
    found += sorted(reasons)
    return ["", *found] if found else []
