"""From a file to a `Model`: recognise its kind by its bytes, then let the module of that kind read it.

Nothing that a file contains is run or unpickled, except with `LoadOptions.trust`.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor import events, plugins
from compressor.errors import ModelFileError
from compressor.model import Model, TensorSpec

__all__ = ["LoadOptions", "inspect", "inspect_task", "load", "load_task", "recognise"]

_SUFFIXES = {".onnx": "onnx", ".safetensors": "safetensors", ".pt2": "exported"}


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
    _refuse_no_file(path)
    _refuse_other_kinds(path)
    for kind in plugins.names("loaders"):
        if plugins.module("loaders", kind).recognise(path):
            if _SUFFIXES.get(path.suffix.lower(), kind) != kind or (kind == "onnx") != (
                path.suffix == ".onnx"
            ):
                events.warn(
                    f"{path.name} is, by its content, an {plugins.module('loaders', kind).DESCRIPTION}"
                )
            return kind
    raise ModelFileError(
        f"{path} is no model file that is known here, or is damaged beyond recognition: its first bytes are {_head(path, 8).hex(' ')}"
    )


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """Read a model file and write it below `folder` in one of the two forms of `Model`."""
    kind = recognise(path)
    model: Model = plugins.module("loaders", kind).load(path, options, folder)
    return model


def load_task(path: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """`load` as a task."""
    return load(Path(path), LoadOptions.of(options), Path(folder)).json(Path(folder))


def inspect(path: Path) -> dict[str, Any]:
    """What a file is, without running or unpickling anything of it."""
    kind = recognise(path)
    module = plugins.module("loaders", kind)
    return {
        "path": str(path),
        "kind": kind,
        "description": module.DESCRIPTION,
        "size_bytes": path.stat().st_size,
        **module.inspect(path),
    }


def inspect_task(path: str) -> dict[str, Any]:
    """`inspect` as a task."""
    return inspect(Path(path))


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _refuse_no_file(path: Path) -> None:
    if path.is_dir():
        if (path / "saved_model.pb").exists():
            raise ModelFileError(
                f"{path} is a TensorFlow SavedModel folder, which this version cannot read; export it to ONNX"
            )
        raise ModelFileError(f"{path} is a folder, not a model file")
    try:
        empty = not _head(path, 1)
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file") from error
    except PermissionError as error:
        raise ModelFileError(f"{path} cannot be read: permission denied") from error
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    if empty:
        raise ModelFileError(f"{path} is empty (0 bytes); get it again")


def _refuse_other_kinds(path: Path) -> None:
    """Name the files that are often met in place of a model."""
    head = _head(path, 512)
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")) or b"<html" in text:
        raise ModelFileError(
            f"{path} is an HTML page, not a model: the download gave a web page; get it again"
        )
    if head.startswith(b"version https://git-lfs"):
        raise ModelFileError(f"{path} is a git LFS pointer (text), not the model itself: run 'git lfs pull'")
    if head[4:8] == b"TFL3":
        raise ModelFileError(f"{path} is a TFLite model, which this version cannot read")
    if head[4:8] == b"ORTM":
        raise ModelFileError(
            f"{path} is an onnxruntime .ort model, which cannot be compressed; use the ONNX file"
        )
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        raise ModelFileError(
            f"{path} is an HDF5 file (Keras .h5), which this version cannot read; export it to ONNX"
        )
    if head.startswith(b"PK"):
        _refuse_zip(path)
    elif _is_text(head):
        raise ModelFileError(f"{path} is a text file, not a model")


def _refuse_zip(path: Path) -> None:
    """Damaged archives, and archives of other kinds."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise ModelFileError(f"{path} is a truncated or damaged archive ({error}); get it again") from error
    if bad:
        raise ModelFileError(f"{path} is damaged: the checksum of '{bad}' in it is wrong; get it again")
    if "model.weights.h5" in names:
        raise ModelFileError(
            f"{path} is a Keras model (.keras), which this version cannot read; export it to ONNX"
        )
    if names and all(name.endswith(".npy") for name in names):
        raise ModelFileError(f"{path} is an .npz file of arrays, not a model")


def _is_text(head: bytes) -> bool:
    try:
        return all(char.isprintable() or char.isspace() for char in head.decode("ascii"))
    except UnicodeDecodeError:
        return False
