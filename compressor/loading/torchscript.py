"""TorchScript archives, scripted or traced."""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import ModelFileError, UnsupportedError
from compressor.loading import _script_code
from compressor.model import Model, TensorSpec
from compressor.store import file_digest

if TYPE_CHECKING:
    from compressor.loading import LoadOptions

DESCRIPTION = "TorchScript archive"
USES: tuple[str, ...] = ("inputs",)

_OPSET = 20


def recognise(path: Path) -> bool:
    """A zip archive with `constants.pkl` and code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        parts = {name.partition("/")[2] for name in archive.namelist()}
    return "constants.pkl" in parts and any(part.startswith("code/") for part in parts)


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """The module in evaluation mode, checked against the TorchScript itself.

    It becomes an exported program; where its branches and loops do not allow that, an ONNX file, and a
    warning says so. Raises `UnsupportedError` if neither is possible.
    """
    from compressor.torch_inputs import arguments, bind

    script = _read(path, trust=options.trust)
    script.eval()
    script.float()
    _refuse_plain_values(script)
    specs = bind(arguments(script), options.inputs, options.samples, None)
    digest = file_digest(path)
    try:
        return _as_program(script, specs, folder, digest)
    except UnsupportedError as error:
        events.warn(f"{error}; the model is converted to ONNX directly")
        return _as_onnx(script, specs, folder, digest)


def inspect(path: Path) -> dict[str, Any]:
    """Arguments, parameters and operators, as the archive declares them."""
    script = _read(path, trust=False)
    schema = script.forward.schema
    operators = Counter(
        node.kind().removeprefix("aten::")
        for node in script.inlined_graph.nodes()
        if node.kind().startswith("aten::")
    )
    return {
        "architecture": script.original_name,
        "inputs": [f"{each.name}: {each.type}" for each in schema.arguments[1:]],
        "outputs": [str(each.type) for each in schema.returns],
        "parameters": sum(value.numel() for value in script.parameters()),
        "precision": ", ".join(
            sorted({str(value.dtype).removeprefix("torch.") for value in script.parameters()})
        ),
        "operators": dict(operators.most_common()),
        "training_mode": bool(script.training),
    }


def _read(path: Path, *, trust: bool) -> Any:
    """Load on the CPU. Without `trust`, code that does more than calculate is refused before it can run."""
    import torch
    from torch.jit._recursive import wrap_cpp_module

    if not trust:
        _script_code.check_text(path)
    unit = torch._C.CompilationUnit()
    try:
        module = torch._C.import_ir_module(unit, str(path), torch.device("cpu"), {}, False)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:300]
        raise ModelFileError(f"{path}: torch cannot read this TorchScript archive: {reason}") from error
    if not trust:
        _script_code.check_functions(path, unit.get_functions())
    return wrap_cpp_module(module)


def _refuse_plain_values(script: Any) -> None:
    for each in script.forward.schema.arguments[1:]:
        if str(each.type) not in ("Tensor", "Optional[Tensor]") and not each.has_default_value():
            raise UnsupportedError(
                f"the model's input '{each.name}' is of type {each.type}; only tensors can be fed: script a "
                "module whose forward takes tensors alone"
            )


def _as_program(script: Any, specs: tuple[TensorSpec, ...], folder: Path, digest: str) -> Model:
    from compressor import torch_graph
    from compressor.torch_inputs import random_inputs

    tensors = random_inputs(specs)
    graph = _converted(script, tensors)
    reference = graph if torch_graph.to_evaluation(graph) else script
    program, _ = torch_graph.trace(graph, tensors, {}, specs)
    origin = torch_graph.Origin("TorchScript", digest, script.original_name)
    names = [spec.name for spec in specs]
    return torch_graph.save(program, folder / "model.pt2", origin, reference, names=names)


def _converted(script: Any, tensors: Any) -> Any:
    """The TorchScript graph as a flat module; the converter is private to torch, hence kept in one place."""
    import torch
    from torch._export.converter import TS2EPConverter

    from compressor.parity import first_line
    from compressor.torch_graph import flat_module

    try:
        with torch.no_grad():
            graph = flat_module(TS2EPConverter(script, tensors).convert())
    except Exception as error:  # the converter lets through whatever it meets
        raise UnsupportedError(
            f"torch cannot turn this TorchScript into an exported program ({first_line(error)})"
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


def _as_onnx(script: Any, specs: tuple[TensorSpec, ...], folder: Path, digest: str) -> Model:
    import torch

    from compressor import onnx_files
    from compressor.parity import check_onnx
    from compressor.torch_inputs import random_inputs
    from compressor.torch_onnx import Signature, by_older_exporter

    with torch.no_grad():
        results = torch.utils._pytree.tree_leaves(script(*random_inputs(specs)))
    names = ["output"] if len(results) == 1 else [f"output_{at}" for at in range(len(results))]
    free = any("batch" in spec.shape for spec in specs)
    outputs = [
        TensorSpec(
            name, "float32", ("batch", *value.shape[1:]) if free and value.dim() else tuple(value.shape)
        )
        for name, value in zip(names, results, strict=True)
    ]
    graph = by_older_exporter(script, Signature(specs, outputs, _OPSET))
    onnx_files.tidy(graph)
    written = onnx_files.write(graph, folder / "model.onnx")
    facts = {**onnx_files.facts(written), "exporter": "torchscript"}
    facts["parity"] = check_onnx(script, folder / "model.onnx", specs)
    facts["digest"] = onnx_files.file_set_digest(folder / "model.onnx")
    inputs, declared = onnx_files.specs(written)
    count = sum(value.numel() for value in script.parameters())
    return Model(
        form="onnx",
        path=folder / "model.onnx",
        inputs=inputs,
        outputs=declared,
        sha256=digest,
        parameters=count,
        kind="TorchScript",
        architecture=script.original_name,
        facts=facts,
    )
