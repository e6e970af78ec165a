"""What a rule of the lint is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from compressor.errors import UsageError

if TYPE_CHECKING:
    from onnx import NodeProto

    from compressor.quantization.lint.graph import QuantizedGraph

__all__ = ["TARGETS", "Finding", "Hit", "Rule", "Severity", "check_target", "everywhere"]

Severity = Literal["error", "warning", "info"]

TARGETS = {
    "tensorrt": "TensorRT, by its parser's and guide's rules",
    "ort": "ONNX Runtime on any CPU",
    "ort-x86-avx2": "ONNX Runtime on x86 without VNNI",
    "ort-x86-vnni": "ONNX Runtime on x86 with VNNI",
    "ort-arm": "ONNX Runtime on ARM",
    "openvino": "OpenVINO on any CPU",
    "openvino-x86-avx2": "OpenVINO on x86 without VNNI",
    "openvino-x86-vnni": "OpenVINO on x86 with VNNI",
    "openvino-arm": "OpenVINO on ARM",
}
"""What can be linted for. `ort` asks for a file that is right and fast wherever it may be run."""


@dataclass(frozen=True)
class Hit:
    """A place where a rule is broken: the node (None: the file as a whole) and why, in one sentence."""

    node: NodeProto | None
    reason: str
    tensor: str = ""


@dataclass(frozen=True)
class Rule:
    """One rule.

    `on` maps a target, or the family in front of its dashes, to the severity there; None takes a member out
    of its family. `fix` says what to do, `mend` does it for the hits that it can and gives those back;
    `promise` says by how much that changes results. `source` is where the rule comes from.
    """

    id: str
    title: str
    on: Mapping[str, Severity | None]
    source: str
    fix: str
    check: Callable[[QuantizedGraph], Iterable[Hit]]
    mend: Callable[[QuantizedGraph, Sequence[Hit]], Iterator[Hit]] | None = None
    promise: str = ""

    def severity(self, target: str) -> Severity | None:
        """How bad a hit is on `target`; None: the rule does not hold there."""
        parts = target.split("-")
        for length in range(len(parts), 0, -1):
            name = "-".join(parts[:length])
            if name in self.on:
                return self.on[name]
        return None


@dataclass(frozen=True)
class Finding:
    """A broken rule at a node. `key` is the node's first output.

    `promise` says what a mechanical fix changes in the results; it is empty where there is no such fix.
    """

    rule: str
    severity: Severity
    title: str
    node: str
    op: str
    reason: str
    fix: str
    source: str
    promise: str = ""
    key: str = field(default="", repr=False)

    @property
    def mechanical(self) -> bool:
        """Whether `fix` may be able to mend it."""
        return bool(self.promise)

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "mechanical": self.mechanical}


def everywhere(severity: Severity) -> dict[str, Severity | None]:
    """The same severity on every runtime."""
    return {"tensorrt": severity, "ort": severity, "openvino": severity}


def check_target(name: str) -> None:
    """Raises `UsageError` with the names that exist."""
    if name not in TARGETS:
        raise UsageError(f"cannot lint for '{name}'; there are: {', '.join(TARGETS)}")
