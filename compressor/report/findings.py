"""What the lint found, as text: worst first, one block for each rule."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.report.text import shorten

__all__ = ["render_findings"]

Finding = Mapping[str, Any]
_SHOWN = 3  # nodes of a rule
_NAMES = {"error": ("error", "errors"), "warning": ("warning", "warnings"), "info": ("note", "notes")}


def render_findings(answer: Mapping[str, Any], width: int = 80) -> str:
    """The answer of `quantization.lint:lint_task`: counts, then each rule with nodes, reason and fix."""
    rest = answer.get("rest")
    findings = answer["findings"] if rest is None else rest
    lines = [f"{answer['path']} for {answer['target']}: {_counts(answer['findings'])}"]
    if not answer["quantized"]:
        lines.append("the graph holds no quantization operators; only the file itself was checked")
    if rest is not None:
        fixed = f"{len(answer['fixed'])} mended in {answer['out']}, which is left with {_counts(rest)}"
        lines += [fixed, *(f"  {line}" for line in _promises(answer["fixed"]))]
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding["rule"], []).append(finding)
    for group in groups.values():
        lines += ["", *_block(group, width)]
    return "\n".join(lines)


def _counts(findings: Sequence[Finding]) -> str:
    counts = Counter(finding["severity"] for finding in findings)
    said = [f"{counts[key]} {one if counts[key] == 1 else many}" for key, (one, many) in _NAMES.items()]
    return ", ".join(text for text in said if not text.startswith("0 ")) or "nothing found"


def _promises(fixed: Sequence[Finding]) -> list[str]:
    """What the fixes changed, one line a rule."""
    counts = Counter((finding["rule"], finding["promise"]) for finding in fixed)
    return [f"{rule} ({count}) changes: {promise}" for (rule, promise), count in counts.items()]


def _block(group: Sequence[Finding], width: int) -> list[str]:
    first = group[0]
    places = f"{len(group)} places" if len(group) > 1 else "1 place"
    lines = [f"{_NAMES[first['severity']][0]} {first['rule']}  {first['title']}  ({places})"]
    for finding in group[:_SHOWN]:
        where = f"{shorten(finding['node'], 60)}: " if finding["node"] else ""
        lines += _paragraph(f"{where}{finding['reason']}", "  - ", width)
    if len(group) > _SHOWN:
        lines.append(f"  - and {len(group) - _SHOWN} more (--json names all)")
    mechanical = " (--fix does this where it can)" if first["mechanical"] else ""
    lines += _paragraph(f"fix: {first['fix']}{mechanical}", "  ", width)
    return lines + _paragraph(f"source: {first['source']}", "  ", width)


def _paragraph(text: str, head: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(width, 20), initial_indent=head, subsequent_indent="    ", break_on_hyphens=False
    )
