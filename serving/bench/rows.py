"""From engines to rows of figures: opens the lanes, has them timed, and summarises the blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import events, plugins
from serving.bench.inputs import batches_of, fixed_batch
from serving.bench.interleave import Calls, Measured, interleave
from serving.bench.statistics import quantiles, ratio, verdict
from serving.runtimes import Session

__all__ = ["Bench"]

_MS = 1e-6


class Bench:
    """Engines of one runtime and device, the first of which is the baseline."""

    def __init__(
        self,
        engines: list[Path],
        runtime: str,
        device: str,
        threads: int,
        data: dict[str, Any],
        seed: int,
    ) -> None:
        self.engines = engines
        self.module = plugins.module("runtimes", runtime)
        self.device = device
        self.threads = threads
        self.data = data
        self.seed = seed

    def rows(self, size: int, seconds: float) -> list[dict[str, Any]]:
        """One row for each engine at one batch size."""
        size = self.allowed(size)
        feeds = batches_of(self.data, size, self.seed)
        lanes = [self.lane(engine, feeds) for engine in (*self.engines, self.engines[0])]
        rng = np.random.default_rng(self.seed)

        def progress(passed: float) -> None:
            events.progress(f"latency, batch {size}", min(round(passed), round(seconds)), round(seconds))

        measured = interleave(lanes, seconds, rng, progress)
        if not measured.control:
            events.warn(
                f"latency, batch {size}: {seconds:g} s are too short for two calls of every engine, so there "
                "is no A/A control and no claim about speed"
            )
        return self.summary(measured, size, rng)

    def allowed(self, size: int) -> int:
        """The asked batch size, or the one to which the engine is bound."""
        fixed = fixed_batch(self.open(self.engines[0]).inputs)
        if fixed is None or fixed == size:
            return size
        events.warn(f"latency was asked for batch {size}, but the engines are bound to batch {fixed}")
        return fixed

    def open(self, engine: Path) -> Session:
        """A fresh session."""
        session: Session = self.module.open_session(engine, device=self.device, threads=self.threads)
        return session

    def lane(self, engine: Path, feeds: list[dict[str, Any]]) -> Callable[[], Calls]:
        """Opens a fresh session and binds it to all inputs."""

        def opened() -> Calls:
            session = self.open(engine)
            return [session.bind(inputs) for inputs in feeds]

        return opened

    def summary(self, measured: Measured, size: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """From blocks to rows."""
        control = len(self.engines) if measured.control else None
        noise = None
        if control is not None:
            noise = ratio([_pairs(cluster.blocks, 0, [control]) for cluster in measured.clusters], rng)
        rows = []
        for lane in range(len(self.engines)):
            lanes = [lane] if lane or control is None else [0, control]
            row = self.absolute(measured, lanes, size, rng)
            row["ratio_to_baseline"] = self.relative(measured, lane, control, noise, rng) if lane else None
            row["aa_noise"] = noise
            rows.append(row)
        return rows

    def absolute(
        self, measured: Measured, lanes: list[int], size: int, rng: np.random.Generator
    ) -> dict[str, Any]:
        """Times of all calls in some lanes."""
        clusters = [
            np.concatenate([block for lane in lanes for block in cluster.blocks[lane]]) * _MS
            for cluster in measured.clusters
        ]
        calls = sum(len(times) for times in clusters)
        total = float(sum(times.sum() for times in clusters))
        cpu = sum(cluster.cpu[lane] for cluster in measured.clusters for lane in lanes) * _MS
        return {
            "batch": size,
            "threads": self.threads,
            **_named(quantiles(clusters, rng)),
            "mean_ms": total / calls,
            "n": calls,
            "clusters": len(clusters),
            "cpu_ms": cpu / calls,
            "throughput_per_s": 1000 * size * calls / total,
            "inputs": "made-up" if self.data.get("source") is None else "data",
        }

    def relative(
        self,
        measured: Measured,
        lane: int,
        control: int | None,
        noise: dict[str, float | None] | None,
        rng: np.random.Generator,
    ) -> dict[str, Any]:
        """Speed of a candidate against the baseline, whose two lanes lie on either side of it in time."""
        baseline = [0] if control is None else [0, control]
        speed = ratio([_pairs(cluster.blocks, lane, baseline) for cluster in measured.clusters], rng)
        claim, reason = verdict(speed, noise)
        return {**speed, "verdict": claim, "reason": reason}


def _pairs(
    blocks: dict[int, list[NDArray[np.float64]]], lane: int, baseline: list[int]
) -> NDArray[np.float64]:
    """Per pass, the log of how many times as fast a lane's block was as the baseline's blocks.

    A block counts by its lower quartile: calls that other processes interrupted lie above it.
    """

    def logs(number: int) -> NDArray[np.float64]:
        return np.log([np.quantile(block, 0.25) for block in blocks[number]])

    slower: NDArray[np.float64] = np.mean([logs(number) for number in baseline], axis=0) - logs(lane)
    return slower


def _named(found: dict[str, Any]) -> dict[str, Any]:
    """p50 -> p50_ms, p50_interval -> p50_interval_ms."""
    return {name if name.endswith("_reason") else f"{name}_ms": value for name, value in found.items()}
