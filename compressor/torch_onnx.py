"""torch to ONNX by either of torch's exporters, with names, free dimensions and opset as asked."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import UnsupportedError
from compressor.model import TensorSpec
from compressor.parity import first_line
from compressor.torch_inputs import random_inputs

if TYPE_CHECKING:
    import onnx
    import torch

__all__ = ["Signature", "by_older_exporter", "exported"]


@dataclass(frozen=True)
class Signature:
    """What the ONNX graph takes and gives."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    opset: int


def exported(
    program: torch.export.ExportedProgram, module: torch.nn.Module, signature: Signature
) -> tuple[onnx.ModelProto, str]:
    """The graph, and the exporter that made it: torch's present one, else its older one, which is said.

    `module` is the flat module of `program`. Raises `UnsupportedError` if neither takes it.
    """
    attempts: list[tuple[str, Callable[[], onnx.ModelProto]]] = [
        ("dynamo", lambda: _by_present_exporter(program, signature)),
        ("torchscript", lambda: by_older_exporter(module, signature)),
    ]
    reasons: list[str] = []
    for name, attempt in attempts:
        if reasons:
            events.warn(
                f"torch's ONNX exporter does not take the model ({reasons[0]}); its older one is tried"
            )
        try:
            return attempt(), name
        except UnsupportedError as error:
            reasons.append(str(error))
    raise UnsupportedError(
        f"torch cannot export the model to ONNX: {reasons[0]}; the older exporter: {reasons[1]}"
    )


def by_older_exporter(module: torch.nn.Module, signature: Signature) -> onnx.ModelProto:
    """Export a module that takes and gives tensors through TorchScript, which knows branches and loops."""
    import onnx
    import torch

    buffer = io.BytesIO()
    specs = (*signature.inputs, *signature.outputs)
    _quietly(
        lambda: torch.onnx.export(
            module,
            random_inputs(signature.inputs),
            buffer,
            dynamo=False,
            dynamic_axes={
                spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
                for spec in specs
            },
            **_options(signature),
        )
    )
    return _checked(onnx.load_model_from_string(buffer.getvalue()), signature)


def _by_present_exporter(program: torch.export.ExportedProgram, signature: Signature) -> onnx.ModelProto:
    import torch

    made = _quietly(
        lambda: torch.onnx.export(program, (), dynamo=True, verbose=False, **_options(signature)).model_proto
    )
    return _checked(made, signature)


def _options(signature: Signature) -> dict[str, Any]:
    return {
        "opset_version": signature.opset,
        "input_names": [spec.name for spec in signature.inputs],
        "output_names": [spec.name for spec in signature.outputs],
    }


def _quietly(export: Callable[[], Any]) -> Any:
    """Run an exporter; whatever it raises becomes an `UnsupportedError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return export()
    except Exception as error:  # exporters let through whatever they meet
        raise UnsupportedError(first_line(error.__cause__ or error)) from error


def _checked(graph: onnx.ModelProto, signature: Signature) -> onnx.ModelProto:
    """Asked for an opset that it does not know, torch may write another one and say nothing."""
    written = {entry.domain: entry.version for entry in graph.opset_import}.get("")
    if written != signature.opset:
        raise UnsupportedError(f"it wrote opset {written} where {signature.opset} was asked")
    _name_dimensions(graph, signature.inputs)
    return graph


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
