"""ONNX files, with their weights in them or beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ModelFileError, UsageError
from compressor.model import Model, TensorSpec
from compressor.store import file_digest

if TYPE_CHECKING:
    from compressor.loading import LoadOptions

DESCRIPTION = "ONNX model"
USES: tuple[str, ...] = ("inputs",)

_WIRE_TYPES = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_GRAPH, _OPSETS, _IR_VERSION = 7, 8, 1


def recognise(path: Path) -> bool:
    """Walk the outermost protobuf fields; `ModelFileError` if they are ONNX's and the file ends too early."""
    size = path.stat().st_size
    seen: list[int] = []
    with path.open("rb") as file:
        while file.tell() < size:
            key = _varint(file.read(10), file)
            field, wire = (key >> 3, key & 7) if key is not None else (0, 0)
            if field not in _WIRE_TYPES or _WIRE_TYPES[field] != wire or (seen and field < 1):
                return False
            length = _varint(file.read(10), file)
            if length is None:
                break
            seen.append(field)
            if wire == 2 and file.seek(length, 1) > size:
                if _IR_VERSION in seen:
                    raise ModelFileError(f"{path} is a truncated or damaged ONNX file; get it again")
                return False
    return _GRAPH in seen and (_IR_VERSION in seen or _OPSETS in seen)


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """The graph in one self-contained file that onnxruntime takes; fixed dimensions stay fixed."""
    from compressor import onnx_files

    model = onnx_files.read(path)
    onnx_files.tidy(model)
    _fix_shapes(model, options.inputs)
    inputs, outputs = onnx_files.specs(model)
    for spec in inputs:
        if spec.shape == ("...",):
            raise UsageError(
                f"the model does not say the shape of its input '{spec.name}': pass it, for example "
                f"--input {spec.name}=?x3x224x224"
            )
    problem = onnx_files.non_finite(model)
    if problem:
        raise ModelFileError(f"{path}: {problem}; train or export the model again")
    written = onnx_files.write(model, folder / "model.onnx")
    return Model(
        form="onnx",
        path=folder / "model.onnx",
        inputs=inputs,
        outputs=outputs,
        sha256=file_digest(path),
        parameters=onnx_files.parameters(written),
        kind="onnx",
        facts={
            **onnx_files.facts(written),
            "digest": onnx_files.file_set_digest(folder / "model.onnx"),
        },
    )


def inspect(path: Path) -> dict[str, Any]:
    """Inputs, outputs, operators, weights and versions."""
    from compressor import onnx_files

    model = onnx_files.read(path, data=False)
    constants = {tensor.name for tensor in model.graph.initializer}
    sides = onnx_files.side_files(model, path)
    return {
        "size_bytes": sum(file.stat().st_size for file in (path, *sides)),
        "files": [str(file.relative_to(path.parent)) for file in (path, *sides)] if sides else [],
        "inputs": [_shown(value) for value in model.graph.input if value.name not in constants],
        "outputs": [_shown(value) for value in model.graph.output],
        "parameters": onnx_files.parameters(model),
        **onnx_files.facts(model),
    }


def _varint(data: bytes, file: Any) -> int | None:
    """The number at the start of `data`; leaves the file behind it. None: there is none."""
    value = 0
    for at, byte in enumerate(data):
        value |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            file.seek(at + 1 - len(data), 1)
            return value
    return None


def _fix_shapes(model: Any, given: tuple[TensorSpec, ...]) -> None:
    """Write the sizes that `--input` gives into free dimensions; `UsageError` if they contradict the file."""
    from compressor import onnx_files

    constants = {tensor.name for tensor in model.graph.initializer}
    values = {value.name: value for value in model.graph.input if value.name not in constants}
    for spec in given:
        name = spec.name or (next(iter(values)) if len(values) == 1 else "")
        if name not in values:
            raise UsageError(f"--input names '{spec.name}', but the model takes {', '.join(values)}")
        tensor = values[name].type.tensor_type
        dtype = onnx_files.spec(values[name], "input").dtype
        if spec.dtype not in (dtype, "float32"):
            raise UsageError(f"--input {spec}: the model's '{name}' is {dtype}, not {spec.dtype}")
        if not tensor.HasField("shape"):
            for _ in spec.shape:
                tensor.shape.dim.add()
        shape = tensor.shape
        if len(shape.dim) != len(spec.shape):
            raise UsageError(
                f"--input {spec} has {len(spec.shape)} axes, the model's '{name}' has {len(shape.dim)}"
            )
        for axis, (size, asked) in enumerate(zip(shape.dim, spec.shape, strict=True)):
            fixed = size.dim_value if size.WhichOneof("value") == "dim_value" else 0
            if isinstance(asked, int) and fixed not in (0, asked):
                raise UsageError(f"--input {spec}: axis {axis} of the model's '{name}' is fixed at {fixed}")
            if isinstance(asked, int):
                size.dim_value = asked


def _shown(value: Any) -> dict[str, Any]:
    """A value's JSON form; also of what cannot be loaded, such as sequences and strings."""
    from dataclasses import asdict

    from compressor import onnx_files
    from compressor.errors import UnsupportedError

    try:
        return asdict(onnx_files.spec(value))
    except UnsupportedError:
        kind = str(value.type.WhichOneof("value")).removesuffix("_type")
        return {"name": value.name, "dtype": "string" if kind == "tensor" else kind, "shape": []}
