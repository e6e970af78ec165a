"""From a model and targets to proven engines and a report.

The model goes through its stages, then each target through export, proof and report. Everything is a
step (`compressor.steps`), so the same command goes on where it stopped.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from compressor import machine, metrics, plugins, presets
from compressor.delivery import deliver
from compressor.errors import CompressError, StoreError, UnsupportedError, UsageError, WorkerError
from compressor.intake import Data, load_data, load_model, resolve
from compressor.model import Model
from compressor.options import Options
from compressor.quantization import scheme
from compressor.recipe import Recipe, Step
from compressor.report import Report
from compressor.search import Found, Rung, search
from compressor.steps import Done, Planned, Steps
from compressor.store import STEPS, Store, claim, file_digest
from compressor.target import Target
from compressor.trials import Ledger, Trials

__all__ = ["Interrupted", "plan", "run"]

Listener = Callable[[dict[str, Any]], None]
OPSET = 20  # the newest whose Q/DQ graphs ONNX Runtime fuses throughout


class Interrupted(KeyboardInterrupt):
    """The run was interrupted when it had an engine to deliver; `report` is about what there is."""

    def __init__(self, report: Report) -> None:
        super().__init__("interrupted")
        self.report = report


def run(options: Options, on_event: Listener | None = None) -> Report:
    """Do what `options` ask for and write everything below `options.folder`.

    Raises `CompressError`; what was finished before stays and is used by the next run. An interrupt
    (Ctrl-C) ends the search: the best engine so far is delivered, then `Interrupted` is raised. Without one
    it is a plain `KeyboardInterrupt`.
    """
    job = _Run(options, on_event)
    with _workplace(options) as store:
        report = job.report(Steps(store, on_event=on_event))
    if job.interrupted:
        raise Interrupted(report)
    return report


def plan(options: Options, on_event: Listener | None = None) -> list[Planned]:
    """The steps that `run` would take, and which of them are stored; writes nothing that stays."""
    job = _Run(options, on_event)
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(options.folder / STEPS, scratch=Path(scratch))
        steps = Steps(store, planning=True, on_event=on_event)
        job.engines(steps)
    return steps.plan


@contextmanager
def _workplace(options: Options) -> Iterator[Store]:
    """The locked store; what was made for it goes again if the request turns out to be wrong."""
    file = options.engine_file
    if file and (file.is_dir() or not file.absolute().parent.is_dir()):
        what = "is a folder" if file.is_dir() else f"there is no folder {file.absolute().parent}"
        raise StoreError(f"--out {file}: {what}; choose another --out")
    undo = claim(options.folder)
    store = Store(options.folder / STEPS)
    try:
        with store.locked():
            yield store
    except (WorkerError, StoreError):
        raise  # what is finished serves the next try
    except CompressError:
        undo()
        raise


@dataclass(frozen=True)
class _Engine:
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


class _Run:
    """One run: what was asked is resolved when it is made, the work is done in `engines`."""

    steps: Steps
    model: Model
    key: str
    data: Data

    def __init__(self, options: Options, on_event: Listener | None) -> None:
        self.options = options
        self.interrupted = False
        self.ledger = Ledger(None)
        _spare_inputs(options)
        if options.metric:
            metrics.check(options.metric)
        if options.scheme and options.scheme not in scheme.SCHEMES:
            raise UsageError(f"--scheme {options.scheme}: unknown; known are {', '.join(scheme.SCHEMES)}")
        self.recipe = Recipe.read(Path(options.recipe)) if options.recipe else None
        self.targets, self.skipped = resolve(options, self._obstacle)
        self.ladders = {target: self._ladder(target) for target in self.targets}

    def _obstacle(self, target: Target) -> str | None:
        """Why a target (runtime and device filled in) cannot be made, or None."""
        reason: str | None = plugins.module("exporters", str(target.runtime)).check(target)
        if reason:
            return reason
        try:
            self._ladder(target)
        except UnsupportedError as error:
            return str(error)
        return None

    def _ladder(self, target: Target) -> tuple[Recipe, ...]:
        """The recipes that are tried for a target; raises `UnsupportedError` if there is none."""
        runtime, device = str(target.runtime), str(target.device)
        name = ""
        if presets.schemed(target):
            name = self.options.scheme or scheme.for_machine(runtime, device, machine.cpu_flags())
            if target.precision == "int8-dynamic" and not scheme.SCHEMES[name].dynamic:
                raise UnsupportedError(
                    f"{target}: {scheme.SCHEMES[name].title} has no kernels that quantize while they run; "
                    "ask for int8"
                )
        if self.recipe:
            return (_suited(self.recipe, target, name),)
        return presets.rungs(target, name, bool(self.options.calib_data or self.options.data))

    def report(self, steps: Steps) -> Report:
        """Make and prove all engines, then deliver them."""
        self.ledger = Ledger(self.options.folder / "ledger.jsonl")
        found = self.engines(steps)
        return deliver(self.options, self.source, found, steps)

    def engines(self, steps: Steps) -> dict[str, Any]:
        """What the report says of the data and of all engines."""
        self.steps = steps
        self.source = load_model(self.options, steps)
        calibrates = any(
            _calibration(step.stage, step.parameters) == "required"
            for ladder in self.ladders.values()
            for step in ladder[0].steps
        )
        self.data = load_data(self.options, self.source, calibrates, steps)
        self.model, self.key = self._converted()
        found: dict[str, Any] = {"engines": [], "rungs": [], "layers": {}, "skipped": self.skipped}
        for runtime, device in dict.fromkeys((target.runtime, target.device) for target in self.targets):
            here = [target for target in self.targets if (target.runtime, target.device) == (runtime, device)]
            engines = self._made(here, found)
            found["engines"] += self._rows(engines)
        return {"data": self.data.facts(), "metric": _metric(found["engines"]), **found}

    def _converted(self) -> tuple[Model, str]:
        """The model in ONNX form, and the key of the step that made it."""
        model = self.source
        source = str(model.facts.get("digest") or file_digest(model.path))
        if model.form == "onnx":
            return model, source
        done = self.steps.run(
            "convert",
            "exporters.onnx:convert",
            {"opset": OPSET},
            unkeyed={"model": model.json()},
            after=[source],
            expected={**model.json(), "form": "onnx", "path": "model.onnx"},
            estimate=15.0,
            what="torch graph to ONNX, checked at three batch sizes",
        )
        return Model.of(done.value, done.folder), done.key

    # ---------------------------------------------------------------- making engines

    def _made(self, targets: list[Target], found: dict[str, Any]) -> list[tuple[_Engine, dict[str, Any]]]:
        """The baseline of one runtime and device, then its candidates, each with its comparison."""
        baseline = self._exported(self.model, self.key, targets[0].baseline, Recipe("float"))
        if self.data.evaluation:
            baseline = self.ran(baseline, self.data.evaluation, self.data.key("evaluation"))
        engines = [(baseline, self.compared(baseline, baseline))]
        self._doubt(engines[0][1].get("metric"))
        for target in targets:
            if target == baseline.target:
                continue
            if self.interrupted:
                self.skipped.append({"target": str(target), "reason": "interrupted before it was tried"})
                continue
            chosen = self._searched(target, baseline, found)
            engines.append((chosen.engine, chosen.comparison))
            found["layers"][str(target)] = self._layers(chosen.engine)
        return engines

    def _doubt(self, metric: dict[str, Any] | None) -> None:
        """Say so where the float engine itself only guesses: labels and outputs may not belong together."""
        classes = self.model.outputs[0].shape[-1:]
        if not metric or metric["name"] != "top1" or metric["n"] < 20 or not classes:
            return
        if isinstance(classes[0], int) and metric["low"] <= 100 / classes[0]:
            found = f"{metric['value']:.2f} % of {metric['n']} samples"
            self.steps.note(
                f"the float engine's own top1 is {found}, no better than guessing: check labels, their order "
                "and the preprocessing, or name another --metric"
            )

    def _searched(self, target: Target, baseline: _Engine, found: dict[str, Any]) -> Rung:
        """The rung that the search chose for a target; all that it tried goes into the report."""
        deadline = time.monotonic() + (self.options.budget or float("inf"))
        trials = Trials(self, self.steps, self.options, self.data, target, baseline, self.ledger)
        last = self.ladders[target][0].steps[-1:]
        here = not (last and _made_for(target, str(last[0].parameters.get("scheme"))))
        outcome = search(
            self.ladders[target],
            trials,
            self.options.max_drop,
            mixes=here and not (self.recipe or self.steps.planning) and target.precision == "int8",
            timed=bool(here and self.options.bench and self.data.evaluation),
            out_of_time=lambda: time.monotonic() > deadline,
        )
        found["rungs"] += [_rung(target, rung, rung is outcome.chosen) for rung in outcome.tried]
        self._say_cut(target, outcome)
        return outcome.chosen

    def _say_cut(self, target: Target, outcome: Found) -> None:
        """Tell the report that the search did not come to its end."""
        if outcome.cut:
            reason = "--budget is used up" if outcome.cut == "budget" else "it was interrupted"
            count = len(outcome.tried)
            self.steps.note(
                f"{target}: the search was cut after {count} candidate{'s' * (count != 1)} ({reason}); the "
                "best so far is delivered, and the same command goes on from here"
            )
        self.interrupted = self.interrupted or outcome.cut == "interrupt"

    def built(self, recipe: Recipe, target: Target) -> _Engine:
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
        wanted = _calibration(stage, parameters)
        if wanted == "required" or (wanted == "optional" and self.data.calibration):
            ranges = self._calibrated(stage, parameters, model, key)
            unkeyed["ranges"], after = str(ranges.folder), [ranges.key]
        wants = _needs(stage, parameters)
        if "moments" in wants:
            moments = self._moments(stage, parameters, model, key)
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
            estimate=self._pass_seconds(n, 2.0),
            what=f"{n} samples through the float graph",
        )

    def _moments(self, stage: str, parameters: dict[str, Any], model: Model, key: str) -> Done:
        """Means and correlations of what the layers read, for corrections of their weights and biases."""
        return self.steps.run(
            "moments",
            f"compressor.stages.{stage}:moments",
            {"scheme": parameters["scheme"]},
            unkeyed={"model": model.json(), "data": self.data.calibration},
            after=[key, *self.data.key("calibration")],
            expected={},
            estimate=self._pass_seconds(64, 6.0),
            what="means and correlations of the layers' inputs",
        )

    def _exported(self, model: Model, key: str, target: Target, recipe: Recipe) -> _Engine:
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
        return _Engine(target, recipe, model, exported)

    def ran(self, engine: _Engine, data: dict[str, Any] | None, key: Sequence[str]) -> _Engine:
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
            estimate=self._pass_seconds(n, 1.0),
            what=f"{n} evaluation samples on the engine",
        )
        return replace(engine, outputs=outputs)

    def compared(self, baseline: _Engine, engine: _Engine, *, part: bool = False) -> dict[str, Any]:
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

    def _layers(self, engine: _Engine) -> list[dict[str, Any]]:
        """Per layer SQNR of the quantized graph against the float one."""
        if not engine.model.facts.get("quantized") or not self.data.calibration or self.interrupted:
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
            estimate=self._pass_seconds(64, 2.0),
            what="float and quantized graph side by side",
        )
        return list(done.value["layers"])

    def _pass_seconds(self, samples: int, factor: float) -> float | None:
        """A guess at the time of a pass over data, from the model's multiply-accumulates if known."""
        macs = self.source.facts.get("macs")
        return None if macs is None else 1.0 + samples * factor * macs / 8e9

    # ---------------------------------------------------------------- proof

    def _rows(self, engines: list[tuple[_Engine, dict[str, Any]]]) -> list[dict[str, Any]]:
        """The report's rows; an interrupt ends the measurements, and what is there is reported."""
        try:
            return self._proven(engines)
        except KeyboardInterrupt:
            if len(engines) < 2:
                raise
            self.interrupted = True
            return self._proven(engines)

    def _proven(self, engines: list[tuple[_Engine, dict[str, Any]]]) -> list[dict[str, Any]]:
        """The report's rows for the engines of one runtime and device, baseline first."""
        latencies = self._latency([engine for engine, _ in engines])
        rows: list[dict[str, Any]] = []
        for (engine, comparison), latency in zip(engines, latencies, strict=True):
            proof = self._proof(engine, engines[0][0])
            proof["portable"] = self._portable(engine)
            if not self.steps.planning:
                rows.append(_row(engine, comparison, latency, proof, candidate=bool(rows)))
        return rows

    def _latency(self, engines: list[_Engine]) -> list[dict[str, Any] | None]:
        """Interleaved latency of all engines of one runtime and device against the first one."""
        if not self.options.bench:
            self.steps.note("latency was not measured (--bench 0)")
        if self.interrupted:
            self.steps.note("latency and memory were not measured: the run was interrupted")
        if not self.options.bench or not self.data.evaluation or self.interrupted:
            return [None] * len(engines)
        return self.raced(engines, self.options.bench * len(engines))

    def raced(self, engines: Sequence[_Engine], seconds: float) -> list[dict[str, Any] | None]:
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

    def _portable(self, engine: _Engine) -> dict[str, Any] | None:
        """What an int8 engine for x86 does on processors without VNNI, or what being safe there costs."""
        facts, last = engine.model.facts, engine.recipe.steps[-1:]
        if not (engine.stem and self.data.calibration and last) or self.interrupted:
            return None
        chosen = scheme.SCHEMES.get(str(last[0].parameters.get("scheme")))
        if last[0].stage != "quantize" or not chosen or not (chosen.pair_limit or chosen.narrow):
            return None
        if not (facts.get("quantized") or self.steps.planning):
            return None
        unkeyed: dict[str, Any] = {"model": engine.stem.json(), "quantized": engine.model.json()}
        unkeyed["data"] = self.data.calibration
        if chosen.pair_limit and "moments" in _needs("quantize", last[0].parameters):
            moments = self._moments("quantize", last[0].parameters, engine.stem, engine.stem_key)
            unkeyed["moments"] = str(moments.folder)
        done = self.steps.run(
            "portable",
            "compressor.quantization.portability:portable",
            {},
            unkeyed=unkeyed,
            after=[engine.exported.key, *self.data.key("calibration")],
            expected={},
            estimate=self._pass_seconds(16, 3.0),
            what="the same file without VNNI",
        )
        return dict(done.value)

    def _proof(self, engine: _Engine, baseline: _Engine) -> dict[str, Any]:
        """What really runs in which precision, the engine against its simulation, and memory."""
        if not self.data.evaluation or self.interrupted:
            return {"precision": None, "simulation_gap": None, "memory": None}
        tasks = {"precision": "serving.accuracy:precision", "memory": "serving.bench:memory"}
        if engine.model.facts.get("quantized"):
            tasks["simulation_gap"] = "serving.accuracy:simulation_gap"
        values: dict[str, Any] = {"simulation_gap": None}
        for name, task in tasks.items():
            values[name] = self.steps.run(
                name,
                task,
                {"runtime": engine.target.runtime, "device": engine.target.device, "threads": 1},
                unkeyed={
                    "engine": engine.path,
                    "data": self.data.evaluation,
                    **({"baseline": baseline.path} if name == "simulation_gap" else {}),
                },
                after=[engine.exported.key, baseline.exported.key, *self.data.key("evaluation")],
                measured=True,
                fresh=name == "memory",
                expected={},
                estimate=2.0,
                what=str(engine.target),
            ).value
        return values


def _row(
    engine: _Engine,
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
        "made_for": _made_for(engine.target, str(engine.model.facts.get("scheme"))),
        "peak_rss_bytes": proof["memory"] and proof["memory"]["peak_rss_bytes"],
        "quantization": engine.model.facts,
        "inputs": [asdict(spec) for spec in engine.model.inputs],
        "outputs": [asdict(spec) for spec in engine.model.outputs],
        "preprocess": engine.model.preprocess,
        "recommended": False,
    }


def _made_for(target: Target, name: str) -> str | None:
    """What an engine is made for, if that is not this machine: of its speed nothing is learned here."""
    if name not in scheme.SCHEMES:
        return None
    own = scheme.for_machine(str(target.runtime), str(target.device), machine.cpu_flags())
    return None if name in (own, scheme.SCHEMES[own].narrow) else scheme.SCHEMES[name].title


def _spare_inputs(options: Options) -> None:
    """Refuse an --out that would write over what the run reads."""
    wanted = options.engine_file
    if not (wanted and wanted.exists()):
        return
    sources = (options.model, options.data, options.calib_data, options.eval_data, options.recipe)
    for source in filter(None, sources):
        if Path(source).exists() and wanted.samefile(source):
            raise UsageError(f"--out {wanted} is what the run reads ({source}); choose another --out")


_MADE_BY = {
    "int8": "quantize",
    "int8-dynamic": "dynamic",
    "int8-weight": "weight_only",
    "int4": "weight_only",
}


def _suited(recipe: Recipe, target: Target, scheme_name: str) -> Recipe:
    """The recipe with the machine's scheme where it names none; refuses one that cannot make the target."""
    needed = _MADE_BY.get(target.precision)
    if needed and needed not in [step.stage for step in recipe.steps]:
        raise UsageError(
            f"recipe {recipe.name}: no step '{needed}', so it cannot make {target}; add it or ask for fp32"
        )
    return replace(recipe, steps=tuple(_filled(recipe, step, scheme_name) for step in recipe.steps))


def _filled(recipe: Recipe, step: Step, scheme_name: str) -> Step:
    """A step whose parameters are those that its stage takes."""
    takes = signature(plugins.module("stages", step.stage).run).parameters
    known = [name for name in takes if name not in ("model", "folder", "ranges", "moments", "data")]
    unknown = sorted(set(step.parameters) - set(known))
    if unknown:
        raise UsageError(
            f"recipe {recipe.name}: stage {step.stage} takes no '{unknown[0]}'; it takes {', '.join(known)}"
        )
    given = {"scheme": scheme_name, **step.parameters} if "scheme" in known else step.parameters
    return Step(step.stage, given)


def _calibration(stage: str, parameters: dict[str, Any]) -> str:
    """Whether a stage needs data to calibrate from: required, optional or none."""
    wanted = getattr(plugins.module("stages", stage), "calibration", None)
    return str(wanted(parameters)) if wanted else "none"


def _needs(stage: str, parameters: dict[str, Any]) -> set[str]:
    """What a stage takes beyond its ranges."""
    wanted = getattr(plugins.module("stages", stage), "needs", None)
    return set(wanted(parameters)) if wanted else set()


def _rung(target: Target, rung: Rung, chosen: bool) -> dict[str, Any]:
    return {
        "target": str(target),
        "name": rung.recipe.name,
        "what": rung.recipe.what,
        "metric": rung.comparison.get("metric"),
        "drop": rung.comparison.get("drop"),
        "sqnr_db": (rung.comparison.get("agreement") or {}).get("sqnr_db"),
        "seconds": round(rung.seconds, 2),
        "kept": chosen,
        "partial": rung.partial,
        "expected_ms": rung.ms,
        "speed": rung.speed,
    }


def _metric(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    metric = rows[0]["metric"] if rows else None
    return metric and {"name": metric["name"], "higher_is_better": metric["higher_is_better"]}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
