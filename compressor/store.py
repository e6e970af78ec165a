"""Results of steps on disk: a folder that exists is complete.

A step writes into `NAME-KEY.partial/`; when it is done the folder is renamed to `NAME-KEY/`. KEY is the
SHA-256 of everything that decides the result, so the same command goes on where it stopped, and a
changed one redoes only what depends on the change. What a step finds in its partial folder after a kill
is its own checkpoint to use.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import StoreError, UsageError

__all__ = [
    "STEPS",
    "Store",
    "StoredStep",
    "claim",
    "digest",
    "file_digest",
    "spare",
    "usable",
    "write_asked",
    "write_json",
    "write_text",
]

STEPS = "steps"
LOCK = ".lock"


def digest(*parts: Any) -> str:
    """SHA-256 (hex) of JSON-able `parts`, independent of the order of mapping keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write beside `path`, then rename: a reader sees the old file or the whole new one."""
    beside = path.with_name(path.name + ".partial")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of JSON; raises `ValueError` for NaN and infinity."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_asked(option: str, path: Path, text: str) -> None:
    """Write what the user asked for by `option`: a device or pipe as it is, anything else by `write_text`.

    A link stays one: what it points to is written. Raises `StoreError` if that cannot be.
    """
    with usable(path, option):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path.resolve(), text)


def spare(option: str, path: Path, reads: Iterable[str | None]) -> None:
    """Refuse a file to write that is a folder, has none to lie in, or is of what is read.

    `reads` are paths, also with `:` and more behind them; of a folder, everything in it counts. Raises
    `UsageError`.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"{option} {path}: {what}; name a file in a folder that is there")
    for source in map(str, filter(None, reads)):
        place = Path(source) if Path(source).exists() else Path(source.partition(":")[0])
        if path.exists() and place.exists() and place.resolve() in (path.resolve(), *path.resolve().parents):
            raise UsageError(f"{option} {path} is what is read ({source}); name another file")


@dataclass(frozen=True)
class StoredStep:
    """A finished step: its folder, and `record` (what `Store.finish` was given)."""

    folder: Path
    record: dict[str, Any]


class Store:
    """The step folders below `root`; with `scratch`, new ones go there and `root` is only read."""

    def __init__(self, root: Path, scratch: Path | None = None) -> None:
        self.root = root
        self.scratch = scratch

    def find(self, name: str, key: str) -> StoredStep | None:
        """The finished step, if it is there and whole."""
        for root in filter(None, (self.root, self.scratch)):
            folder = root / _name(name, key)
            try:
                return StoredStep(folder, json.loads((folder / "step.json").read_text()))
            except (OSError, ValueError):
                continue
        return None

    def begin(self, name: str, key: str) -> Path:
        """The folder that the step writes to; after a kill it holds what the step left there."""
        partial = self.place(name, key).with_suffix(".partial")
        with usable(partial):
            partial.mkdir(parents=True, exist_ok=True)
        return partial

    def finish(self, name: str, key: str, record: dict[str, Any]) -> StoredStep:
        """Declare the step complete."""
        folder = self.place(name, key)
        partial = folder.with_suffix(".partial")
        with usable(self.root):
            write_json(partial / "step.json", record)
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
        return StoredStep(folder, record)

    def discard(self, name: str, key: str) -> None:
        """Forget what an unfinished step left (it failed for a reason that a rerun would meet again)."""
        shutil.rmtree(self.place(name, key).with_suffix(".partial"), ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out of the same folder."""
        with usable(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / LOCK).open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise StoreError(
                    f"{self.root}: another run is using this folder; wait for it or choose another --out"
                ) from error
            yield

    def place(self, name: str, key: str) -> Path:
        """Where the finished step will be."""
        return (self.scratch or self.root) / _name(name, key)


def _name(name: str, key: str) -> str:
    return f"{name}-{key[:16]}"


def claim(folder: Path) -> Callable[[], None]:
    """Make `folder` ours to write to; gives what undoes it.

    Raises `StoreError` if something that is not of an earlier run is there: nothing of the user's may be
    replaced or deleted.
    """
    with usable(folder):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"--out {folder}: a file is there, but a folder is needed; choose another --out")
        ours = (folder / STEPS / LOCK).exists()
        if folder.is_dir() and not ours and any(folder.iterdir()):
            raise StoreError(
                f"--out {folder}: the folder holds files that are not of an earlier run; "
                "choose another --out, or an empty folder"
            )
        made = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
        (folder / STEPS).mkdir(parents=True, exist_ok=True)
        (folder / STEPS / LOCK).touch()

    def undo() -> None:
        if ours:
            return
        for item in folder.iterdir():  # it was empty, so all of it is ours
            shutil.rmtree(item, ignore_errors=True) if item.is_dir() else item.unlink()
        for each in made:
            each.rmdir()

    return undo


@contextmanager
def usable(path: Path, option: str = "--out") -> Iterator[None]:
    """Turn a system error on `path`, which `option` names, into one that says what to do."""
    reasons = {
        errno.ENOSPC: f"the disk is full; free some space or choose another {option}",
        errno.EACCES: f"no permission to write there; choose another {option}",
        errno.EPERM: f"no permission to write there; choose another {option}",
        errno.EROFS: f"the file system is read-only; choose another {option}",
        errno.ENOTDIR: f"a file is in the way where a folder is needed; choose another {option}",
        errno.EEXIST: f"a file is in the way where a folder is needed; choose another {option}",
        errno.ENAMETOOLONG: f"the name is too long; choose another {option}",
    }
    try:
        yield
    except OSError as error:
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise StoreError(f"cannot write to {error.filename or path}: {reason}") from error
