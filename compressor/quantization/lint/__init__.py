"""Says what keeps a quantized ONNX file from being taken, right or fast, and mends what is mechanical.

A file of any tool is read, never run. Rules hold for runtimes (`base.TARGETS`); each names its source.
Graphs inside If, Loop and Scan are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.quantization.lint import files, kernels, operands, parameters, structure, tensorrt
from compressor.quantization.lint.base import Finding, Hit, Rule, check_target
from compressor.quantization.lint.edits import sweep
from compressor.quantization.lint.graph import QuantizedGraph

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["RULES", "Finding", "fix", "lint", "lint_task"]

RULES: tuple[Rule, ...] = (
    *parameters.RULES, *structure.RULES, *tensorrt.RULES, *kernels.RULES,
    *operands.RULES, *files.RULES,
)  # fmt: skip
_ORDER = ("error", "warning", "info")


def lint(model: ModelProto, target: str) -> list[Finding]:
    """What breaks a rule that holds for `target`, worst first; raises `UsageError` for an unknown target."""
    check_target(target)
    graph = QuantizedGraph(model)
    found = [
        _finding(rule, hit, target) for rule in RULES if rule.severity(target) for hit in rule.check(graph)
    ]
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))


def fix(model: ModelProto, findings: Sequence[Finding]) -> tuple[ModelProto, list[Finding]]:
    """A copy of the model with the mechanical findings mended, and the findings that are gone.

    Each fix keeps the promise of its rule (`Rule.promise`): most change no result at all.
    """
    mended = type(model).FromString(model.SerializeToString())
    fixed: list[Finding] = []
    for rule in RULES:
        wanted = {finding.key: finding for finding in findings if finding.rule == rule.id}
        if rule.mend is None or not wanted:
            continue
        graph = QuantizedGraph(mended)
        hits = [hit for hit in rule.check(graph) if _key(hit) in wanted]
        left = {_key(hit) for hit in hits} - {_key(hit) for hit in list(rule.mend(graph, hits))}
        fixed += [finding for key, finding in wanted.items() if key not in left]
        graph.commit()
        sweep(QuantizedGraph(mended))
    return mended, fixed


def lint_task(path: str, target: str, out: str | None = None) -> dict[str, Any]:
    """The task: findings in the file at `path`; with `out`, the mended file is written there.

    Gives `quantized` (whether there are integers at all) and `findings`; with `out` also `fixed` and the
    `rest` that is found in the new file. Raises `ModelFileError` for anything but an ONNX file.
    """
    from compressor import onnx_files
    from compressor.quantization import graph
    from compressor.store import spare, usable

    if out:
        sides = onnx_files.side_files(onnx_files.read(Path(path), data=False), Path(path))
        spare("--out", Path(out), [path, *map(str, sides)])
    model = _read(Path(path))
    found = lint(model, target)
    quantized = graph.already_quantized(model)
    answer: dict[str, Any] = {"path": path, "target": target, "quantized": quantized}
    answer["findings"] = [item.json() for item in found]
    if out is None:
        return answer
    mended, fixed = fix(model, [finding for finding in found if finding.mechanical])
    with usable(Path(out)):
        onnx_files.write(mended, Path(out).resolve())
    rest = lint(mended, target)
    told = {"fixed": [item.json() for item in fixed], "rest": [item.json() for item in rest]}
    return {**answer, "out": out, **told}


def _read(path: Path) -> ModelProto:
    from onnx import inliner

    from compressor import loading, onnx_files
    from compressor.errors import ModelFileError

    kind = loading.recognise(path)
    if kind != "onnx":
        raise ModelFileError(
            f"{path} is not an ONNX file; lint reads the ONNX files that engines are made of"
        )
    model = onnx_files.read(path)
    return inliner.inline_local_functions(model) if model.functions else model


def _finding(rule: Rule, hit: Hit, target: str) -> Finding:
    severity = rule.severity(target)
    assert severity is not None
    node = hit.node
    name = hit.tensor if node is None else node.name or next(iter(node.output), "")
    return Finding(
        rule.id, severity, rule.title, name, "" if node is None else node.op_type, hit.reason, rule.fix,
        rule.source, rule.promise, _key(hit),
    )  # fmt: skip


def _key(hit: Hit) -> str:
    return hit.tensor if hit.node is None else next(filter(None, hit.node.output), hit.node.name)
