"""OpenVINO: an engine in its intermediate representation, `model.xml` with the weights in `model.bin`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import onnx_files, plugins
from compressor.errors import UnsupportedError
from compressor.model import Model, TensorSpec
from compressor.quantization.repeats import drop_repeats
from compressor.store import file_digest
from compressor.target import Target

if TYPE_CHECKING:
    import onnx
    import openvino

__all__ = ["FORM", "SUFFIX", "VERSION", "check", "export"]

VERSION = 3
FORM = "onnx"
SUFFIX = ".xml"

_PRECISIONS = ("fp32", "int8")


def check(target: Target) -> str | None:
    """Why this target cannot be made for OpenVINO; None: it can."""
    if find_spec("openvino") is None:
        return "the package openvino is not installed; install it with: pip install 'modelpress[openvino]'"
    if target.precision not in _PRECISIONS:
        return f"{target.precision} is not made for openvino; there are {', '.join(_PRECISIONS)}"
    if target.pruning and "prune" not in plugins.names("stages"):
        return "this version cannot prune"
    return None


def export(model: dict[str, Any], target: str, folder: str, load: bool = True) -> dict[str, Any]:
    """Write the engine of an ONNX `Model` (its path absolute) as `folder/model.xml` and `.bin`; a task.

    Numbers stay as they are: float32 is not stored as float16, and Q/DQ pairs stay pairs, which the
    runtime turns into integer kernels when it loads the engine. The names of inputs and outputs and the
    free dimensions are the model's. The digest of the weights stands in `model.xml` itself (under
    `rt_info`, `modelpress`, `weights_sha256`), so that the returned `sha256` of that file covers both.
    Without `load` it is not tried whether it loads the engine, for engines that are run next anyway. Raises
    `UnsupportedError` if OpenVINO is not installed, cannot take the model or does not load the engine.
    """
    if reason := check(Target.parse(target)):
        raise UnsupportedError(f"target {target}: {reason}")
    source, path = Model.of(model), Path(folder, "model.xml")
    graph = _graph(source, Path(folder))
    _save(graph, path)
    graph.set_rt_info(file_digest(path.with_suffix(".bin")), ["modelpress", "weights_sha256"])
    _save(graph, path)
    if load:
        _load(path)
    files = (path, path.with_suffix(".bin"))
    return {
        "file": path.name,
        "files": [each.name for each in files],
        "size_bytes": sum(each.stat().st_size for each in files),
        "sha256": file_digest(path),
    }


def _graph(source: Model, folder: Path) -> openvino.Model:
    """The model as OpenVINO's graph, simplified as its own converter does: half as large without weights."""
    import openvino
    from openvino._offline_transformations import apply_moc_transformations

    path = _suited(source.path, folder)
    try:
        graph = openvino.Core().read_model(str(path))
    except Exception as error:
        raise UnsupportedError(f"OpenVINO cannot take this model: {_line(error)}") from error
    apply_moc_transformations(graph, False)
    _name(graph.inputs, [spec.name for spec in source.inputs], "input")
    _name(graph.outputs, [spec.name for spec in source.outputs], "output")
    known = {name for port in graph.inputs for name in port.get_names()}
    graph.add_parameters([_unread(spec) for spec in source.inputs if spec.name not in known])
    graph.validate_nodes_and_infer_types()
    if path != source.path:
        path.unlink()
    return graph


def _suited(path: Path, folder: Path) -> Path:
    """The file, or one below `folder` that computes the same and that OpenVINO takes better."""
    nodes = onnx_files.read(path, data=False).graph.node
    if not any(_is_idle(node) or node.op_type == "QuantizeLinear" for node in nodes):
        return path
    model = onnx_files.read(path)
    _without_dropout(model)
    drop_repeats(model)
    onnx_files.save(model, folder / "suited.onnx")
    return folder / "suited.onnx"


def _without_dropout(model: onnx.ModelProto) -> None:
    """Let a Dropout that does nothing be an Identity.

    OpenVINO takes both out of the graph, and with Dropout the names of inputs and outputs beside it.
    """
    for node in model.graph.node:
        if _is_idle(node):
            node.op_type = "Identity"
            del node.input[1:], node.output[1:], node.attribute[:]


def _is_idle(node: onnx.NodeProto) -> bool:
    """Whether a node is a Dropout out of training, as it is where nothing says otherwise, without a mask."""
    return node.op_type == "Dropout" and not any(node.input[2:]) and not any(node.output[1:])


def _name(ports: list[openvino.Output], names: list[str], what: str) -> None:
    """Let ports be called as the model calls them: a tensor also has the names of what was simplified away.

    Raises `UnsupportedError` for one that bears no name of the model's.
    """
    for port in ports:
        own = next((name for name in names if name in port.get_names()), None)
        if own is None:
            raise UnsupportedError(
                f"OpenVINO reads this model with another {what}, '{port.get_any_name()}'; the model's are "
                f"{', '.join(names)}"
            )
        if port.get_any_name() != own:
            port.get_tensor().set_names({own})


def _unread(spec: TensorSpec) -> Any:
    """An input that no operator reads; OpenVINO drops it, but callers of the model give it."""
    import numpy as np
    import openvino

    shape = openvino.PartialShape([-1 if isinstance(size, str) else size for size in spec.shape])
    parameter = openvino.opset13.parameter(shape, np.dtype(spec.dtype), spec.name)
    parameter.output(0).get_tensor().set_names({spec.name})
    return parameter


def _save(graph: openvino.Model, path: Path) -> None:
    import openvino

    openvino.save_model(graph, str(path), compress_to_fp16=False)


def _load(path: Path) -> None:
    import openvino

    try:
        openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except Exception as error:
        raise UnsupportedError(f"OpenVINO does not run this model: {_line(error)}") from error


def _line(error: Exception) -> str:
    """The last thing that OpenVINO says; before it come places in its own sources."""
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1][:300]
