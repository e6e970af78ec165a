"""What is asked for: `PRECISION[+PRUNING][:RUNTIME[:DEVICE]]`, e.g. `int8`, `int8:onnx:cpu`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from compressor.errors import UsageError

__all__ = ["PRECISIONS", "Target"]

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8-dynamic", "int8-weight", "int4")
_PRUNING = re.compile(r"prune(\d{1,2})")
_FORM = "PRECISION[+pruneNN][:RUNTIME[:DEVICE]], for example int8, int8:onnx:cpu or int8+prune50:onnx"


@dataclass(frozen=True, order=True)
class Target:
    """One engine that is asked for. `runtime` or `device` None means every one available here.

    `pruning` is the share of channels to remove, in percent (0: none).
    """

    precision: str
    pruning: int = 0
    runtime: str | None = None
    device: str | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read a target; raises `UsageError` that names the part which is not understood."""
        head, *rest = text.strip().lower().split(":")
        if len(rest) > 2 or not all(rest) or not head:
            raise UsageError(f"target '{text}' is not of the form {_FORM}")
        precision, *extras = head.split("+")
        if precision not in PRECISIONS:
            raise UsageError(
                f"target '{text}': unknown precision '{precision}'; known are {', '.join(PRECISIONS)}"
            )
        pruning = 0
        for extra in extras:
            match = _PRUNING.fullmatch(extra)
            if not match or pruning or not int(match[1]):
                raise UsageError(f"target '{text}': '{extra}' is not understood; the form is {_FORM}")
            pruning = int(match[1])
        runtime, device = (*rest, None, None)[:2]
        return cls(precision, pruning, runtime, device)

    def on(self, runtime: str, device: str) -> Target:
        """The same target with runtime and device filled in."""
        return replace(self, runtime=runtime, device=device)

    @property
    def baseline(self) -> Target:
        """The float engine on the same runtime and device, against which this one is judged."""
        return Target("fp32", 0, self.runtime, self.device)

    @property
    def folder(self) -> str:
        """A name for the engine's folder."""
        return str(self).replace(":", "-")

    def __str__(self) -> str:
        head = f"{self.precision}+prune{self.pruning}" if self.pruning else self.precision
        return ":".join(part for part in (head, self.runtime, self.device) if part)
