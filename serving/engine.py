"""An engine on disk: its file and, beside it, `engine.json`, which says what it is and how it did.

An engine that stands alone under a name of the user's has its manifest in `NAME.json`.
Loading needs numpy and the engine's runtime, nothing else.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import events, plugins
from compressor.errors import ModelFileError, UnsupportedError
from compressor.store import file_digest, write_json

if TYPE_CHECKING:
    from serving.runtimes import Session

__all__ = ["MANIFEST", "MANIFEST_VERSION", "load_engine", "locate", "read_manifest", "write_manifest"]

MANIFEST = "engine.json"
MANIFEST_VERSION = 1
_REQUIRED = ("version", "target", "runtime", "device", "file", "sha256", "inputs", "outputs")


def write_manifest(folder: Path, manifest: dict[str, Any]) -> Path:
    """Write `engine.json` into the engine's folder and return its path.

    `manifest` names the engine in "file" and gives "target", "runtime", "device", "inputs", "outputs"
    and what else is known: "source" {"path", "sha256"}, "made_with" {package: version}, "machine",
    "preprocess", "quantization", "accuracy", "latency", "scheme", and "data_files", the names of files
    that the engine reads from beside it. "version", "sha256", "size_bytes" (of all files) and the
    hashes of the data files are filled in from what lies on disk.
    """
    file = folder / manifest["file"]
    beside = {name: file_digest(folder / name) for name in manifest.get("data_files", ())}
    size = sum(path.stat().st_size for path in (file, *(folder / name for name in beside)))
    whole = {
        **manifest,
        "version": MANIFEST_VERSION,
        "sha256": file_digest(file),
        "size_bytes": size,
        **({"data_files": beside} if beside else {}),
    }
    if missing := [key for key in _REQUIRED if key not in whole]:
        raise ValueError(f"the manifest lacks {', '.join(missing)}")
    write_json(folder / MANIFEST, whole)
    return folder / MANIFEST


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check an `engine.json`; raises `ModelFileError` or, when it is newer, `UnsupportedError`."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ModelFileError(f"{path}: the manifest cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelFileError(f"{path}: the manifest is not JSON ({error})") from error
    missing = [key for key in _REQUIRED if not isinstance(manifest, dict) or key not in manifest]
    if missing:
        raise ModelFileError(f"{path}: this is no engine's manifest; it lacks {', '.join(missing)}")
    if manifest["version"] != MANIFEST_VERSION:
        raise UnsupportedError(
            f"{path}: the manifest has version {manifest['version']}, this program reads version "
            f"{MANIFEST_VERSION}; use the version of modelpress that made the engine"
        )
    if Path(manifest["file"]).name != manifest["file"]:
        raise ModelFileError(
            f"{path}: the engine's file must lie beside its manifest, not at {manifest['file']}"
        )
    return manifest


def load_engine(path: str | Path, *, device: str | None = None, threads: int = 1) -> Session:
    """Open an engine: its folder, its manifest, or its file.

    `device` None takes the manifest's. The hashes of the engine's files are compared with the manifest
    beside it; an engine that differs from its manifest is not loaded (`ModelFileError`). An engine file
    without a manifest is opened too, by its suffix and on the CPU unless told otherwise; then nothing
    is verified. Warns when the runtime's version is not the one that the engine was measured with.
    """
    file, _, runtime, made_for = locate(Path(path))
    return _open(runtime, file, device or made_for, threads)


def locate(path: Path) -> tuple[Path, dict[str, Any] | None, str, str]:
    """An engine's file, verified; its manifest, if it has one; its runtime and device (as `load_engine`)."""
    file, manifest = _find(path)
    if manifest is None:
        return file, None, _runtime_for(file), "cpu"
    _verify(file, manifest["sha256"])
    for name, digest in manifest.get("data_files", {}).items():
        _verify(file.with_name(name), digest)
    _compare_versions(file, manifest)
    return file, manifest, manifest["runtime"], manifest["device"]


def _find(path: Path) -> tuple[Path, dict[str, Any] | None]:
    if path.is_dir():
        path = path / MANIFEST
        if not path.is_file():
            raise ModelFileError(_no_manifest(path.parent))
    if path.suffix == ".json":
        named = read_manifest(path)
        return path.with_name(named["file"]), named
    if not path.is_file():
        raise ModelFileError(f"{path}: there is no such engine")
    for beside in (path.with_name(path.name + ".json"), path.with_name(MANIFEST)):
        manifest = read_manifest(beside) if beside.is_file() else None
        if manifest and manifest["file"] == path.name:
            return path, manifest
    return path, None


def _no_manifest(folder: Path) -> str:
    """That a folder holds no engine, and which folders below it do (a run's lie in `engines`)."""
    found = sorted({*folder.glob(f"*/{MANIFEST}"), *folder.glob(f"engines/*/{MANIFEST}")})
    told = f"{folder}: this folder is no engine's (it has no {MANIFEST})"
    return f"{told}; give one of: {', '.join(str(path.parent) for path in found[:10])}" if found else told


def _verify(file: Path, digest: str) -> None:
    if not file.is_file():
        raise ModelFileError(f"{file}: the file that the manifest beside it describes is missing")
    found = file_digest(file)
    if found != digest:
        raise ModelFileError(
            f"{file}: not loaded, because it is not the file that its manifest describes (SHA-256 "
            f"{found[:12]}..., the manifest says {digest[:12]}...); make the engine again or fetch it anew"
        )


def _compare_versions(file: Path, manifest: dict[str, Any]) -> None:
    package = plugins.module("runtimes", manifest["runtime"]).PACKAGE
    for name, made_with in manifest.get("made_with", {}).items():
        if not name.startswith(package):
            continue
        try:
            here = version(name)
        except PackageNotFoundError:
            continue
        if here != made_with:
            events.warn(f"{file.name} was made and measured with {name} {made_with}; here it runs on {here}")


def _runtime_for(file: Path) -> str:
    suffixes = {plugins.module("runtimes", name).SUFFIX: name for name in plugins.names("runtimes")}
    if file.suffix not in suffixes:
        raise UnsupportedError(
            f"{file}: no runtime for a file that ends in '{file.suffix}' and has no manifest beside it; "
            f"known are {', '.join(sorted(suffixes))}"
        )
    return suffixes[file.suffix]


def _open(runtime: str, file: Path, device: str, threads: int) -> Session:
    module = plugins.module("runtimes", runtime)
    if reason := module.available():
        raise UnsupportedError(f"{file.name} needs the runtime {runtime}: {reason}")
    session: Session = module.open_session(file, device=device, threads=threads)
    return session
