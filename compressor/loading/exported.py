"""`.pt2` files: programs saved by torch.export.save."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import CompressError, ModelFileError, UsageError
from compressor.model import Model, TensorSpec
from compressor.store import file_digest

if TYPE_CHECKING:
    import torch

    from compressor.loading import LoadOptions

DESCRIPTION = "exported program (.pt2)"
USES: tuple[str, ...] = ()


def recognise(path: Path) -> bool:
    """A zip archive with the mark of torch's export format."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        parts = {name.partition("/")[2]: name for name in archive.namelist()}
        marked = "archive_format" in parts and archive.read(parts["archive_format"]).strip() == b"pt2"
    return marked or any(part.startswith("models/") and part.endswith(".json") for part in parts)


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """The program in evaluation mode with a free batch, checked against what the file gives.

    Raises `ModelFileError` if the archive could run code of its own.
    """
    from compressor import torch_graph

    program = _read(path, folder)
    graph = torch_graph.flat_module(program)
    torch_graph.to_evaluation(graph)
    specs = torch_graph.input_specs(graph)
    for given in options.inputs:
        _refuse_contradiction(given, specs)
    names = torch_graph.output_names(program, {spec.name for spec in specs})
    origin = torch_graph.Origin("exported program", file_digest(path))
    target = folder / "model.pt2"
    freed = _with_free_batch(specs)
    if freed != specs:
        try:
            return _save(graph, freed, _in_pieces(graph, specs), target, origin, names)
        except CompressError as error:
            events.warn(
                f"the program stays as it was exported, with fixed inputs "
                f"{', '.join(map(str, specs))}: {error}"
            )
    return _save(graph, specs, graph, target, origin, names)


def inspect(path: Path) -> dict[str, Any]:
    """Inputs, outputs, parameters and operators of a program that is safe to load."""

    from compressor import torch_graph
    from compressor.state_dicts import summary

    with tempfile.TemporaryDirectory() as folder:
        program = _read(path, Path(folder))
    graph = torch_graph.flat_module(program)
    inputs, outputs = torch_graph.input_specs(graph), torch_graph.output_specs(program, graph)
    return {
        "inputs": [asdict(spec) for spec in inputs],
        "outputs": [asdict(spec) for spec in outputs],
        **summary(program.state_dict, parameters=program.graph_signature.parameters),
        "operators": torch_graph.operators(graph),
        "free": sorted({size for spec in inputs for size in spec.shape if isinstance(size, str)}),
    }


def _read(path: Path, folder: Path) -> torch.export.ExportedProgram:
    import torch

    from compressor import pt2_archive
    from compressor.parity import first_line

    try:
        pt2_archive.check(path)
        with _safe_reads_only(), pt2_archive.on_cpu(path, folder).open("rb") as file:
            return torch.export.load(file)
    except CompressError:
        raise
    except Exception as error:  # the deserializer lets through whatever a damaged or newer file causes
        raise ModelFileError(
            f"{path}: torch cannot read this exported program: {first_line(error)}"
        ) from error


@contextmanager
def _safe_reads_only() -> Iterator[None]:
    """Make torch.load refuse in this process what its safe unpickler does not take, whoever calls it."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _refuse_contradiction(given: TensorSpec, specs: tuple[TensorSpec, ...]) -> None:
    """Raise `UsageError` where --input says something else than the program."""
    named = {spec.name: spec for spec in specs}
    spec = named.get(given.name) or (specs[0] if len(specs) == 1 and not given.name else None)
    if spec is None:
        raise UsageError(f"--input names '{given.name}', but the model takes {', '.join(named)}")
    sizes = zip(given.shape, spec.shape, strict=False)
    fits = len(given.shape) == len(spec.shape) and all(
        have == size or isinstance(have, str) or isinstance(size, str) for have, size in sizes
    )
    if not fits or given.dtype not in (spec.dtype, "float32"):
        raise UsageError(f"--input {given} contradicts the program, which was exported with {spec}")


def _with_free_batch(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The inputs with axis 0 free, where all of them have the same fixed size there."""
    sizes = {spec.shape[0] for spec in specs if spec.shape}
    if len(sizes) != 1 or not isinstance(next(iter(sizes)), int):
        return specs
    return tuple(replace(spec, shape=("batch", *spec.shape[1:])) if spec.shape else spec for spec in specs)


def _save(
    graph: torch.fx.GraphModule,
    specs: tuple[TensorSpec, ...],
    reference: torch.nn.Module,
    path: Path,
    origin: Any,
    output_names: list[str],
) -> Model:
    from compressor import torch_graph
    from compressor.torch_inputs import random_inputs

    program, _ = torch_graph.trace(graph, random_inputs(specs), {}, specs)
    names = [spec.name for spec in specs]
    return torch_graph.save(program, path, origin, reference, names=names, output_names=output_names)


def _in_pieces(graph: torch.fx.GraphModule, specs: tuple[TensorSpec, ...]) -> Any:
    """A module for any batch that feeds the fixed program piece by piece: what a free batch must give."""
    import torch

    size = int(specs[0].shape[0])

    class InPieces(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            batch = len(tensors[0])
            padded = [torch.cat([tensor] * size)[: -(-batch // size) * size] for tensor in tensors]
            pieces = [graph(*parts) for parts in zip(*(tensor.split(size) for tensor in padded), strict=True)]
            joined = (torch.cat(parts)[:batch] for parts in zip(*pieces, strict=True))
            return tuple(joined)

    return InPieces()
