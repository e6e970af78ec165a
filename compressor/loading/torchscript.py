"""TorchScript archives, scripted or traced."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ModelFileError, UnsupportedError
from compressor.model import Model
from compressor.store import file_digest

if TYPE_CHECKING:
    from compressor.loading import LoadOptions

DESCRIPTION = "TorchScript archive"


def recognise(path: Path) -> bool:
    """A zip archive with `constants.pkl` and code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        parts = {name.partition("/")[2] for name in archive.namelist()}
    return "constants.pkl" in parts and any(part.startswith("code/") for part in parts)


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """The module in evaluation mode as an exported program, checked against the TorchScript itself."""

    from compressor import torch_graph
    from compressor.torch_inputs import arguments, bind, random_inputs

    script = _read(path)
    script.eval()
    script.float()
    specs = bind(arguments(script), options.inputs, options.samples, None)
    tensors = random_inputs(specs)
    graph = _converted(script, tensors)
    origin = torch_graph.Origin("TorchScript", file_digest(path), script.original_name)
    names = [spec.name for spec in specs]
    reference = graph if torch_graph.to_evaluation(graph) else script
    program, _ = torch_graph.trace(graph, tensors, {}, specs)
    return torch_graph.save(program, folder / "model.pt2", origin, reference, names=names)


def inspect(path: Path) -> dict[str, Any]:
    """Arguments, parameters and operators, as the archive declares them."""

    script = _read(path)
    operators: dict[str, int] = {}
    for node in script.inlined_graph.nodes():
        if node.kind().startswith("aten::"):
            name = node.kind().removeprefix("aten::")
            operators[name] = operators.get(name, 0) + 1
    return {
        "architecture": script.original_name,
        "inputs": [
            {"name": each.name, "dtype": str(each.type), "shape": None}
            for each in script.forward.schema.arguments[1:]
        ],
        "outputs": [
            {"name": "output", "dtype": str(each.type), "shape": None}
            for each in script.forward.schema.returns
        ],
        "parameters": sum(value.numel() for value in script.parameters()),
        "operators": dict(sorted(operators.items(), key=lambda item: -item[1])),
        "training_mode": bool(script.training),
    }


def _read(path: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.jit is deprecated; the files live on
            return torch.jit.load(str(path), map_location="cpu")
    except (RuntimeError, ValueError) as error:
        raise ModelFileError(
            f"{path}: torch cannot read this TorchScript archive: {str(error).strip().splitlines()[0][:300]}"
        ) from error


def _converted(script: Any, tensors: Any) -> Any:
    """The TorchScript graph as a flat module; the converter is private to torch, hence kept in one place."""
    import torch
    from torch._export.converter import TS2EPConverter

    from compressor.torch_graph import first_line, flat_module

    try:
        with torch.no_grad():
            graph = flat_module(TS2EPConverter(script, tensors).convert())
    except Exception as error:  # the converter lets through whatever it meets
        raise UnsupportedError(
            f"torch cannot turn this TorchScript into an exported program: {first_line(error)}"
        ) from error
    for name, _ in script.named_parameters():
        _make_parameter(graph, name)
    return graph


def _make_parameter(graph: Any, name: str) -> None:
    """The converter turns every weight into a buffer; what was trainable becomes so again."""
    import torch

    home, _, leaf = name.rpartition(".")
    try:
        owner = graph.get_submodule(home)
    except AttributeError:
        return
    if leaf in owner._buffers and owner._buffers[leaf].is_floating_point():
        value = owner._buffers.pop(leaf)
        owner.register_parameter(leaf, torch.nn.Parameter(value.detach().clone()))
