"""How candidates are judged: each file once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from compressor.intake import Data
from compressor.options import Options
from compressor.recipe import Recipe, Step
from compressor.target import Target
from compressor.trials import Ledger, Trials


@dataclass
class Counted:
    """Gives every recipe with the same last step the same file, and counts what is run."""

    steps: Any
    options: Options
    data: Data
    runs: list[str] = field(default_factory=list)

    def built(self, recipe: Recipe, target: Target) -> Any:
        file = str(recipe.steps[-1].parameters)
        return SimpleNamespace(exported=SimpleNamespace(value={"sha256": file}, key=recipe.name))

    def ran(self, engine: Any, data: dict[str, Any] | None, key: Sequence[str]) -> Any:
        self.runs.append(engine.exported.key)
        return engine

    def compared(self, baseline: Any, engine: Any, *, part: bool = False) -> dict[str, Any]:
        return {"drop": {"value": 2.0, "verdict": "broken"}, "agreement": {"sqnr_db": 9.0}}

    def raced(self, engines: Sequence[Any], seconds: float) -> list[dict[str, Any] | None]:
        return [None for _ in engines]


def test_an_engine_that_is_the_same_file_is_not_run_again() -> None:
    steps = SimpleNamespace(records=[], planning=False)
    evaluation = {"n": 100, "indices": "", **dict.fromkeys(("sha256", "picked", "preprocess", "binding"))}
    data = Data({}, evaluation, labelled=True)
    target = Target("int8", 0, "onnx", "cpu")
    maker = Counted(steps, Options("m.onnx"), data)
    trials = Trials(maker, target, None, Ledger(None))
    plain, other = Step("quantize", {"observer": "mse"}), Step("quantize", {"observer": "minmax"})
    even = Step("equalize", {"method": "smooth"})
    recipes = Recipe("gptq", (plain,)), Recipe("smooth", (even, plain)), Recipe("minmax", (other,))
    rungs = [trials.attempt(recipe, early=True) for recipe in recipes]
    assert maker.runs == ["gptq", "minmax"]
    assert rungs[1].comparison == rungs[0].comparison
    assert [rung.recipe.name for rung in rungs] == ["gptq", "smooth", "minmax"]
    assert [row.get("same_as") for row in trials.ledger.rows] == [None, "gptq", None]
