"""Why layers are wrong, as a table of bars for the page and as text for the terminal.

A layer's own error is that of the layer alone, with the float graph's input; `split` holds the share of each
cause in it (see the page's words, and `compressor.quantization.causes` for the definition).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.errors import UsageError
from compressor.report.svg import escape
from compressor.report.text import NONE, decibels, percent, shorten

__all__ = ["find", "page", "render_layers", "words"]

Data = Mapping[str, Any]
NAMES = {
    "clipping": "clipping",
    "activation_rounding": "activation rounding",
    "weight_rounding": "weight rounding",
    "saturation": "saturation",
    "bias": "bias",
}
_HEADS = {
    "clipping": "clip",
    "activation_rounding": "activ.",
    "weight_rounding": "weights",
    "saturation": "satur.",
    "bias": "bias",
}
_SAME = 200.0  # dB
_MEANINGS = (
    "Clipping: values outside the range of the codes. Rounding: of the activations, of the weights. "
    "Saturation: sums cut at 16 bits by x86 kernels without VNNI. Bias: what rounding shifts a whole "
    "channel by."
)
_LEGEND = (
    "SQNR in dB, of all error up to here; own: of the layer alone, with float inputs.",
    "Then the causes of its own error, in %: clipping, rounding of activations and of",
    "weights, saturation of x86 kernels without VNNI, shift of whole channels.",
)
_SHOWN = 10
_NOTABLE = 0.05


def words(split: Mapping[str, float]) -> str:
    """The causes that count, largest first: "activation rounding 94 %, bias 6 %"."""
    order = sorted(NAMES, key=lambda cause: -split[cause])
    return ", ".join(f"{NAMES[cause]} {percent(split[cause])}" for cause in order if split[cause] >= _NOTABLE)


def page(items: Sequence[Data]) -> str:
    """HTML: the layers with the largest own error, each with a bar of its causes; "" if none is known."""
    known = [item for item in items if item.get("split")]
    if not known:
        return ""
    worst = sorted(known, key=lambda item: item["own_sqnr_db"])[:_SHOWN]
    legend = "".join(f'<li><i class="c-{cause}"></i>{name}</li>' for cause, name in NAMES.items())
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("Layer", "Its own SQNR", "Causes"))
    return (
        f'<p class="lead">Each layer alone, with float inputs: what its own error is made of. {_MEANINGS}</p>'
        f'<ul class="legend">{legend}</ul><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Causes of error"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(map(_row, worst))}</tbody></table></div>"
    )


def _row(item: Data) -> str:
    said = words(item["split"])
    return (
        f'<tr><th scope="row"><code>{escape(shorten(item["name"], 160))}</code></th>'
        f'<td class="num">{decibels(item["own_sqnr_db"])}</td>'
        f'<td class="text">{_bar(item["split"])}<small>{escape(said)}</small></td></tr>'
    )


def _bar(split: Mapping[str, float]) -> str:
    parts, left = [], 0.0
    for cause in NAMES:
        width = 200 * split[cause]
        if width >= 0.5:
            parts.append(f'<rect class="c-{cause}" x="{left:.1f}" width="{width:.1f}" height="9"/>')
        left += width
    return f'<svg viewBox="0 0 200 9" preserveAspectRatio="none" aria-hidden="true">{"".join(parts)}</svg>'


def find(path: Path) -> tuple[Path, str | None]:
    """The folder of the report that a run's folder, or an engine in it, belongs to, and the engine's target.

    Raises `UsageError` where there is none.
    """
    for folder in (path, path.with_name(f"{path.name}.work"), *path.parents[:3]):
        if (folder / "report.json").is_file():
            return folder, _target(folder, path)
    raise UsageError(
        f"{path}: no report.json there or above; --layers reads what a run has measured, so give the --out "
        "folder of a run or an engine in it"
    )


def _target(folder: Path, path: Path) -> str | None:
    """The target of the engine at `path`, told by its place in the run's folder."""
    from compressor.report import Report

    for engine in Report.load(folder).engines:
        place = (folder / engine["path"]).resolve()
        if path.resolve() in (place, place.parent):
            return str(engine["target"])
    return None


def render_layers(data: Data, target: str | None = None, width: int = 80) -> str:
    """Each layer's SQNR, its own SQNR and the causes, by depth; of all targets, or of one.

    Raises `UsageError` if the report knows nothing of layers.
    """
    found = {key: items for key, items in data["layers"].items() if items and target in (None, key)}
    if not found:
        which = f" of {target}" if target else ""
        raise UsageError(
            f"the report holds no layers{which}: they are measured for the int8 engine that a run chooses"
        )
    lines: list[str] = []
    for key, items in found.items():
        lines += [*([""] if lines else []), key, *_lines(items, width)]
    return "\n".join([*lines, "", *_LEGEND])


def _lines(items: Sequence[Data], width: int) -> list[str]:
    heads = ["SQNR", "own", *_HEADS.values()]
    rows = [
        [*(_number(item.get(key)) for key in ("sqnr_db", "own_sqnr_db")), *_shares(item.get("split"))]
        for item in items
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    longest = max(len(item["name"]) for item in items)
    room = max(8, min(longest, width - sum(widths) - 2 * len(widths)))
    names = ["layer", *(shorten(item["name"], room) for item in items)]
    return [
        f"{name:<{room}}" + "".join(f"  {cell:>{size}}" for cell, size in zip(row, widths, strict=True))
        for name, row in zip(names, [heads, *rows], strict=True)
    ]


def _number(value: float | None) -> str:
    return NONE if value is None else "same" if value >= _SAME else f"{value:.1f}"


def _shares(split: Mapping[str, float] | None) -> list[str]:
    return [NONE if split is None else f"{100 * split[cause]:.0f}" for cause in _HEADS]
