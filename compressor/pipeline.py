"""From a model and targets to proven engines and a report.

The model goes through its stages, then each target through export, proof and report. Everything is a
step (`compressor.steps`), so the same command goes on where it stopped.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor import machine, metrics, plugins, presets
from compressor.delivery import deliver, spare_files
from compressor.engines import Engine, Maker, calibration
from compressor.errors import CompressError, DataError, StoreError, UnsupportedError, UsageError, WorkerError
from compressor.intake import load_data, load_model, resolve
from compressor.model import Model
from compressor.options import Options
from compressor.proof import Judged, Proof, made_for
from compressor.quantization import scheme
from compressor.recipe import Recipe
from compressor.report import Report
from compressor.search import Found, Rung, search
from compressor.steps import Planned, Steps
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


class _Run:
    """One run: what was asked is resolved when it is made, the work is done in `engines`."""

    steps: Steps
    source: Model
    maker: Maker

    def __init__(self, options: Options, on_event: Listener | None) -> None:
        self.options = options
        self.interrupted = False
        self.ledger = Ledger(None)
        if options.engine_file:
            spare_files(options)
        if options.metric:
            metrics.check(options.metric)
        if options.scheme and options.scheme not in scheme.SCHEMES:
            raise UsageError(f"--scheme {options.scheme}: unknown; known are {', '.join(scheme.SCHEMES)}")
        self.recipe = Recipe.read(Path(options.recipe)) if options.recipe else None
        self.targets, self.skipped = resolve(options, self._obstacle)
        if options.scheme and not any(map(presets.schemed, self.targets)):
            raise UsageError(
                f"--scheme {options.scheme} says how int8 and int8-dynamic are made; none of the targets is"
            )
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
            presets.check_scheme(target, name)
        if self.recipe:
            return (presets.suited(self.recipe, target, name, self.options.scheme),)
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
            calibration(step.stage, step.parameters) == "required"
            for ladder in self.ladders.values()
            for step in ladder[0].steps
        )
        data = load_data(self.options, self.source, calibrates, steps)
        model, key = self._converted()
        self.maker = Maker(steps, self.options, data, model, key, self.source.facts.get("macs"))
        found: dict[str, Any] = {"engines": [], "rungs": [], "layers": {}, "skipped": self.skipped}
        for runtime, device in dict.fromkeys((target.runtime, target.device) for target in self.targets):
            here = [target for target in self.targets if (target.runtime, target.device) == (runtime, device)]
            engines = self._made(here, found)
            proof = Proof(self.maker, self.interrupted)
            found["engines"] += proof.rows(engines)
            self.interrupted = proof.interrupted
        return {"data": data.facts(), "metric": _metric(found["engines"]), **found}

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

    def _made(self, targets: list[Target], found: dict[str, Any]) -> list[Judged]:
        """The baseline of one runtime and device, then its candidates, each with its comparison."""
        maker, data = self.maker, self.maker.data
        baseline = maker.built(Recipe("float"), targets[0].baseline)
        if data.evaluation:
            baseline = maker.ran(baseline, data.evaluation, data.key("evaluation"))
        engines = [(baseline, maker.compared(baseline, baseline))]
        self._judged(engines[0][1])
        for target in targets:
            if target == baseline.target:
                continue
            if self.interrupted:
                self.skipped.append({"target": str(target), "reason": "interrupted before it was tried"})
                continue
            chosen = self._searched(target, baseline, found)
            engines.append((chosen.engine, chosen.comparison))
            found["layers"][str(target)] = [] if self.interrupted else maker.layers(chosen.engine)
        return engines

    def _judged(self, comparison: dict[str, Any]) -> None:
        """Refuse a budget that nothing can be held against: the labels may fit no metric."""
        if self.options.max_drop is not None and comparison and not comparison["metric"]:
            why = comparison["metric_reason"]
            raise DataError(f"--max-drop needs an accuracy to hold, but the float engine has none: {why}")
        self._doubt(comparison.get("metric"))

    def _doubt(self, metric: dict[str, Any] | None) -> None:
        """Say so where the float engine itself only guesses: labels and outputs may not belong together."""
        classes = self.maker.model.outputs[0].shape[-1:]
        if not metric or metric["name"] != "top1" or metric["n"] < 20 or not classes:
            return
        if isinstance(classes[0], int) and metric["low"] <= 100 / classes[0]:
            found = f"{metric['value']:.2f} % of {metric['n']} samples"
            self.steps.note(
                f"the float engine's own top1 is {found}, no better than guessing: check labels, their order "
                "and the preprocessing, or name another --metric"
            )

    def _searched(self, target: Target, baseline: Engine, found: dict[str, Any]) -> Rung:
        """The rung that the search chose for a target; all that it tried goes into the report."""
        deadline = time.monotonic() + (self.options.budget or float("inf"))
        trials = Trials(self.maker, target, baseline, self.ledger)
        last = self.ladders[target][0].steps[-1:]
        here = not (last and made_for(target, str(last[0].parameters.get("scheme"))))
        outcome = search(
            self.ladders[target],
            trials,
            self.options.max_drop,
            mixes=here and not (self.recipe or self.steps.planning) and target.precision == "int8",
            timed=bool(here and self.options.bench and self.maker.data.evaluation),
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
