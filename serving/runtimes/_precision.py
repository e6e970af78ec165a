"""What runtimes tell of an engine's compute, in one form: shares by type in multiply-accumulates (MACs)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Kernel", "summary"]


@dataclass(frozen=True)
class Kernel:
    """Something that ran: `type` is what it computed in ("int8", "float32"), `macs` are 0 if it only moves.

    `conversion` kernels only quantize, dequantize or reorder.
    """

    name: str
    op: str
    type: str
    macs: int
    microseconds: float
    integer: bool
    conversion: bool


def summary(kernels: Sequence[Kernel], islands: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of compute and time; `islands` are the float kernels of a quantized engine and their reasons.

    Returns {"share_int8": 0..1 of all MACs, "share_by_type": {type: share}, "macs",
    "operators": [{"name", "op", "type", "macs", "share", "time_share", "microseconds"}] in order of
    execution, "float_islands": [{"name", "op", "macs", "share", "reason"}], "fused_integer_ops",
    "time_share_conversion"}.
    Without any MACs the shares are null.
    """
    total, time = sum(kernel.macs for kernel in kernels), sum(kernel.microseconds for kernel in kernels)
    by_type: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        if kernel.macs:
            by_type[kernel.type] += kernel.macs
    conversion = sum(kernel.microseconds for kernel in kernels if kernel.conversion)
    return {
        "share_int8": by_type.get("int8", 0) / total if total else None,
        "share_by_type": {name: count / total for name, count in sorted(by_type.items())},
        "macs": total,
        "operators": [_row(kernel, total, time) for kernel in kernels],
        "float_islands": [{**island, "share": island["macs"] / total} for island in islands],
        "fused_integer_ops": sum(kernel.integer for kernel in kernels),
        "time_share_conversion": conversion / time if time else None,
    }


def _row(kernel: Kernel, total: int, time: float) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "op": kernel.op,
        "type": kernel.type,
        "macs": kernel.macs,
        "share": kernel.macs / total if total else 0.0,
        "time_share": kernel.microseconds / time if time else 0.0,
        "microseconds": kernel.microseconds,
    }
