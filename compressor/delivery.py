"""What goes out: engines with their manifests and recipes, the report, the measurements."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compressor import machine
from compressor.errors import StoreError, UsageError
from compressor.model import Model
from compressor.options import Options
from compressor.report import Report, judge
from compressor.steps import Steps
from compressor.store import file_digest, spare, usable, write_json, write_text
from compressor.target import Target

__all__ = ["deliver", "spare_files"]


def spare_files(options: Options) -> None:
    """Refuse an --out FILE that would write over what the run reads or over the user's files beside it."""
    wanted = options.engine_file
    assert wanted
    reads = (options.model, options.data, options.calib_data, options.eval_data, options.recipe)
    spare("--out", wanted, reads)
    _spare_beside(wanted, [wanted.stem + ".bin"] if wanted.suffix == ".xml" else [])


def _spare_beside(wanted: Path, sides: Iterable[str]) -> None:
    """Refuse to write over the manifest or side files of an engine unless an earlier run wrote them."""
    manifest = wanted.with_name(wanted.name + ".json")
    try:
        before = json.loads(manifest.read_text())
        ours = {manifest.name, *before.get("data_files", ())} if before["file"] == wanted.name else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        ours = set()
    for name in (manifest.name, *sides):
        if wanted.with_name(name).exists() and name not in ours:
            raise UsageError(
                f"--out {wanted} also writes {name} beside it, and a file of that name is there which no "
                "earlier run wrote; choose another --out"
            )


def deliver(options: Options, model: Model, found: dict[str, Any], steps: Steps) -> Report:
    """Write everything below `options.folder` and return the report.

    `found` holds the report's data, metric, engines, rungs, layers and skipped; each engine's "source" is
    the path of its file, which is replaced by "path" below the folder, and "files" names it and those
    beside it that it needs.
    """
    folder = options.folder
    content: dict[str, Any] = {
        "version": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "seed": options.seed,
        "machine": machine.facts(),
        "model": {
            "path": options.model,
            "sha256": model.sha256,
            "parameters": model.parameters,
            "kind": model.kind,
            "architecture": model.architecture,
        },
        "max_drop": options.max_drop,
        "options": {name: value for name, value in asdict(options).items() if value not in (None, (), False)},
        **found,
        "steps": steps.records,
        "notes": steps.notes,
    }
    _say_replaced(folder, options, steps)
    judge(content)
    with usable(folder):
        for row in content["engines"]:
            _place(options, row, content)
        _drop_others(folder / "engines", model)
        lines = [json.dumps(_measurement(row), allow_nan=False) + "\n" for row in content["engines"]]
        write_text(folder / "measurements.jsonl", "".join(lines))
        report = Report(content)
        report.save(folder)
    return report


def _say_replaced(folder: Path, options: Options, steps: Steps) -> None:
    """Two models of one name share a default folder: say whose report goes."""
    try:
        before = json.loads((folder / "report.json").read_text())["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if Path(before).absolute() != Path(options.model).absolute():
        steps.note(f"{folder}: replaces the report and engines of {before}")


def _drop_others(folder: Path, model: Model) -> None:
    """Take away engines of another model, which an earlier run left; they would look like this one's."""
    for engine in folder.iterdir():
        try:
            source = json.loads((engine / "engine.json").read_text())["source"]["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if source != model.sha256:
            _clear(engine)


def _clear(folder: Path) -> None:
    """Take away an engine with all that came with it, and its folder if nothing else is in there."""
    try:
        manifest = json.loads((folder / "engine.json").read_text())
        names = [str(manifest["file"]), *manifest.get("data_files", ()), "recipe.json", "engine.json"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    for name in names:
        (folder / Path(name).name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _command() -> list[str]:
    """What was typed; the Python API has no command line."""
    name = Path(sys.argv[0]).name
    return ["compress", *sys.argv[1:]] if name in ("compress", "cli.py") else ["python", *sys.argv]


def _place(options: Options, row: dict[str, Any], content: dict[str, Any]) -> None:
    """Copy an engine to where it is to be found, whole, with its manifest and recipe beside it."""
    source = Path(row.pop("source"))
    final = options.folder / "engines" / Target.parse(row["target"]).folder
    beside = final.with_name(final.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name in (files := row.pop("files")):
        shutil.copy2(source.with_name(name), beside / name)
    if file_digest(beside / source.name) != row["sha256"]:
        shutil.rmtree(beside)
        raise StoreError(
            f"{source} is not the file that was measured (damaged or changed since); delete the folder "
            f"{source.parent} and run the same command again"
        )
    sides = {name: file_digest(beside / name) for name in files if name != source.name}
    manifest = _manifest(row, content, source.name, sides)
    write_json(beside / "engine.json", manifest)
    write_json(beside / "recipe.json", row["recipe"])
    _clear(final)
    if final.exists():  # files of the user's stay
        for item in sorted(beside.iterdir(), key=lambda item: item.name == "engine.json"):
            item.replace(final / item.name)
        beside.rmdir()
    else:
        beside.rename(final)
    row["path"] = str((final / source.name).relative_to(options.folder))
    if options.engine_file and row["role"] == "candidate":
        _place_file(final / source.name, options.engine_file, manifest)


def _place_file(engine: Path, wanted: Path, manifest: dict[str, Any]) -> None:
    """The engine under the name that --out gives, its manifest beside it.

    A side file that shares the engine's stem (`model.bin`) is found by that; any other keeps its name, by
    which the engine knows it.
    """
    sides, files = {}, {}
    for name, digest in manifest.get("data_files", {}).items():
        file = engine.with_name(name)
        new = wanted.stem + file.suffix if file.stem == engine.stem else name
        sides[new], files[new] = digest, file
    _spare_beside(wanted, sides)
    for new, file in files.items():
        shutil.copy2(file, wanted.with_name(new))
    moved = {**manifest, "file": wanted.name, **({"data_files": sides} if sides else {})}
    write_json(wanted.with_name(wanted.name + ".json"), moved)
    beside = wanted.with_name(wanted.name + ".partial")
    shutil.copy2(engine, beside)
    beside.replace(wanted)


def _measurement(row: dict[str, Any]) -> dict[str, Any]:
    names = ("target", "sha256", "size_bytes", "metric", "drop", "agreement", "latency", "peak_rss_bytes")
    return {name: row[name] for name in names}


def _manifest(
    row: dict[str, Any], content: dict[str, Any], file: str, sides: dict[str, str]
) -> dict[str, Any]:
    """What an engine carries with it; see `serving.engine`."""
    target = Target.parse(row["target"])
    return {
        "version": 1,
        "target": row["target"],
        "runtime": target.runtime,
        "device": target.device,
        "file": file,
        **({"data_files": sides} if sides else {}),
        "sha256": row["sha256"],
        "size_bytes": row["size_bytes"],
        "source": {name: content["model"][name] for name in ("path", "sha256")},
        "made_with": machine.packages(),
        "machine": content["machine"],
        "inputs": row["inputs"],
        "outputs": row["outputs"],
        "preprocess": row["preprocess"],
        "scheme": row["quantization"].get("scheme"),
        "quantization": row["quantization"],
        "portable": row["portable"],
        "accuracy": {name: row[name] for name in ("metric", "drop", "agreement")},
        "latency": row["latency"],
    }
