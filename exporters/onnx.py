"""ONNX: the engine for onnxruntime, and the form in which models are quantized."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events, onnx_files
from compressor.errors import UnsupportedError
from compressor.model import Model, TensorSpec
from compressor.store import file_digest
from compressor.target import Target

if TYPE_CHECKING:
    import onnx
    import torch

__all__ = ["FORM", "SUFFIX", "VERSION", "check", "convert", "export"]

VERSION = 1
FORM = "onnx"
SUFFIX = ".onnx"

_PRECISIONS = ("fp32", "fp16", "int8", "int8-dynamic", "int8-weight", "int4")
_BATCHES = (1, 2, 5)


def check(target: Target) -> str | None:
    """Why this target cannot be made as ONNX; None: it can."""
    if target.precision not in _PRECISIONS:
        return f"{target.precision} is not made for onnxruntime; there are {', '.join(_PRECISIONS)}"
    return None


def convert(model: dict[str, Any], folder: str, opset: int = 20) -> dict[str, Any]:
    """Turn a torch `Model` (its path absolute) into an ONNX `Model` in `folder/model.onnx`; a task.

    Names and free dimensions are those of the model. The file is run by onnxruntime beside the torch
    program at three batch sizes; the largest relative errors are in `facts["parity"]`. Raises
    `UnsupportedError` if no exporter takes the program or the outputs differ by more than
    `torch_graph.TOLERANCE`.
    """
    from compressor.torch_graph import flat_module, load_program

    source = Model.of(model)
    program = load_program(source.path)
    events.progress("torch to ONNX", 0, 2)
    graph, exporter = _exported(program, source, opset)
    onnx_files.tidy(graph)
    _name_dimensions(graph, source.inputs)
    path = Path(folder) / "model.onnx"
    written = onnx_files.write(graph, path)
    events.progress("torch to ONNX", 1, 2)
    parity = _parity(flat_module(program), path, source)
    events.progress("torch to ONNX", 2, 2)
    inputs, outputs = onnx_files.specs(written)
    facts = {**onnx_files.facts(written), "parity": parity, "exporter": exporter}
    converted = replace(source, form="onnx", path=path, inputs=inputs, outputs=outputs, facts=facts)
    return replace(converted, parameters=source.parameters).json(Path(folder))


def export(model: dict[str, Any], target: str, folder: str) -> dict[str, Any]:
    """Write the engine of an ONNX `Model` (its path absolute) as `folder/model.onnx`; a task.

    The graph is the model's own; it lies in one file that is loadable by itself, and its weights beside
    it in `model.onnx.data` only where they exceed `onnx_files.LIMIT` bytes. Raises `UnsupportedError` if
    onnxruntime does not load it.
    """
    reason = check(Target.parse(target))
    if reason:
        raise UnsupportedError(f"target {target}: {reason}")
    source = Model.of(model)
    path = Path(folder) / "model.onnx"
    onnx_files.write(onnx_files.read(source.path), path)
    files = [each for each in (path, path.with_name("model.onnx.data")) if each.exists()]
    return {
        "file": path.name,
        "files": [each.name for each in files],
        "size_bytes": sum(each.stat().st_size for each in files),
        "sha256": file_digest(path),
    }


def _exported(
    program: torch.export.ExportedProgram, source: Model, opset: int
) -> tuple[onnx.ModelProto, str]:
    """The graph and the exporter that made it: torch's present one, else its older one, which is said."""
    from compressor.torch_graph import first_line

    reasons = []
    for name, attempt in (("dynamo", _by_dynamo), ("torchscript", _by_torchscript)):
        if reasons:
            events.warn(
                f"torch's ONNX exporter does not take the model ({reasons[0]}); its older one is tried"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = attempt(program, source, opset)
        except Exception as error:  # exporters let through whatever they meet
            reasons.append(first_line(error.__cause__ or error))
            continue
        written = {entry.domain: entry.version for entry in graph.opset_import}.get("")
        if written == opset:
            return graph, name
        reasons.append(f"it wrote opset {written} where {opset} was asked")
    raise UnsupportedError(
        f"torch cannot export the model to ONNX: {reasons[0]}; the older exporter: {reasons[1]}"
    )


def _by_dynamo(program: torch.export.ExportedProgram, source: Model, opset: int) -> onnx.ModelProto:
    import torch

    made = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=opset,
        input_names=[spec.name for spec in source.inputs],
        output_names=[spec.name for spec in source.outputs],
        verbose=False,
    )
    assert made is not None
    return made.model_proto


def _by_torchscript(program: torch.export.ExportedProgram, source: Model, opset: int) -> onnx.ModelProto:
    import io

    import onnx
    import torch

    from compressor.torch_graph import flat_module
    from compressor.torch_inputs import random_inputs

    buffer = io.BytesIO()
    torch.onnx.export(
        flat_module(program),
        random_inputs(source.inputs),
        buffer,
        dynamo=False,
        opset_version=opset,
        input_names=[spec.name for spec in source.inputs],
        output_names=[spec.name for spec in source.outputs],
        dynamic_axes={
            spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
            for spec in (*source.inputs, *source.outputs)
        },
    )
    return onnx.load_model_from_string(buffer.getvalue())


def _name_dimensions(graph: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> None:
    """Put the model's names in place of the exporter's symbols, also where they stand in expressions."""
    wanted = {spec.name: spec for spec in inputs}
    names: dict[str, str] = {}
    for value in graph.graph.input:
        for size, name in zip(value.type.tensor_type.shape.dim, wanted[value.name].shape, strict=True):
            if size.dim_param:
                names.setdefault(size.dim_param, str(name))
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), size.dim_param)


def _parity(program: torch.fx.GraphModule, path: Path, source: Model) -> dict[str, float]:
    """Largest relative error of the ONNX file against the torch program, by batch size."""
    import onnxruntime
    import torch

    from compressor.torch_graph import TOLERANCE, relative_error
    from compressor.torch_inputs import random_inputs

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    free = any("batch" in spec.shape for spec in source.inputs)
    errors: dict[str, float] = {}
    for batch in _BATCHES if free else (1,):
        tensors = random_inputs(source.inputs, batch, seed=batch)
        with torch.no_grad():
            expected = program(*tensors)
        feeds = {spec.name: tensor.numpy() for spec, tensor in zip(source.inputs, tensors, strict=True)}
        got = session.run(None, {each.name: feeds[each.name] for each in session.get_inputs()})
        pairs = zip(expected, got, strict=True)
        errors[str(batch)] = max(relative_error(first.numpy(), second) for first, second in pairs)
    if max(errors.values()) > TOLERANCE:
        shown = ", ".join(f"{error:.2g} at batch {batch}" for batch, error in errors.items())
        raise UnsupportedError(
            f"the ONNX export does not give what the torch model gives (relative error {shown}; {TOLERANCE:g} is allowed)"
        )
    return errors
