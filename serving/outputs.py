"""All outputs of an engine over a data set, on disk in chunks: memory stays small, a kill loses little."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from compressor.errors import DataError
from compressor.store import write_json

if TYPE_CHECKING:
    from serving.runtimes import Array

__all__ = ["OutputWriter", "StoredBatch", "read_outputs"]

_RECORD = "outputs.json"
_MOST_BYTES = 32 << 20
_MOST_SECONDS = 10.0


@dataclass(frozen=True)
class StoredBatch:
    """What came out for some samples: positions in the source, labels if known, outputs by name.

    `seconds` and `cpu_seconds` are what the engine took for it, `bad` counts samples with NaN or
    infinite outputs.
    """

    indices: Array
    labels: Array | None
    outputs: dict[str, Array]
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    bad: int = 0


@dataclass
class OutputWriter:
    """Appends batches below `folder`; chunks that an earlier, killed call left there are kept.

    They are kept only if they came from the same `identity` (engine, data, how it is run).
    """

    folder: Path
    identity: dict[str, Any]
    totals: dict[str, float] = field(default_factory=dict)
    _pending: list[StoredBatch] = field(default_factory=list)
    _bytes: int = 0
    _flushed: float = field(default_factory=time.monotonic)
    _chunks: int = 0

    def __post_init__(self) -> None:
        self.totals = {"n": 0, "seconds": 0.0, "cpu_seconds": 0.0, "bad": 0}
        if _record(self.folder).get("identity") != self.identity:
            for chunk in _chunk_files(self.folder):
                chunk.unlink()
        for chunk in _chunk_files(self.folder):
            for batch in _read_chunk(chunk, []):
                self._count(batch)
            self._chunks += 1

    def append(self, batch: StoredBatch) -> None:
        """Keep a batch; it is on disk when the chunk is full, or after 10 seconds."""
        if not self._chunks and not self._pending:
            write_json(self.folder / _RECORD, {"identity": self.identity, "outputs": list(batch.outputs)})
        self._pending.append(batch)
        self._bytes += sum(array.nbytes for array in batch.outputs.values())
        self._count(batch)
        if self._bytes >= _MOST_BYTES or time.monotonic() - self._flushed >= _MOST_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one chunk, beside, then renamed."""
        if self._pending:
            path = self.folder / f"chunk-{self._chunks:06}.npz"
            beside = path.with_suffix(".partial")
            with beside.open("wb") as file:
                np.savez(file, allow_pickle=False, **_arrays(self._pending))
            beside.replace(path)
            self._chunks += 1
        self._pending, self._bytes, self._flushed = [], 0, time.monotonic()

    def _count(self, batch: StoredBatch) -> None:
        self.totals["n"] += len(batch.indices)
        self.totals["seconds"] += batch.seconds
        self.totals["cpu_seconds"] += batch.cpu_seconds
        self.totals["bad"] += batch.bad


def read_outputs(folder: Path) -> Iterator[StoredBatch]:
    """The batches in the order in which they were run; raises `DataError` if they are not there."""
    names = _record(folder).get("outputs")
    if names is None:
        raise DataError(f"{folder}: holds no outputs of an engine")
    for chunk in _chunk_files(folder):
        yield from _read_chunk(chunk, names)


def _record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record


def _chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("chunk-*.npz"))


def _arrays(batches: list[StoredBatch]) -> dict[str, Array]:
    """Keys are numbers: names of outputs may hold what a file name must not."""
    arrays: dict[str, Array] = {}
    for number, batch in enumerate(batches):
        arrays[f"{number}.indices"] = batch.indices
        arrays[f"{number}.cost"] = np.array([batch.seconds, batch.cpu_seconds, batch.bad], np.float64)
        if batch.labels is not None:
            arrays[f"{number}.labels"] = batch.labels
        arrays |= {f"{number}.{at}": array for at, array in enumerate(batch.outputs.values())}
    return arrays


def _read_chunk(path: Path, names: list[str]) -> Iterator[StoredBatch]:
    try:
        with np.load(path, allow_pickle=False) as chunk:
            for number in range(sum(key.endswith(".indices") for key in chunk.files)):
                seconds, cpu_seconds, bad = chunk[f"{number}.cost"].tolist()
                yield StoredBatch(
                    chunk[f"{number}.indices"],
                    chunk[f"{number}.labels"] if f"{number}.labels" in chunk.files else None,
                    {name: chunk[f"{number}.{at}"] for at, name in enumerate(names)},
                    seconds,
                    cpu_seconds,
                    int(bad),
                )
    except (BadZipFile, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: the stored outputs are damaged ({error}); delete the folder and run again"
        ) from error
