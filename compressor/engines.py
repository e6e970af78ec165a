"""Engines from recipes: the model through its stages, exported, run over the data, compared and timed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from compressor import plugins
from compressor.errors import UsageError
from compressor.intake import Data
from compressor.model import Model
from compressor.options import Options
from compressor.recipe import Recipe
from compressor.steps import Done, Steps
from compressor.target import Target

__all__ = ["Engine", "Maker", "calibration", "needs"]


@dataclass(frozen=True)
class Engine:
    """An engine, exported and run over the evaluation data; `stem` is what its last stage was given."""

    target: Target
    recipe: Recipe
    model: Model
    exported: Done
    outputs: Done | None = None
    stem: Model | None = None
    stem_key: str = ""

    @property
    def path(self) -> str:
        return self.exported.path(self.exported.value["file"])


@dataclass
class Maker:
    """Makes and measures engines of a `model` in ONNX form, which the step `key` made, by stored steps."""

    steps: Steps
    options: Options
    data: Data
    model: Model
    key: str
    macs: int | None = None

    def built(self, recipe: Recipe, target: Target) -> Engine:
        """The engine of a recipe, not yet run."""
        model, key = self.model, self.key
        stem, stem_key = model, key
        for step in recipe.steps:
            stem, stem_key = model, key
            model, key = self._staged(step.stage, step.parameters, model, key)
        return replace(self._exported(model, key, target, recipe), stem=stem, stem_key=stem_key)

    def _staged(self, stage: str, parameters: dict[str, Any], model: Model, key: str) -> tuple[Model, str]:
        """The model after one stage."""
        unkeyed: dict[str, Any] = {"model": model.json()}
        after = [key]
        wanted = calibration(stage, parameters)
        if wanted == "required" or (wanted == "optional" and self.data.calibration):
            ranges = self._calibrated(stage, parameters, model, key)
            unkeyed["ranges"], after = str(ranges.folder), [ranges.key]
        wants = needs(stage, parameters)
        if "moments" in wants:
            moments = self.moments(stage, parameters, model, key)
            unkeyed["moments"] = str(moments.folder)
            after.append(moments.key)
        if "data" in wants:
            unkeyed["data"] = self.data.calibration
        done = self.steps.run(
            stage,
            f"compressor.stages.{stage}:run",
            parameters,
            unkeyed=unkeyed,
            after=after,
            expected={**model.json(), "path": "model.onnx"},
            estimate=3.0,
            what=", ".join(str(value) for value in parameters.values() if isinstance(value, str)),
        )
        return Model.of(done.value, done.folder), done.key

    def _calibrated(self, stage: str, parameters: dict[str, Any], model: Model, key: str) -> Done:
        """What a stage observes of the activations, in one pass for all its choices."""
        if not self.data.calibration:
            raise UsageError(f"the stage {stage} needs data: pass --data or --calib-data")
        n = self.data.calibration["n"]
        takes = signature(plugins.module("stages", stage).calibrate).parameters
        return self.steps.run(
            "calibrate",
            f"compressor.stages.{stage}:calibrate",
            {name: value for name, value in parameters.items() if name in takes},
            unkeyed={"model": model.json(), "data": self.data.calibration},
            after=[key, *self.data.key("calibration")],
            expected={},
            estimate=self.pass_seconds(n, 2.0),
            what=f"{n} samples through the float graph",
        )

    def moments(self, stage: str, parameters: dict[str, Any], model: Model, key: str) -> Done:
        """Means and correlations of what the layers read, for corrections of their weights and biases."""
        return self.steps.run(
            "moments",
            f"compressor.stages.{stage}:moments",
            {"scheme": parameters["scheme"]},
            unkeyed={"model": model.json(), "data": self.data.calibration},
            after=[key, *self.data.key("calibration")],
            expected={},
            estimate=self.pass_seconds(64, 6.0),
            what="means and correlations of the layers' inputs",
        )

    def _exported(self, model: Model, key: str, target: Target, recipe: Recipe) -> Engine:
        """The engine's file."""
        exported = self.steps.run(
            f"export-{target.folder}",
            f"exporters.{target.runtime}:export",
            {"target": str(target), "load": not self.data.evaluation},  # otherwise it is run next
            unkeyed={"model": model.json()},
            after=[key],
            expected={"file": "model" + plugins.module("exporters", str(target.runtime)).SUFFIX},
            estimate=1.0,
        )
        return Engine(target, recipe, model, exported)

    def ran(self, engine: Engine, data: dict[str, Any] | None, key: Sequence[str]) -> Engine:
        """The engine with its outputs over `data`, which `key` identifies."""
        if not data:
            return engine
        target, n = engine.target, data["n"]
        outputs = self.steps.run(
            f"run-{target.folder}",
            "serving.accuracy:run_engine",
            {"runtime": target.runtime, "device": target.device},
            unkeyed={"engine": engine.path, "data": data, "threads": _cores()},
            after=[engine.exported.key, *key, f"batch {data['batch']}"],
            measured=True,
            expected={},
            estimate=self.pass_seconds(n, 1.0),
            what=f"{n} evaluation samples on the engine",
        )
        return replace(engine, outputs=outputs)

    def compared(self, baseline: Engine, engine: Engine, *, part: bool = False) -> dict[str, Any]:
        """Metric, drop and agreement, measured on the engine; `part`: it ran on some of the samples."""
        if not (engine.outputs and baseline.outputs):
            return {}
        done = self.steps.run(
            "compare",
            "serving.accuracy:compare_task",
            {"metric": self.options.metric, "max_drop": self.options.max_drop, "part": part},
            unkeyed={
                "baseline": str(baseline.outputs.folder),
                "candidate": str(engine.outputs.folder),
                "data": self.data.evaluation,
                "labelled": self.data.labelled,
            },
            fresh=True,  # a metric may be the user's own code
            expected={},
            estimate=1.0,
            what=str(engine.target),
        )
        return dict(done.value)

    def raced(self, engines: Sequence[Engine], seconds: float) -> list[dict[str, Any] | None]:
        """Latency rows of engines, the first of which is the baseline."""
        target = engines[0].target
        done = self.steps.run(
            f"latency-{target.runtime}-{target.device}",
            "serving.bench:latency",
            {
                "runtime": target.runtime,
                "device": target.device,
                "threads": self.options.threads,
                "batches": [1],
                "seconds": seconds,
                "seed": self.options.seed,
            },
            unkeyed={"engines": [engine.path for engine in engines], "data": self.data.evaluation},
            fresh=True,
            expected={"engines": [None] * len(engines)},
            estimate=seconds,
            threads=self.options.threads,
            what="interleaved with the float engine and an A/A control",
        )
        return list(done.value["engines"])

    def layers(self, engine: Engine) -> list[dict[str, Any]]:
        """Per layer SQNR of the quantized graph against the float one."""
        if not engine.model.facts.get("quantized") or not self.data.calibration:
            return []
        done = self.steps.run(
            "diagnose",
            "compressor.stages.quantize:diagnose",
            {},
            unkeyed={
                "model": (engine.stem or self.model).json(),
                "quantized": engine.model.json(),
                "data": self.data.calibration,
            },
            after=[engine.exported.key],
            expected={"layers": []},
            estimate=self.pass_seconds(64, 2.0),
            what="float and quantized graph side by side",
        )
        return list(done.value["layers"])

    def pass_seconds(self, samples: int, factor: float) -> float | None:
        """A guess at the time of a pass over data, from the model's multiply-accumulates if known."""
        return None if self.macs is None else 1.0 + samples * factor * self.macs / 8e9


def calibration(stage: str, parameters: dict[str, Any]) -> str:
    """Whether a stage needs data to calibrate from: required, optional or none."""
    wanted = getattr(plugins.module("stages", stage), "calibration", None)
    return str(wanted(parameters)) if wanted else "none"


def needs(stage: str, parameters: dict[str, Any]) -> set[str]:
    """What a stage takes beyond its ranges."""
    wanted = getattr(plugins.module("stages", stage), "needs", None)
    return set(wanted(parameters)) if wanted else set()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
