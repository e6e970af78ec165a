"""A torch module as a graph on disk: one torch.export program (aten, training form) with a free batch.

Every torch stage and the ONNX exporter work on this form, so that none of them needs the user's code.
A program on disk keeps the calling convention of the module it came from; `flat_module` gives all of
them the same one: tensors in, in the order of `Model.inputs`, and a tuple out, as `Model.outputs`.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import UnsupportedError
from compressor.model import Model, TensorSpec
from compressor.parity import check_traced, first_line, program_digest, refuse_non_finite
from compressor.torch_inputs import arguments, bind, random_inputs, refuse_cycle

if TYPE_CHECKING:
    import torch

__all__ = [
    "Origin",
    "export",
    "export_module",
    "flat_module",
    "input_specs",
    "load_program",
    "operators",
    "output_names",
    "output_specs",
    "save",
    "seal",
    "to_evaluation",
    "trace",
]


@dataclass(frozen=True)
class Origin:
    """Where a module comes from, as it stands in `Model`."""

    kind: str
    sha256: str
    architecture: str | None = None
    preprocess: dict[str, Any] | None = None


def export_module(
    module: torch.nn.Module,
    example_inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    folder: Path,
) -> Model:
    """Write a live module as `folder/model.pt2`; for the Python API, in the user's own process.

    `example_inputs` are forward's positional arguments, or a mapping of its arguments by name (taken as
    one dict argument if the names are not forward's). Axis 0 of every tensor that is as long there as
    the first one is the batch. The module is copied, not changed. Raises `UnsupportedError`.
    """
    import torch

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if not isinstance(example_inputs, Mapping):
        args = tuple(example_inputs)
    elif set(example_inputs) <= set(arguments(module)):
        kwargs = {name: example_inputs[name] for name in arguments(module) if name in example_inputs}
    else:
        args = (dict(example_inputs),)
    leaves = _leaves((args, kwargs))
    batch = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    specs = [_spec_of_example(leaf, batch) for leaf in leaves]
    program, module = trace(copy.deepcopy(module), args, kwargs, specs)
    return save(program, folder / "model.pt2", Origin("nn.Module", "", type(module).__name__), module)


def export(
    module: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    samples: Sequence[TensorSpec],
    path: Path,
    origin: Origin,
) -> Model:
    """Write `module` (in evaluation mode, float32, on the CPU) as the `.pt2` file `path`.

    `inputs` are what the user gave (free dimensions have names); without them the shapes come from
    `samples` (one sample each, no batch axis), else from the architecture's own preprocessing. Raises
    `UsageError` if the shapes are not known and `UnsupportedError` if the module cannot be exported.
    """
    specs = bind(arguments(module), inputs, samples, origin.preprocess)
    tensors = random_inputs(specs)
    names = [spec.name for spec in specs]
    kwargs = dict(zip(names, tensors, strict=True)) if set(names) <= set(arguments(module)) else {}
    program, module = trace(module, () if kwargs else tensors, kwargs, specs)
    return save(program, path, origin, module, names=names)


def trace(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[TensorSpec | None]
) -> tuple[torch.export.ExportedProgram, torch.nn.Module]:
    """Export `module` with the named dimensions of `specs` free.

    There is one spec per leaf of the arguments, None for what is no tensor.
    Gives the program and the module as it was traced: evaluation mode, float32, CPU. Where the module
    fixes its dimensions the program has batch 1, and a warning says so. Raises `UnsupportedError`.
    """
    import torch
    from torch.utils import _pytree as pytree

    module, widened = _plain(module)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if widened:
        leaves = [leaf.float() if getattr(leaf, "dtype", None) in widened else leaf for leaf in leaves]

    def attempt(batch: int, dims: dict[str, Any]) -> torch.export.ExportedProgram:
        values = [_resized(leaf, spec, batch) for leaf, spec in zip(leaves, specs, strict=True)]
        shapes = pytree.tree_unflatten([_dimensions(spec, dims) for spec in specs], structure)
        positional, named = pytree.tree_unflatten(values, structure)
        dynamic = (*shapes[0], *shapes[1].values()) if dims else None
        with torch.no_grad():
            return torch.export.export(module, positional, named, dynamic_shapes=dynamic)

    names = {name for spec in specs if spec for name in spec.shape if isinstance(name, str)}
    try:
        return attempt(2, {name: torch.export.Dim(name) for name in sorted(names)}), module
    except Exception as error:  # torch.export lets through whatever the module's own code raises
        failure = error
    if names == {"batch"}:
        try:
            program = attempt(1, {})
        except Exception as error:
            failure = error
        else:
            events.warn(
                f"the model fixes its batch ({first_line(failure)}); the engine takes one sample at a time"
            )
            return program, module
    others = ", ".join(sorted(names - {"batch"}))
    hint = f"; if it fixes {others}, give the sizes by --input" if others else ""
    raise UnsupportedError(f"torch.export cannot trace the model: {first_line(failure)}{hint}") from failure


def save(
    program: torch.export.ExportedProgram,
    path: Path,
    origin: Origin,
    reference: torch.nn.Module | None = None,
    names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Model:
    """Write the program and say what it is; with `reference`, first check that both give the same.

    `names` are the inputs' names (default: those of the graph). Raises `UnsupportedError` if the program
    does not give what `reference` gives at one sample and at three.
    """
    import torch

    program, graph = seal(program)
    inputs = input_specs(graph, names)
    outputs = output_specs(program, graph, output_names)
    refuse_non_finite(graph)
    if reference is not None:
        check_traced(reference, program, graph, inputs)
    beside = path.with_suffix(".partial.pt2")
    torch.export.save(program, str(beside))
    beside.replace(path)
    facts = {
        "operators": operators(graph),
        "precision": "float32",
        "free": sorted({size for spec in inputs for size in spec.shape if isinstance(size, str)}),
        "digest": program_digest(program, (*inputs, *outputs)),
    }
    return Model(
        form="torch",
        path=path,
        inputs=inputs,
        outputs=outputs,
        sha256=origin.sha256,
        parameters=sum(value.numel() for value in _weights(graph)),
        kind=origin.kind,
        architecture=origin.architecture,
        preprocess=origin.preprocess,
        facts=facts,
    )


def _weights(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Parameters; of a module that has none, the buffers that it calculates with."""
    return list(graph.parameters()) or [value for value in graph.buffers() if value.is_floating_point()]


def load_program(path: Path) -> torch.export.ExportedProgram:
    """The program in a `.pt2` file that this package wrote (not for files of unknown origin)."""
    import torch

    return torch.export.load(str(path))


def flat_module(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """The program as a module that takes tensors in order and gives a tuple of tensors.

    Dictionaries, optional arguments that were None and outputs that are no tensors are gone, and so are
    the guards on shapes. Parameters can be trained; `train` and `eval` cannot be switched.
    """
    import torch

    module = program.module(check_guards=False)
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "placeholder" and not _is_tensor(node):
            if node.users:
                raise UnsupportedError(
                    f"the model's input '{node.name}' is no tensor; only tensors can be fed"
                )
            graph.erase_node(node)
    output = next(node for node in graph.nodes if node.op == "output")
    output.args = (tuple(leaf for leaf in _leaves(output.args[0]) if _is_tensor(leaf)),)
    graph.set_codegen(torch.fx.graph.CodeGen())
    return torch.fx.GraphModule(module, graph)


def seal(program: torch.export.ExportedProgram) -> tuple[torch.export.ExportedProgram, torch.fx.GraphModule]:
    """The program without what belongs to training: dropout and batch statistics that were traced in.

    Gives the program (traced again if something changed) and its flat module.
    """

    graph = flat_module(program)
    if not to_evaluation(graph):
        return program, graph
    specs = input_specs(graph)
    program, _ = trace(graph, random_inputs(specs), {}, specs)
    return program, flat_module(program)


def _plain(module: torch.nn.Module) -> tuple[torch.nn.Module, set[torch.dtype]]:
    """The module in evaluation mode, float32 and on the CPU; and the types that were widened."""
    import torch

    refuse_cycle(module)
    if not isinstance(module, torch.fx.GraphModule):
        module.eval()
    small = {torch.float16, torch.bfloat16} & {
        value.dtype for value in (*module.parameters(), *module.buffers())
    }
    if small:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in small))
        events.warn(f"the weights are {names}; they are widened to float32")
        module = module.float()
    return module.cpu(), small


def _spec_of_example(leaf: Any, batch: int) -> TensorSpec | None:
    import torch

    if not isinstance(leaf, torch.Tensor):
        return None
    shape: list[int | str] = list(leaf.shape)
    if shape and shape[0] == batch:
        shape[0] = "batch"
    return TensorSpec("", str(leaf.dtype).removeprefix("torch."), tuple(shape))


def _resized(leaf: Any, spec: TensorSpec | None, batch: int) -> Any:
    """The example with `batch` samples; a batch of one traced would be fixed at one."""
    if spec is None or "batch" not in spec.shape:
        return leaf
    axis = spec.shape.index("batch")
    repeats = [1] * leaf.dim()
    repeats[axis] = -(-batch // leaf.shape[axis])
    return leaf.detach().cpu().repeat(repeats).narrow(axis, 0, batch).clone()


def _dimensions(spec: TensorSpec | None, dims: Mapping[str, Any]) -> dict[int, Any] | None:
    if spec is None:
        return None
    return {
        axis: dims[name] for axis, name in enumerate(spec.shape) if isinstance(name, str) and name in dims
    }


def _leaves(tree: Any) -> list[Any]:
    from torch.utils import _pytree as pytree

    leaves: list[Any] = pytree.tree_leaves(tree)
    return leaves


def _is_tensor(node: Any) -> bool:
    import torch

    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def input_specs(graph: torch.fx.GraphModule, names: Sequence[str] | None = None) -> tuple[TensorSpec, ...]:
    """The inputs of a flat module; `names` default to those of the graph."""
    nodes = _placeholders(graph)
    return _specs(nodes, names or [node.name for node in nodes], _symbols(graph))


def output_specs(
    program: torch.export.ExportedProgram, graph: torch.fx.GraphModule, names: Sequence[str] | None = None
) -> tuple[TensorSpec, ...]:
    """The outputs of a program whose flat module is `graph`; `names` default to `output_names`."""
    results = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    taken = {node.name for node in _placeholders(graph)}
    return _specs(results, names or output_names(program, taken), _symbols(graph))


def operators(graph: torch.fx.GraphModule) -> dict[str, int]:
    """How often each operator stands in the graph."""
    counts = Counter(_operator(node) for node in graph.graph.nodes if node.op == "call_function")
    return dict(counts.most_common())


def _placeholders(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _symbols(graph: torch.fx.GraphModule) -> dict[str, str]:
    """Names for the free dimensions of the inputs: `batch` for the first one on axis 0, else `dim1`, ..."""
    names: dict[str, str] = {}
    for node in _placeholders(graph):
        for axis, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                name = "batch" if axis == 0 and "batch" not in names.values() else f"dim{axis}"
                while name in names.values() and str(size) not in names:
                    name += "_"
                names.setdefault(str(size), name)
    return names


def _specs(
    nodes: Sequence[torch.fx.Node], names: Sequence[str], symbols: Mapping[str, str]
) -> tuple[TensorSpec, ...]:
    def named(size: Any) -> int | str:
        if isinstance(size, int):
            return size
        return re.sub(r"\w+", lambda word: symbols.get(word[0], word[0]), str(size))

    return tuple(
        TensorSpec(
            name,
            str(node.meta["val"].dtype).removeprefix("torch."),
            tuple(named(size) for size in node.meta["val"].shape),
        )
        for node, name in zip(nodes, names, strict=True)
    )


def output_names(program: torch.export.ExportedProgram, taken: set[str]) -> list[str]:
    """Keys of dictionaries; `output` for a single tensor, `output_0`, `output_1`, ... for several."""
    from torch.utils import _pytree as pytree

    structure = program.call_spec.out_spec
    tree = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    paths = [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    specs = program.graph_signature.output_specs
    results = [spec for spec in specs if spec.kind.name == "USER_OUTPUT"]
    names = []
    for path, spec in zip(paths, results, strict=True):
        if type(spec.arg).__name__ != "TensorArgument":
            continue
        keys = [str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part)))) for part in path]
        name = "_".join(["output", *keys] if not keys or keys[0].isdigit() else keys)
        names.append(f"{name}_output" if name in taken else name)
    return ["output"] if names == ["output_0"] and "output" not in taken else names


def _operator(node: torch.fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def to_evaluation(graph: torch.fx.GraphModule) -> bool:
    """Turn off dropout and batch statistics that stand in the graph as literals; says so, gives whether."""
    training = {
        "dropout": 2,
        "dropout_": 2,
        "feature_dropout": 2,
        "alpha_dropout": 2,
        "batch_norm": 5,
        "rrelu": 3,
    }
    changed: Counter[str] = Counter()
    for node in list(graph.graph.nodes):
        name = _operator(node)
        at = training.get(name)
        if at is not None and len(node.args) > at and node.args[at] is True:
            if name == "batch_norm" and node.args[3] is None:
                continue  # it has no running statistics: batch statistics are what it is made for
            node.update_arg(at, False)
            changed[name] += 1
        counted = name == "add_" and "num_batches_tracked" in str(getattr(node.args[0], "target", ""))
        if counted and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    if changed:
        listed = ", ".join(f"{count} {name}" for name, count in changed.items())
        events.warn(f"the model was saved in training mode; switched to evaluation: {listed}")
    return bool(changed)
