"""Speed of engines of several runtimes, timed by turns in one process (a task for `compressor.worker`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import plugins
from serving.bench.interleave import Cluster, Measured
from serving.bench.rows import Bench
from serving.bench.statistics import ratio
from serving.runtimes import Session

__all__ = ["interleaved", "runtime_of"]


def interleaved(
    engines: list[str], data: dict[str, Any], seconds: float, references: list[int], folder: str
) -> list[dict[str, Any]]:
    """A row for each engine as `serving.bench.latency` gives it, on one thread and batch 1.

    `speed_against` holds its speed against each of the engines at the places `references`.
    """
    return _Mixed(list(map(Path, engines)), data, references).rows(1, seconds)


def runtime_of(engine: Path) -> str:
    """The runtime that opens a file of this suffix."""
    names = plugins.names("runtimes")
    return next(name for name in names if engine.suffix == plugins.module("runtimes", name).SUFFIX)


class _Mixed(Bench):
    """Engines of any runtime on the CPU."""

    def __init__(self, engines: list[Path], data: dict[str, Any], references: list[int]) -> None:
        super().__init__(engines, runtime_of(engines[0]), "cpu", 1, data, 0)
        self.references = references

    def open(self, engine: Path) -> Session:
        module = plugins.module("runtimes", runtime_of(engine))
        session: Session = module.open_session(engine, device=self.device, threads=self.threads)
        return session

    def summary(self, measured: Measured, size: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        rows = super().summary(measured, size, rng)
        for lane, row in enumerate(rows):
            row["speed_against"] = {
                other: ratio([_faster(cluster, lane, other) for cluster in measured.clusters], rng)
                for other in self.references
                if other != lane
            }
        return rows


def _faster(cluster: Cluster, lane: int, other: int) -> NDArray[np.float64]:
    """Per pass, the log of how many times as fast one lane's block was as another's, by lower quartiles."""
    own, others = (
        np.log([np.quantile(block, 0.25) for block in cluster.blocks[number]]) for number in (lane, other)
    )
    return np.asarray(others - own)
