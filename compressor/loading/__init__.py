"""From a file to a `Model`: recognise its kind by its bytes, then let the module of that kind read it.

Nothing that a file contains is run or unpickled, except with `LoadOptions.trust`.
"""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor import events, plugins, user_code
from compressor.errors import CompressError, ModelFileError, UnsupportedError
from compressor.model import Model, TensorSpec

__all__ = ["LoadOptions", "inspect", "inspect_task", "load", "load_task", "recognise"]

_SUFFIXES = {
    "onnx": {".onnx"},
    "safetensors": {".safetensors"},
    "exported": {".pt2", ".pt"},
    "torchscript": {".pt", ".pth", ".jit", ".ts", ".torchscript"},
    "torch_pickle": {".pt", ".pth", ".th", ".ckpt", ".bin", ".tar", ".pkl"},
}
_UNREAD = ", which this version cannot read; export the model to ONNX"


@dataclass(frozen=True)
class LoadOptions:
    """What the user says about a model file.

    `inputs` are those of --input, with free dimensions named; `samples` the arrays of the data, with the
    shape of one sample (no batch axis), from which a network without input shapes is traced.
    """

    architecture: str | None = None
    trust: bool = False
    inputs: tuple[TensorSpec, ...] = ()
    samples: tuple[TensorSpec, ...] = ()

    @classmethod
    def of(cls, value: dict[str, Any]) -> LoadOptions:
        """From its JSON form; what is left out has its default."""
        specs = {
            key: tuple(TensorSpec.of(spec) for spec in value.get(key) or ()) for key in ("inputs", "samples")
        }
        return cls(value.get("architecture"), bool(value.get("trust")), **specs)


def recognise(path: Path) -> str:
    """The kind of a model file (the name of its module here), by its bytes alone.

    Raises `ModelFileError` that says what the file is, if it is not a model that can be read.
    """
    with _in_one_line():
        return _recognised(path)


def _recognised(path: Path) -> str:
    _refuse_no_file(path)
    other = _other_kind(path)
    if other:
        raise ModelFileError(f"{path} is {other}")
    for kind in plugins.names("loaders"):
        module = plugins.module("loaders", kind)
        if module.recognise(path):
            suffix = path.suffix.lower()
            if suffix in set().union(*_SUFFIXES.values()) and suffix not in _SUFFIXES.get(kind, {suffix}):
                events.warn(
                    f"{path.name} is, by its content, of another kind than its name says: "
                    f"{module.DESCRIPTION}"
                )
            return kind
    raise ModelFileError(
        f"{path} is not a valid model file of a kind that is known here (it begins with the bytes "
        f"{_head(path, 8).hex(' ')}): damaged, or made by another program"
    )


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """Read a model file and write it below `folder` in one of the two forms of `Model`.

    Its `facts` hold `digest`, SHA-256 over what was really loaded (graph, weights, inputs), and `code`, the
    files of the user's modules that built or unpickled it (`user_code.files`).
    """
    kind = recognise(path)
    module = plugins.module("loaders", kind)
    for name, option in (("architecture", "--arch"), ("inputs", "--input")):
        if getattr(options, name) and name not in module.USES:
            events.warn(f"{option} is not used: {path.name} ({module.DESCRIPTION}) holds what it would say")
    with _in_one_line():
        model: Model = module.load(path, options, folder)
        if not model.inputs or not model.outputs:
            lacking = "input" if not model.inputs else "output"
            raise UnsupportedError(f"the model has no {lacking}: there is nothing to feed or to compare")
    foreign = user_code.files() if options.architecture or options.trust else []
    return replace(model, facts={**model.facts, "code": foreign})


def load_task(path: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """`load` as a task."""
    return load(Path(path), LoadOptions.of(options), Path(folder)).json(Path(folder))


def inspect(path: Path) -> dict[str, Any]:
    """What a file is, without running or unpickling anything of it."""
    with _in_one_line():
        _refuse_no_file(path)
        other = _other_kind(path)
    if other:
        size = path.stat().st_size if path.is_file() else None
        return {"path": str(path), "kind": None, "description": other, "size_bytes": size}
    kind = recognise(path)
    module = plugins.module("loaders", kind)
    with _in_one_line():
        found = module.inspect(path)
    return {
        "path": str(path),
        "kind": kind,
        "description": module.DESCRIPTION,
        "size_bytes": path.stat().st_size,
        **found,
    }


def inspect_task(path: str) -> dict[str, Any]:
    """`inspect` as a task."""
    return inspect(Path(path))


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Join the white space of messages, which quote names out of files and of files."""
    try:
        yield
    except CompressError as error:
        text = " ".join(str(error).split())
        if text == str(error):
            raise
        raise type(error)(text) from error


def _refuse_no_file(path: Path) -> None:
    """Raise `ModelFileError` unless there is a regular file or a folder that can be read."""
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            _head(path, 1)
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file") from error
    except PermissionError as error:
        raise ModelFileError(f"{path} cannot be read: permission denied") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{str(path)[:300]} cannot be read: {reason}") from error
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ModelFileError(
            f"{path} is no regular file but a pipe, socket or device; save the model to a file"
        )
    if stat.S_ISREG(found.st_mode) and not found.st_size:
        raise ModelFileError(f"{path} is empty (0 bytes); get it again")


def _other_kind(path: Path) -> str | None:
    """What a file is that is often met in place of a model, or that this version cannot read."""
    if path.is_dir():
        saved_model = (path / "saved_model.pb").exists()
        return f"a TensorFlow SavedModel folder{_UNREAD}" if saved_model else "a folder, not a model file"
    head = _head(path, 512)
    if head.startswith(b"PK"):
        return _other_archive(path)
    if b"<html" in head.lower() or head.lstrip().lower().startswith((b"<!doctype", b"<?xml")):
        return "an HTML page, not a model: the download gave a web page; get it again"
    if head.startswith(b"version https://git-lfs"):
        return "a git LFS pointer (text), not the model itself: run 'git lfs pull'"
    if head[4:8] == b"TFL3":
        return "a TFLite model, which this version cannot read; start from the model that it was made of"
    if head[4:8] == b"ORTM":
        return "an onnxruntime .ort model, which cannot be compressed; use the ONNX file that it was made of"
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return f"an HDF5 file (Keras .h5){_UNREAD}"
    return "a text file, not a model" if _is_text(head) else None


def _other_archive(path: Path) -> str | None:
    """Damaged archives, and archives of other kinds."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        return f"a truncated or damaged archive ({error}); get it again"
    if bad:
        return f"a damaged archive: the checksum of '{bad}' in it is wrong; get it again"
    if "model.weights.h5" in names:
        return f"a Keras model (.keras){_UNREAD}"
    if names and all(name.endswith(".npy") for name in names):
        return "an .npz file of arrays, not a model"
    return None


def _is_text(head: bytes) -> bool:
    try:
        return all(char.isprintable() or char.isspace() for char in head.decode("ascii"))
    except UnicodeDecodeError:
        return False
