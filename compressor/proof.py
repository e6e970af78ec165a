"""The proof of engines: what they compute in, how they do against their simulation, latency and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compressor import machine
from compressor.engines import Engine, Maker, needs
from compressor.quantization import scheme
from compressor.target import Target

__all__ = ["Proof", "made_for"]

Judged = tuple[Engine, dict[str, Any]]


@dataclass
class Proof:
    """Measures chosen engines; once `interrupted`, what is left to measure is left out, and said."""

    maker: Maker
    interrupted: bool = False

    def rows(self, engines: list[Judged]) -> list[dict[str, Any]]:
        """The report's rows; an interrupt ends the measurements, and what is there is reported."""
        try:
            return self._proven(engines)
        except KeyboardInterrupt:
            if len(engines) < 2:
                raise
            self.interrupted = True
            return self._proven(engines)

    def _proven(self, engines: list[Judged]) -> list[dict[str, Any]]:
        """The report's rows for the engines of one runtime and device, baseline first."""
        latencies = self._latency([engine for engine, _ in engines])
        rows: list[dict[str, Any]] = []
        for (engine, comparison), latency in zip(engines, latencies, strict=True):
            proof = self._proof(engine, engines[0][0])
            proof["portable"] = self._portable(engine)
            if not self.maker.steps.planning:
                rows.append(_row(engine, comparison, latency, proof, candidate=bool(rows)))
        return rows

    def _latency(self, engines: list[Engine]) -> list[dict[str, Any] | None]:
        """Interleaved latency of all engines of one runtime and device against the first one."""
        if not self.maker.options.bench:
            self.maker.steps.note("latency was not measured (--bench 0)")
        if self.interrupted:
            self.maker.steps.note("latency and memory were not measured: the run was interrupted")
        if not self.maker.options.bench or not self.maker.data.evaluation or self.interrupted:
            return [None] * len(engines)
        return self.maker.raced(engines, self.maker.options.bench * len(engines))

    def _portable(self, engine: Engine) -> dict[str, Any] | None:
        """What an int8 engine for x86 does on processors without VNNI, or what being safe there costs."""
        facts, last = engine.model.facts, engine.recipe.steps[-1:]
        if not (engine.stem and self.maker.data.calibration and last) or self.interrupted:
            return None
        chosen = scheme.SCHEMES.get(str(last[0].parameters.get("scheme")))
        kernels = _pair_safe(engine.target)
        if last[0].stage != "quantize" or not chosen or not (chosen.pair_limit or chosen.narrow):
            return None
        if not kernels:
            return None
        if not (facts.get("quantized") or self.maker.steps.planning):
            return None
        unkeyed: dict[str, Any] = {"model": engine.stem.json(), "quantized": engine.model.json()}
        unkeyed["data"] = self.maker.data.calibration
        if chosen.pair_limit and "moments" in needs("quantize", last[0].parameters):
            moments = self.maker.moments("quantize", last[0].parameters, engine.stem, engine.stem_key)
            unkeyed["moments"] = str(moments.folder)
        done = self.maker.steps.run(
            "portable",
            "compressor.quantization.portability:portable",
            {"kernels": kernels},
            unkeyed=unkeyed,
            after=[engine.exported.key, *self.maker.data.key("calibration")],
            expected={},
            estimate=self.maker.pass_seconds(16, 3.0),
            what="the same file without VNNI",
        )
        return dict(done.value)

    def _proof(self, engine: Engine, baseline: Engine) -> dict[str, Any]:
        """What really runs in which precision, the engine against its simulation, and memory."""
        if not self.maker.data.evaluation or self.interrupted:
            return {"precision": None, "simulation_gap": None, "memory": None}
        tasks = {"precision": "serving.accuracy:precision", "memory": "serving.bench:memory"}
        if engine.model.facts.get("quantized"):
            tasks["simulation_gap"] = "serving.accuracy:simulation_gap"
        values: dict[str, Any] = {"simulation_gap": None}
        for name, task in tasks.items():
            values[name] = self.maker.steps.run(
                name,
                task,
                {"runtime": engine.target.runtime, "device": engine.target.device, "threads": 1},
                unkeyed={
                    "engine": engine.path,
                    "data": self.maker.data.evaluation,
                    **({"baseline": baseline.path} if name == "simulation_gap" else {}),
                },
                after=[engine.exported.key, baseline.exported.key, *self.maker.data.key("evaluation")],
                measured=True,
                fresh=name == "memory",
                expected={},
                estimate=2.0,
                what=str(engine.target),
            ).value
        return values


def _pair_safe(target: Target) -> str | None:
    """The scheme that a target's own kernels want on x86 without VNNI; None where none saturates."""
    place = (target.runtime, target.device)
    return next(
        (name for name, made in scheme.SCHEMES.items() if made.place == place and made.pair_limit), None
    )


def _row(
    engine: Engine,
    comparison: dict[str, Any],
    latency: dict[str, Any] | None,
    proof: dict[str, Any],
    *,
    candidate: bool,
) -> dict[str, Any]:
    """An engine as the report shows it."""
    return {
        "target": str(engine.target),
        "role": "candidate" if candidate else "baseline",
        "recipe": engine.recipe.json(),
        "source": engine.path,
        "files": engine.exported.value["files"],
        "sha256": engine.exported.value["sha256"],
        "size_bytes": engine.exported.value["size_bytes"],
        "metric": comparison.get("metric"),
        "metric_reason": comparison.get("metric_reason"),
        "drop": comparison.get("drop") if candidate else None,
        "agreement": comparison.get("agreement") if candidate else None,
        "latency": latency,
        "cpu_ms": latency and latency["cpu_ms"],
        "precision": proof["precision"],
        "simulation_gap": proof["simulation_gap"],
        "portable": proof["portable"],
        "made_for": made_for(engine.target, str(engine.model.facts.get("scheme"))),
        "peak_rss_bytes": proof["memory"] and proof["memory"]["peak_rss_bytes"],
        "quantization": engine.model.facts,
        "inputs": [asdict(spec) for spec in engine.model.inputs],
        "outputs": [asdict(spec) for spec in engine.model.outputs],
        "preprocess": engine.model.preprocess,
        "recommended": False,
    }


def made_for(target: Target, name: str) -> str | None:
    """What an engine is made for, if that is not this machine: of its speed nothing is learned here."""
    if name not in scheme.SCHEMES:
        return None
    own = scheme.for_machine(str(target.runtime), str(target.device), machine.cpu_flags())
    return None if name in (own, scheme.SCHEMES[own].narrow) else scheme.SCHEMES[name].title
