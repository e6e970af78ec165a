"""Reading and writing ONNX files: whole, self-contained, and in a version that the runtime here takes."""

from __future__ import annotations

import contextlib
import io
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import ModelFileError, UnsupportedError
from compressor.model import TensorSpec
from compressor.store import digest, file_digest

if TYPE_CHECKING:
    import onnx

__all__ = [
    "LIMIT",
    "facts",
    "file_set_digest",
    "non_finite",
    "operators",
    "parameters",
    "read",
    "save",
    "side_files",
    "spec",
    "specs",
    "tensors",
    "tidy",
    "weights",
    "write",
]

LIMIT = 1_800_000_000
"""Bytes of weights above which they lie in a file beside the graph (protobuf ends at 2 GiB)."""

_LAYERS = {"Conv", "ConvTranspose", "Gemm", "GRU", "LSTM", "MatMul", "RNN"}
_WEIGHT_TYPES = re.compile(r"float|double|bfloat|u?int[248]$")


def read(path: Path, *, data: bool = True) -> onnx.ModelProto:
    """Parse an ONNX file, with the weights that lie beside it unless `data` is False.

    Raises `ModelFileError` if it is damaged or a file of weights is missing or too short.
    """
    import onnx
    from google.protobuf.message import DecodeError
    from onnx.external_data_helper import load_external_data_for_model

    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except DecodeError as error:
        raise ModelFileError(f"{path} is a truncated or damaged ONNX file; get it again") from error
    side_files(model, path)
    if data:
        try:
            load_external_data_for_model(model, str(path.parent))
        except (onnx.checker.ValidationError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelFileError(f"{path}: the weights beside it cannot be read: {reason}") from error
        for tensor in tensors(model.graph):
            tensor.ClearField("data_location")  # all are inside now, so the bytes are those of such a file
    return model


def tidy(model: onnx.ModelProto) -> None:
    """Take initializers out of the inputs, as every file since IR 4 may, and drop the exporter's notes.

    The notes (stack traces on every node) can be a tenth of a small engine. What is left out of a node is
    written in the form that onnxruntime takes: it crashes on a LayerNormalization whose bias is named "",
    and on a Split, If, Loop or Scan with an output of that name. The meaning stays.
    """
    _drop_notes(model.graph)
    _spell_out(model.graph, _names(model.graph))
    constants = {tensor.name for tensor in model.graph.initializer}
    real = [value for value in model.graph.input if value.name not in constants]
    if len(real) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(real)
        model.ir_version = max(model.ir_version, 4)


def _drop_notes(graph: onnx.GraphProto) -> None:
    for item in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    for node in graph.node:
        for inner in _subgraphs(node):
            _drop_notes(inner)


def _spell_out(graph: onnx.GraphProto, taken: set[str]) -> None:
    """Cut off inputs that are left out at the end; name outputs of a variable number that are left out."""
    for node in graph.node:
        inner = list(_subgraphs(node))
        while node.input and not node.input[-1] and not inner:
            node.input.pop()
        for place, name in enumerate(node.output if inner or node.op_type == "Split" else ()):
            if not name:
                count = len(taken)
                while (unused := f"unused_{count}") in taken:
                    count += 1
                taken.add(unused)
                node.output[place] = unused
        for each in inner:
            _spell_out(each, taken)


def _names(graph: onnx.GraphProto) -> set[str]:
    """Of all tensors, those of subgraphs included."""
    found = {item.name for item in (*graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        found.update(node.input, node.output, *(_names(inner) for inner in _subgraphs(node)))
    return found


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ()))


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model in one file, and `NAME.data` beside it above `LIMIT`; whether it loads is not tried."""
    beside = path.with_name(f"partial.{path.name}")
    _save(model, beside, path.name)
    beside.replace(path)


def write(model: onnx.ModelProto, path: Path, *, device: str = "cpu") -> onnx.ModelProto:
    """Write a model that onnxruntime loads on `device`, in one file, and `NAME.data` beside it above `LIMIT`.

    Where the runtime refuses the IR or opset version, the model is brought down to the newest that it
    takes, and a warning says so. Gives the model as written; raises `UnsupportedError` in words.
    """
    beside = path.with_name(f"partial.{path.name}")
    for _ in range(3):
        sides = _save(model, beside, path.name)
        failure = _session_failure(beside, device)
        if failure is None:
            beside.replace(path)
            return model
        for side in sides:
            side.unlink()
        beside.unlink()
        model = _brought_down(model, failure)
    raise UnsupportedError(f"onnxruntime refuses the model: {_shortened(failure)}")


def specs(model: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs (without initializers) and outputs; a shape of unknown rank is `("...",)`.

    Raises `UnsupportedError` for sequences, maps and strings.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(spec(value, "input") for value in model.graph.input if value.name not in constants)
    outputs = tuple(spec(value, "output") for value in model.graph.output)
    if any(spec.shape == ("...",) for spec in outputs):
        outputs = _inferred(model, outputs)
    return inputs, outputs


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every constant tensor: initializers and attributes, also those of inner graphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from tensors(inner)


def operators(graph: onnx.GraphProto) -> Counter[str]:
    """How often each operator stands in the graph and its inner graphs (`domain:Name` outside ai.onnx)."""
    counts: Counter[str] = Counter()
    for node in graph.node:
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}:"
        counts[f"{domain}{node.op_type}"] += 1
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                counts += operators(inner)
    return counts


def weights(model: onnx.ModelProto) -> dict[str, int]:
    """Number of constant elements of each weight type: floating point, or integers of at most 8 bits."""
    import math

    import onnx

    counts: Counter[str] = Counter()
    for tensor in tensors(model.graph):
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        if _WEIGHT_TYPES.match(kind):
            counts["float32" if kind == "float" else kind] += math.prod(tensor.dims)
    return dict(counts.most_common())


def non_finite(model: onnx.ModelProto) -> str | None:
    """What is wrong with the first layer's weight that holds NaN or Inf, as "weight 'w' holds NaN".

    Other constants may well hold infinities: masks do.
    """
    import numpy as np
    import onnx

    kinds = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}
    used = {name for node in model.graph.node if node.op_type in _LAYERS for name in node.input}
    for tensor in model.graph.initializer:
        if tensor.name in used and tensor.data_type in kinds:
            value = onnx.numpy_helper.to_array(tensor)
            if not np.isfinite(value).all():
                return f"weight '{tensor.name}' holds {'NaN' if np.isnan(value).any() else 'Inf'}"
    return None


def parameters(model: onnx.ModelProto) -> int:
    """Number of weights."""
    return sum(weights(model).values())


def facts(model: onnx.ModelProto) -> dict[str, Any]:
    """What `Model.facts` holds of an ONNX model: operators, opset, IR version, types of the weights."""
    by_type = weights(model)
    domains = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    return {
        "operators": dict(operators(model.graph).most_common()),
        "opset": domains.get("ai.onnx"),
        "domains": domains,
        "ir_version": model.ir_version,
        "producer": f"{model.producer_name} {model.producer_version}".strip() or None,
        "precision": next(iter(by_type), "float32"),
        "weights": by_type,
    }


def file_set_digest(path: Path) -> str:
    """SHA-256 (hex) of a file that `write` wrote and of the weights beside it."""
    side = path.with_name(f"{path.name}.data")
    return digest(*(file_digest(each) for each in (path, side) if each.exists()))


def side_files(model: onnx.ModelProto, path: Path) -> list[Path]:
    """The files beside `path` that hold weights of it; each is there, in its folder, and long enough.

    Raises `ModelFileError` that names the first one that is not.
    """
    import onnx

    found: dict[Path, None] = {}
    for tensor in tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            place = Path(entry.get("location", ""))
            if place.is_absolute() or ".." in place.parts or not place.parts:
                raise ModelFileError(
                    f"{path}: the weights of '{tensor.name}' point outside its folder ('{place}')"
                )
            _check_side(path, place, entry, tensor.name)
            found[path.parent / place] = None
    return list(found)


def _check_side(path: Path, place: Path, entry: dict[str, str], name: str) -> None:
    side = path.parent / place
    try:
        status = side.stat()
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path} keeps weights in '{place}' beside it, and that file is missing: copy it there too"
        ) from error
    if side.resolve() != path.parent.resolve() / place or not stat.S_ISREG(status.st_mode):
        raise ModelFileError(
            f"{path} keeps weights in '{place}', which is a link or no regular file; links are not followed: "
            "put the file itself there"
        )
    numbers = {key: entry.get(key, "0") for key in ("offset", "length")}
    wrong = [
        f"{key} '{value[:40]}'" for key, value in numbers.items() if not re.fullmatch("[0-9]{1,18}", value)
    ]
    if wrong:
        raise ModelFileError(f"{path} is damaged: the weights of '{name}' have {wrong[0]} in '{place}'")
    if int(numbers["offset"]) + int(numbers["length"]) > status.st_size:
        raise ModelFileError(
            f"{path}: its file of weights '{place}' is truncated ({status.st_size} bytes); get it again"
        )


def spec(value: onnx.ValueInfoProto, role: str = "value") -> TensorSpec:
    """Name, dtype and shape; raises `UnsupportedError` for sequences, maps and strings."""
    import onnx

    kind = value.type.WhichOneof("value")
    if kind != "tensor_type" or value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
        shown = "a string tensor" if kind == "tensor_type" else f"a {str(kind).removesuffix('_type')}"
        raise UnsupportedError(
            f"the model's {role} '{value.name}' is {shown}; only tensors of numbers can be fed"
        )
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return TensorSpec(value.name, _dtype(tensor.elem_type), ("...",))
    shape = [
        (size.dim_param if re.search(r"\w", size.dim_param) else "batch" if axis == 0 else f"dim{axis}")
        if size.WhichOneof("value") != "dim_value" or size.dim_value <= 0
        else size.dim_value
        for axis, size in enumerate(tensor.shape.dim)
    ]
    return TensorSpec(value.name, _dtype(tensor.elem_type), tuple(shape))


def _dtype(kind: int) -> str:
    import onnx

    if kind == onnx.TensorProto.BFLOAT16:
        return "bfloat16"
    return str(onnx.helper.tensor_dtype_to_np_dtype(kind)) if kind else "float32"


def _inferred(model: onnx.ModelProto, outputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The outputs with the shapes that shape inference finds, where the file has none."""
    import onnx

    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except (onnx.shape_inference.InferenceError, ValueError):
        return outputs
    found = {value.name: spec(value, "output") for value in graph.output}
    return tuple(found.get(spec.name, spec) for spec in outputs)


def _save(model: onnx.ModelProto, path: Path, name: str) -> list[Path]:
    """Write; gives the side files. They carry the final name, because the graph refers to them."""
    import onnx

    if sum(len(tensor.raw_data) for tensor in tensors(model.graph)) <= LIMIT:
        path.write_bytes(model.SerializeToString())
        return []
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    side = path.with_name(f"{name}.data")
    side.unlink(missing_ok=True)
    onnx.save_model(copied, str(path), save_as_external_data=True, location=side.name, size_threshold=1024)
    return [side]


def _session_failure(path: Path, device: str) -> str | None:
    """What onnxruntime says against the file, without optimizing it; None: nothing."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    providers = ["CPUExecutionProvider"]
    if device == "cuda":
        providers.insert(0, "CUDAExecutionProvider")
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls(directory="")
    try:
        onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime has a class for each status, below Exception itself
        return " ".join(str(error).split())
    return None


def _brought_down(model: onnx.ModelProto, failure: str) -> onnx.ModelProto:
    import onnx

    version = re.search(r"max supported IR version: (\d+)", failure)
    if version:
        events.warn(
            f"the model's IR version {model.ir_version} is newer than onnxruntime here takes: "
            f"written as {version[1]}"
        )
        model.ir_version = int(version[1])
        return model
    opset = re.search(r"Opset (\d+) is under development.*till opset (\d+)", failure)
    if not opset:
        raise UnsupportedError(f"onnxruntime refuses the model: {_shortened(failure)}")
    try:
        lowered = onnx.version_converter.convert_version(model, int(opset[2]))
    except Exception as error:  # the converter throws RuntimeError and its own, undocumented
        raise UnsupportedError(
            f"the model's opset {opset[1]} is newer than onnxruntime here takes (up to {opset[2]}), and it "
            f"cannot be brought down: {' '.join(str(error).split())[:200]}"
        ) from error
    events.warn(f"the model's opset {opset[1]} is newer than onnxruntime here takes: converted to {opset[2]}")
    return lowered


def _shortened(failure: str | None) -> str:
    """What onnxruntime says, without its own status, our file's name and the place in its source."""
    text = (failure or "").rpartition(" failed:")[2] or str(failure)
    return re.sub(r"^/\S+\.cc:\d+ \S+\(.*?\) ", "", text)[:400]
