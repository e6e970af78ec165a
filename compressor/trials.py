"""The search's laboratory for one target: candidates as stored steps, kept in a ledger when judged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from compressor.intake import Data
from compressor.options import Options
from compressor.recipe import Recipe, Step
from compressor.search import CHEAP, HARMLESS, Mix, Rung
from compressor.steps import Steps
from compressor.store import usable
from compressor.target import Target

__all__ = ["Ledger", "Maker", "Trials"]

SUBSET = 256  # samples on which a hopeless candidate is rejected
_SHARE = 4  # the evaluation set must be that many times as large
_NAMED = 6  # layers that a recipe's words name


class Maker(Protocol):
    """What makes and measures candidates: `compressor.engines.Maker`."""

    @property
    def steps(self) -> Steps:
        """Runs tasks as stored steps."""

    @property
    def options(self) -> Options:
        """What the user asked for."""

    @property
    def data(self) -> Data:
        """Calibration and evaluation data."""

    def built(self, recipe: Recipe, target: Target) -> Any:
        """An exported engine."""

    def ran(self, engine: Any, data: dict[str, Any] | None, key: Sequence[str]) -> Any:
        """The engine with its outputs over `data`."""

    def compared(self, baseline: Any, engine: Any, *, part: bool = False) -> dict[str, Any]:
        """Metric, drop and agreement; `part`: the engine was run on a part of the baseline's samples."""

    def raced(self, engines: Sequence[Any], seconds: float) -> list[dict[str, Any] | None]:
        """Latency rows of engines, the first of which is the baseline."""


@dataclass
class Ledger:
    """Every candidate as a line of JSON, on disk as soon as it is judged; a run begins it anew."""

    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path:
            with usable(self.path):
                self.path.write_text("")

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, whole."""
        self.rows.append(row)
        if self.path:
            with usable(self.path), self.path.open("a") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())


@dataclass
class Trials:
    """Makes, runs and judges candidates against `baseline`, whose engine was run over all samples."""

    maker: Maker
    target: Target
    baseline: Any
    ledger: Ledger
    _judged: dict[str, Rung] = field(default_factory=dict)
    _given: dict[str, dict[str, Any]] = field(default_factory=dict)

    def attempt(self, recipe: Recipe, ms: float | None = None, *, early: bool) -> Rung:
        """Make an engine and judge it; with `early`, on a subset first, which may be enough to reject it.

        An engine that is the same file as an earlier one (nothing to even out, say) is not run again.
        """
        first = len(self.maker.steps.records)
        engine = self.maker.built(recipe, self.target)
        same = self._judged.get(_file(engine))
        if same and (early or not same.partial):
            rung = replace(same, recipe=recipe, seconds=self._costs(first)[0], ms=ms)
            self.ledger.add({**_row(self.target, rung, self._costs(first)[1]), "same_as": same.recipe.name})
            return rung
        small = early and self._rejected(engine)
        if small:
            comparison = small
        else:
            engine = self.maker.ran(engine, self.maker.data.evaluation, self._key())
            comparison = self.maker.compared(self.baseline, engine)
        seconds, cpu_seconds = self._costs(first)
        rung = Rung(recipe, comparison, engine, seconds, bool(small), ms)
        self._judged[_file(engine)] = rung
        self.ledger.add(_row(self.target, rung, cpu_seconds))
        return rung

    def _costs(self, first: int) -> tuple[float, float]:
        """Seconds and CPU-seconds of the steps from the one of that number on."""
        records = self.maker.steps.records[first:]
        return sum(item["seconds"] for item in records), sum(item["cpu_seconds"] or 0 for item in records)

    def _key(self) -> list[str]:
        return self.maker.data.key("evaluation") if self.maker.data.evaluation else []

    def _rejected(self, engine: Any) -> dict[str, Any] | None:
        """The comparison on a subset, if the budget is surely broken there."""
        whole = self.maker.data.evaluation
        if self.maker.steps.planning or not whole or whole["n"] < _SHARE * SUBSET:
            return None
        if ":" in (self.maker.options.metric or ""):  # samples may count together only
            return None
        drawn = self.maker.steps.run(
            "subset",
            "compressor.data._subset:subset",
            {"n": SUBSET, "seed": self.maker.options.seed},
            unkeyed={"indices": whole["indices"]},
            after=self._key(),
        )
        data = {**whole, "indices": drawn.path(drawn.value["file"]), "n": drawn.value["n"]}
        comparison = self.maker.compared(self.baseline, self.maker.ran(engine, data, [drawn.key]), part=True)
        broken = (comparison.get("drop") or {}).get("verdict") == "broken"
        return comparison if broken else None

    # ---------------------------------------------------------------- mixed precision

    def few(self, rung: Rung) -> Mix | None:
        """The smallest set of layers that makes nearly all the error, left in float, if it is cheap."""
        step = _quantizing(rung)
        if not step:
            return None
        found = self.maker.steps.run(
            "mixes",
            "compressor.quantization.mixed:few",
            {"share": CHEAP, "error": HARMLESS},
            fresh=True,
            unkeyed=self._measured(rung, step),
        )
        return next((_mix(rung.recipe, choice) for choice in found.value["choices"]), None)

    def mixed(self, rung: Rung) -> tuple[list[Mix], float]:
        """Mixes of a rung's recipe, from sensitivities and profiles; none where it does not quantize."""
        step = _quantizing(rung)
        if not step:
            return [], 0.0
        self._given = {**self._measured(rung, step), **self._profiles(rung.engine)}
        found = self.maker.steps.run(
            "mixes", "compressor.quantization.mixed:choices", {}, fresh=True, unkeyed=self._given
        )
        mixes = [_mix(rung.recipe, choice) for choice in found.value["choices"]]
        return mixes, float(found.value["integer_ms"])

    def reduced(self, rung: Rung) -> list[Mix]:
        """Mixes with one layer less in float."""
        layers = rung.recipe.steps[-1].parameters.get("exclude", [])
        found = self.maker.steps.run(
            "mixes",
            "compressor.quantization.mixed:reduced",
            {},
            fresh=True,
            unkeyed={**self._given, "layers": layers},
        )
        return [_mix(rung.recipe, choice) for choice in found.value["choices"]]

    def _measured(self, rung: Rung, step: Step) -> dict[str, Any]:
        """Arguments of the tasks that choose: the graphs, and what the layers cost in error."""
        engine = rung.engine
        model, quantized = engine.stem.json(), engine.model.json()
        sensitivity: dict[str, Any] = {"weights": {}, "activations": {}}
        if not rung.fits(self.maker.options.max_drop):
            if step.parameters.get("bias_correction") == "full":  # makes good for errors that come before
                alone = replace(step, parameters={**step.parameters, "bias_correction": "fast"})
                recipe = replace(rung.recipe, steps=(*rung.recipe.steps[:-1], alone))
                engine = self.maker.built(recipe, self.target)
                quantized = engine.model.json()
            sensitivity = self.maker.steps.run(
                "sensitivity",
                "compressor.quantization.sensitivity:sensitivity",
                {},
                unkeyed={"model": model, "quantized": quantized, "data": self.maker.data.calibration},
                after=[engine.exported.key, *self.maker.data.key("calibration")],
                what="the error that each quantized tensor alone brings in",
            ).value
        return {
            "model": model,
            "quantized": quantized,
            "scheme": step.parameters["scheme"],
            "exclude": step.parameters.get("exclude"),
            "sensitivity": sensitivity,
        }

    def _profiles(self, engine: Any) -> dict[str, Any]:
        """Kernels of the float engine and of `engine`."""
        engines = (self.baseline, engine)
        done = self.maker.steps.run(
            "profile",
            "serving.profile:profile",
            {
                "runtime": self.target.runtime,
                "device": self.target.device,
                "threads": self.maker.options.threads,
            },
            unkeyed={"engines": [one.path for one in engines], "data": self.maker.data.evaluation},
            after=[*(one.exported.key for one in engines), *self._key()],
            measured=True,
            what="the time of each layer, float and quantized",
        )
        return dict(zip(("floats", "integers"), (found["kernels"] for found in done.value), strict=True))

    def race(self, rungs: Sequence[Rung]) -> list[tuple[float, float]]:
        """Measured speeds against the float engine, from a quarter of the time of the final measurement."""
        engines = [self.baseline, *(rung.engine for rung in rungs)]
        rows = self.maker.raced(engines, max(1.0, self.maker.options.bench / 4) * len(engines))
        unknown: dict[str, Any] = {"value": 1.0, "low": None}
        speeds = [row["ratio_to_baseline"] if row else unknown for row in rows[1:]]
        return [(speed["value"], speed["low"] or 0.0) for speed in speeds]


def _file(engine: Any) -> str:
    """What tells an engine's file from others; a planned one has nothing yet but its step."""
    return str(engine.exported.value.get("sha256") or engine.exported.key)


def _quantizing(rung: Rung) -> Step | None:
    """The rung's step that quantizes, if it did."""
    step = rung.recipe.steps[-1] if rung.recipe.steps else None
    done = step and step.stage == "quantize" and rung.engine.model.facts.get("quantized")
    return step if done else None


def _mix(recipe: Recipe, choice: dict[str, Any]) -> Mix:
    """A recipe that leaves the layers of a choice in float."""
    *before, last = recipe.steps
    base = recipe.name.partition("+")[0]
    layers = choice["exclude"]
    parameters = {key: value for key, value in last.parameters.items() if key != "exclude"}
    if layers:
        parameters["exclude"] = layers
    named = ", ".join(layers[:_NAMED]) + (f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else "")
    what = f"{base} with {len(layers)} operator{'s' * (len(layers) != 1)} in float: {named}"
    made = Recipe(f"{base}+float{len(layers)}", (*before, Step(last.stage, parameters)), what)
    return Mix(made, choice["ms"], choice["error"])


def _row(target: Target, rung: Rung, cpu_seconds: float) -> dict[str, Any]:
    """A candidate as the ledger keeps it."""
    agreement = rung.comparison.get("agreement") or {}
    return {
        "target": str(target),
        "name": rung.recipe.name,
        "recipe": rung.recipe.json(),
        "metric": rung.comparison.get("metric"),
        "drop": rung.comparison.get("drop"),
        "verdict": rung.verdict,
        "partial": rung.partial,
        "sqnr_db": agreement.get("sqnr_db"),
        "top1_agreement": agreement.get("top1"),
        "expected_ms": rung.ms,
        "seconds": round(rung.seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
    }
