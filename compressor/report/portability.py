"""What the report says of an int8 engine on the other kind of processor: x86 with VNNI, or without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.report.text import decibels, percent

__all__ = ["portability"]

Data = Mapping[str, Any]


def portability(engine: Data) -> str | None:
    """One or two sentences on an engine's `portable`; None where that was not looked at."""
    found = engine.get("portable")
    if not found:
        return None
    if found["proven"]:
        where = "the same on x86 with and without VNNI"
        return f"{where}: no pair of products can overflow, whatever the input (proven).{_cost(found)}"
    if not found["measured"]:
        return "not proven to give the same on x86 without VNNI: some layers could not be checked."
    measured, unsafe = found["measured"], found["layers"]
    layers = "1 layer" if unsafe == 1 else f"{unsafe} layers"
    return (
        f"on x86 without VNNI, sums would overflow in {layers} of {found['of']}: SQNR "
        f"{decibels(measured['saturated_sqnr_db'])} instead of {decibels(measured['sqnr_db'])}"
        f"{_predictions(engine, measured)} (computed for {measured['samples']} samples; "
        f"{percent(measured['outputs'])} of the values in these layers wrong). "
        f"For such processors build with --scheme {found['without']}."
    )


def _predictions(engine: Data, measured: Data) -> str:
    """How many predictions agree with float, where there are classes."""
    agreement = engine["agreement"]
    if not agreement or agreement["top1"] is None or measured["saturated_top1"] is None:
        return ""
    share, instead = percent(measured["saturated_top1"]), percent(measured["top1"])
    return f", {share} of predictions as float's instead of {instead}"


def _cost(found: Data) -> str:
    """What a limit that VNNI would not need costs there."""
    if found.get("cost_db") is None:
        return ""
    mean, worst = max(found["cost_db"], 0.0), max(found["worst_db"], 0.0)
    return (
        " With VNNI, which needs no limit on the weights, their error would be "
        f"{decibels(mean)} lower (mean of the layers; at most {decibels(worst)}), the speed no higher."
    )
