"""ONNX: the engine for onnxruntime, and the form in which models are quantized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor import events, onnx_files, plugins
from compressor.errors import UnsupportedError
from compressor.model import Model
from compressor.quantization.scheme import SCHEMES
from compressor.quantization.widen import widen
from compressor.store import file_digest
from compressor.target import Target

__all__ = ["FORM", "SUFFIX", "VERSION", "check", "convert", "export"]

VERSION = 4
FORM = "onnx"
SUFFIX = ".onnx"

_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8-dynamic", "int8-weight", "int4")


def check(target: Target) -> str | None:
    """Why this target cannot be made as ONNX; None: it can."""
    if target.precision not in _PRECISIONS:
        return f"{target.precision} is not made for onnxruntime; there are {', '.join(_PRECISIONS)}"
    if target.precision == "int8-dynamic" and target.device == "cuda":
        return "onnxruntime has no kernels for dynamic int8 on cuda; there are fp16, bf16 and int4"
    if target.pruning and "prune" not in plugins.names("stages"):
        return "this version cannot prune"
    return None


def convert(model: dict[str, Any], folder: str, opset: int = 20) -> dict[str, Any]:
    """Turn a torch `Model` (its path absolute) into an ONNX `Model` in `folder/model.onnx`; a task.

    Names and free dimensions are those of the model. The file is run by onnxruntime beside the torch
    program at three batch sizes; the largest relative errors are in `facts["parity"]`. Raises
    `UnsupportedError` if no exporter takes the program or the outputs differ by more than
    `parity.TOLERANCE`.
    """
    from compressor.parity import check_onnx
    from compressor.torch_graph import flat_module, load_program
    from compressor.torch_onnx import Signature, exported

    source = Model.of(model)
    program = load_program(source.path)
    module = flat_module(program)
    events.progress("torch to ONNX", 0, 2)
    graph, exporter = exported(program, module, Signature(source.inputs, source.outputs, opset))
    onnx_files.tidy(graph)
    path = Path(folder) / "model.onnx"
    written = onnx_files.write(graph, path)
    events.progress("torch to ONNX", 1, 2)
    parity = check_onnx(module, path, source.inputs)
    events.progress("torch to ONNX", 2, 2)
    inputs, outputs = onnx_files.specs(written)
    facts = {**onnx_files.facts(written), "parity": parity, "exporter": exporter}
    converted = replace(source, form="onnx", path=path, inputs=inputs, outputs=outputs, facts=facts)
    return converted.json(Path(folder))


def export(model: dict[str, Any], target: str, folder: str, load: bool = True) -> dict[str, Any]:
    """Write the engine of an ONNX `Model` (its path absolute) as `folder/model.onnx`; a task.

    The graph is the model's own, with first convolutions as the kernels of its scheme want them
    (`quantization.widen`); it lies in one file that is loadable by itself, and its weights beside
    it in `model.onnx.data` only where they exceed `onnx_files.LIMIT` bytes. Without `load` it is not tried
    whether onnxruntime takes it, for engines that are run next anyway. Raises `UnsupportedError` if
    onnxruntime does not load it.
    """
    asked = Target.parse(target)
    reason = check(asked)
    if reason:
        raise UnsupportedError(f"target {target}: {reason}")
    source = Model.of(model)
    path = Path(folder) / "model.onnx"
    graph = onnx_files.read(source.path)
    onnx_files.tidy(graph)
    if scheme := SCHEMES.get(source.facts.get("scheme", "")):
        widen(graph, scheme)
    if load:
        onnx_files.write(graph, path, device=asked.device or "cpu")
    else:
        onnx_files.save(graph, path)
    files = [each for each in (path, path.with_name("model.onnx.data")) if each.exists()]
    return {
        "file": path.name,
        "files": [each.name for each in files],
        "size_bytes": sum(each.stat().st_size for each in files),
        "sha256": file_digest(path),
    }
