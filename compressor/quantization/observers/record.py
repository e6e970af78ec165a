"""A calibration on disk, finished or not: every tensor's statistics and what became of the samples."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from compressor.quantization.observers.grid import Grid
from compressor.quantization.observers.statistics import TensorStatistics

__all__ = ["Record"]

_SCALARS = [entry.name for entry in fields(TensorStatistics) if entry.name != "counts"]


@dataclass
class Record:
    """What calibration knows after `done` samples of the data that `key` stands for.

    `units` were run (a unit is a sample, or as many as a graph of fixed batch takes); `skipped` holds
    index and reason of the samples left out; `first` is the digest of the first sample's inputs and
    `alike` says that all were equal to it, `zero` that all were 0.
    """

    key: str
    grid: Grid
    statistics: dict[str, TensorStatistics]
    done: int = 0
    units: int = 0
    skipped: list[tuple[int, str]] = field(default_factory=list)
    first: str = ""
    alike: bool = True
    zero: bool = True

    @classmethod
    def load(cls, path: Path) -> Record | None:
        """The record in a file; None if there is none, or none of ours."""
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            facts = json.loads(str(arrays["facts"]))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
            return None
        columns = {name: arrays[name].tolist() for name in _SCALARS}
        counts = np.split(arrays["counts"], np.cumsum(arrays["lengths"])[:-1])
        statistics = {
            name: TensorStatistics(
                **{key: column[row] for key, column in columns.items()}, counts=counts[row]
            )
            for row, name in enumerate(facts.pop("tensors"))
        }
        facts["skipped"] = [(index, reason) for index, reason in facts["skipped"]]
        return cls(grid=Grid(**facts.pop("grid")), statistics=statistics, **facts)

    def save(self, path: Path) -> None:
        """Write beside `path` and rename; the same record gives the same bytes."""
        entries = list(self.statistics.values())
        arrays: dict[str, Any] = {
            name: np.array([getattr(entry, name) for entry in entries]) for name in _SCALARS
        }
        arrays["lengths"] = np.array([len(entry.counts) for entry in entries], np.int64)
        arrays["counts"] = np.concatenate([entry.counts for entry in entries] or [np.zeros(0, np.int64)])
        arrays["facts"] = np.array(json.dumps(self._facts()))
        beside = path.with_name(f"{path.name}.partial")
        with beside.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def _facts(self) -> dict[str, Any]:
        plain = ("key", "done", "units", "skipped", "first", "alike", "zero")
        return {
            "tensors": list(self.statistics),
            "grid": {"bits": self.grid.bits, "symmetric": self.grid.symmetric},
            **{name: getattr(self, name) for name in plain},
        }
