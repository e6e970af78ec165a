"""The search on made-up candidates, whose drops follow from the layers that they leave in float."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.recipe import Recipe, Step
from compressor.search import EXCHANGES, Mix, Rung, search

RECIPES = (Recipe("a"), Recipe("b"), Recipe("c"))


def rung(
    recipe: Recipe, verdict: str | None, drop: float, sqnr: float = 20.0, ms: float | None = None
) -> Rung:
    comparison = {"drop": {"value": drop, "verdict": verdict}, "agreement": {"sqnr_db": sqnr}}
    return Rung(recipe, comparison, None, 1.0, ms=ms)


@dataclass
class Made:
    """A laboratory in which every layer has its share of the drop and its cost in float."""

    drops: Sequence[float]
    costs: Sequence[float] = ()
    width: float = 0.1
    noise: float = 0.0
    budget: float = 0.5
    outcomes: dict[str, tuple[str | None, float]] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    partial: bool = False
    interrupt_at: int | None = None
    spot: Sequence[int] = ()
    count: int = 0
    raced: int = 0

    def attempt(self, recipe: Recipe, ms: float | None = None, *, early: bool) -> Rung:
        self.count += 1
        if self.count == self.interrupt_at:
            raise KeyboardInterrupt
        if recipe.name in self.outcomes:
            return rung(recipe, *self.outcomes[recipe.name], ms=ms)
        left = set(recipe.steps[-1].parameters["exclude"]) if recipe.steps else set()
        drop = sum(share for layer, share in enumerate(self.drops) if layer not in left)
        verdict = (
            "kept"
            if drop + self.width <= self.budget
            else "broken"
            if drop - self.width > self.budget
            else "undecided"
        )
        found = rung(recipe, verdict, drop, ms=ms)
        if self.partial and early and verdict == "broken":
            return Rung(found.recipe, found.comparison, None, 0.1, True, ms)
        return found

    def few(self, base: Rung) -> Mix | None:
        return self.mix(self.spot) if self.spot else None

    def mixed(self, base: Rung) -> tuple[list[Mix], float]:
        order = sorted(range(len(self.drops)), key=lambda layer: -self.drops[layer] / self.cost(layer))
        return [self.mix(order[:count]) for count in range(1, len(order))], 10.0

    def reduced(self, base: Rung) -> list[Mix]:
        layers = base.recipe.steps[-1].parameters["exclude"]
        return [self.mix(left) for left in itertools.combinations(layers, len(layers) - 1)]

    def mix(self, layers: Sequence[int]) -> Mix:
        ms = 10 + sum(self.cost(layer) for layer in layers)
        step = Step("quantize", {"exclude": list(layers)})
        error = sum(share for layer, share in enumerate(self.drops) if layer not in layers) * self.noise
        return Mix(Recipe(f"float {sorted(layers)}", (step,)), ms, error)

    def cost(self, layer: int) -> float:
        return self.costs[layer] if self.costs else 1.0

    def race(self, rungs: Sequence[Rung]) -> list[tuple[float, float]]:
        self.raced += 1
        speeds = [self.speeds[one.recipe.name] for one in rungs]
        return [(speed, speed - 0.1) for speed in speeds]


@pytest.mark.parametrize(
    ("outcomes", "budget", "chosen", "tried"),
    [
        ({"a": ("kept", 0.1)}, 0.5, "a", 1),
        ({"a": ("broken", 2.0), "b": ("kept", 0.2)}, 0.5, "b", 2),
        ({"a": ("undecided", 0.4), "b": ("broken", 3.0)}, 0.5, "a", 2),
        ({"a": ("undecided", 0.4), "b": ("undecided", 0.3), "c": ("undecided", 0.35)}, 0.5, "b", 3),
        ({"a": ("undecided", 0.4), "b": ("kept", 0.2)}, 0.5, "b", 2),
        ({"a": ("undecided", 0.7), "b": ("broken", 2.0), "c": ("undecided", 0.6)}, 0.5, "c", 3),
        ({"a": ("broken", 4.0), "b": ("broken", 3.0), "c": ("broken", 3.5)}, 0.5, "b", 3),
        ({"a": (None, 9.0)}, None, "a", 1),
    ],
)
def test_the_ladder_goes_on_while_it_must_or_improves(
    outcomes: dict[str, tuple[str | None, float]], budget: float | None, chosen: str, tried: int
) -> None:
    found = search(RECIPES, Made((), outcomes=outcomes), budget)
    assert found.chosen.recipe.name == chosen
    assert len(found.tried) == tried
    assert found.cut is None


def test_two_rungs_that_are_no_better_lead_to_mixes() -> None:
    recipes = [Recipe(name) for name in "abcde"]
    drops = {"a": 9.0, "b": 5.0, "c": 6.0, "d": 5.5, "e": 1.0}
    made = Made([4.0, 0.1, 0.1], outcomes={name: ("broken", drop) for name, drop in drops.items()})
    found = search(recipes, made, 0.5, mixes=True)
    assert [one.recipe.name for one in found.tried[:4]] == ["a", "b", "c", "d"]
    assert found.chosen.recipe.name == "float [0]"
    assert len(search(recipes, made, 0.5).tried) == 5


def test_few_cheap_layers_go_to_float_before_other_recipes_are_tried() -> None:
    outcomes = {"a": ("broken", 9.0), "b": ("kept", 0.1)}
    found = search(RECIPES, Made([9.0, 0.1, 0.1], outcomes=outcomes, spot=[0]), 0.5, mixes=True)
    assert [one.recipe.name for one in found.tried] == ["a", "float [0]"]
    assert found.chosen.recipe.name == "float [0]"
    missed = search(RECIPES, Made([9.0, 0.1, 0.1], outcomes=outcomes, spot=[1]), 0.5, mixes=True)
    assert [one.recipe.name for one in missed.tried] == ["a", "float [1]", "b"]
    assert search(RECIPES, Made([9.0], outcomes=outcomes, spot=[0]), 0.5).chosen.recipe.name == "b"


def test_equal_drops_are_told_apart_by_sqnr() -> None:
    ranks = [rung(Recipe("x"), "broken", 0.9, sqnr).rank(0.5) for sqnr in (10.0, 30.0, 20.0)]
    assert max(ranks) == ranks[1]


@given(st.lists(st.floats(0.01, 3.0), min_size=2, max_size=80), st.floats(0.05, 5.0))
def test_bisection_finds_the_first_mix_that_fits_in_about_log2_evaluations(
    drops: list[float], budget: float
) -> None:
    made = Made(drops, width=0.0, budget=budget)
    found = search(RECIPES[:1], made, budget, mixes=True)
    total = sum(drops)
    if total <= budget:
        assert len(found.tried) == 1
        return
    mixes, _ = made.mixed(found.tried[0])
    assert len(found.tried) <= 1 + math.ceil(math.log2(len(mixes) + 1)) + 2 + EXCHANGES
    first = next((mix for mix in mixes if made.attempt(mix.recipe, early=False).fits(budget)), None)
    if first:
        assert found.chosen.fits(budget)
        assert found.chosen.ms is not None
        assert found.chosen.ms <= first.ms


def test_a_planted_layer_is_the_only_one_left_in_float() -> None:
    drops = [0.01] * 40
    drops[17] = 30.0
    found = search(RECIPES[:1], Made(drops), 0.5, mixes=True)
    assert found.chosen.recipe.steps[-1].parameters["exclude"] == [17]


def test_the_errors_that_are_left_tell_where_to_look_first() -> None:
    drops = [0.001] * 200
    for layer in (3, 50, 120):
        drops[layer] = 9.0
    found = search(RECIPES[:1], Made(drops, noise=0.01), 0.5, mixes=True)
    assert set(found.chosen.recipe.steps[-1].parameters["exclude"]) == {3, 50, 120}
    assert len(found.tried) == 3


def test_the_exchange_gives_a_needless_layer_back() -> None:
    made = Made([5.0, 0.3, 3.0, 0.0], costs=[1.0, 0.05, 1.0, 9.0], width=0.0)
    found = search(RECIPES[:1], made, 0.5, mixes=True)
    assert set(found.chosen.recipe.steps[-1].parameters["exclude"]) == {0, 2}
    assert found.chosen.fits(0.5)


def test_without_mixes_nothing_is_left_in_float() -> None:
    found = search(RECIPES, Made([3.0, 3.0]), 0.5)
    assert [one.recipe.name for one in found.tried] == ["a", "b", "c"]


def test_a_faster_mix_is_taken_when_it_is_measured_to_be_faster() -> None:
    def made(speed: float) -> Made:
        lab = Made([0.1, 0.1], costs=[-5.0, 1.0], speeds={"a": 1.5, "float [0]": speed})
        lab.mixed = lambda base: ([lab.mix([0])], 10.0)  # type: ignore[method-assign]
        return lab

    for budget in (0.5, None):
        assert (
            search(RECIPES[:1], made(1.7), budget, mixes=True, timed=True).chosen.recipe.name == "float [0]"
        )
        for speed in (1.4, 1.55):  # slower, and faster by less than the noise
            found = search(RECIPES[:1], made(speed), budget, mixes=True, timed=True)
            assert found.chosen.recipe.name == "a"
            assert [one.speed for one in found.tried] == [1.5, speed]
    lab = made(1.7)
    assert len(search(RECIPES[:1], lab, 0.5, mixes=True, timed=False).tried) == 1
    assert not lab.raced


def test_a_faster_mix_does_not_take_the_place_of_a_proven_engine_unproven() -> None:
    outcomes: dict[str, tuple[str | None, float]] = {"a": ("kept", 0.1), "float [0]": ("undecided", 0.1)}
    lab = Made([0.1, 0.1], costs=[-5.0, 1.0], speeds={"a": 1.5, "float [0]": 1.9}, outcomes=outcomes)
    lab.mixed = lambda base: ([lab.mix([0])], 10.0)  # type: ignore[method-assign]
    assert search(RECIPES[:1], lab, 0.5, mixes=True, timed=True).chosen.recipe.name == "a"


def test_a_candidate_that_was_rejected_early_is_judged_whole_before_it_is_delivered() -> None:
    made = Made([3.0, 3.0], partial=True)
    found = search(RECIPES[:2], made, 0.5)
    assert not found.chosen.partial
    assert [one.partial for one in found.tried] == [False, True]
    assert made.count == 3


def test_the_time_budget_cuts_after_the_first_candidate() -> None:
    made = Made([1.0] * 30)
    clock = iter(range(100))
    found = search(RECIPES[:1], made, 0.5, mixes=True, out_of_time=lambda: next(clock) >= 2)
    assert found.cut == "budget"
    assert len(found.tried) == 3
    assert found.chosen is max(found.tried, key=lambda one: one.rank(0.5))
    late = search(RECIPES[:1], made, 0.5, mixes=True, out_of_time=lambda: True)
    assert len(late.tried) == 1


@pytest.mark.parametrize("at", [2, 3, 4])
def test_an_interrupt_gives_the_best_so_far(at: int) -> None:
    found = search(RECIPES[:1], Made([1.0] * 30, interrupt_at=at), 0.5, mixes=True)
    assert found.cut == "interrupt"
    assert len(found.tried) == at - 1
    assert not found.chosen.partial


def test_an_interrupt_before_any_candidate_ends_the_search() -> None:
    with pytest.raises(KeyboardInterrupt):
        search(RECIPES, Made([1.0], interrupt_at=1), 0.5)


def test_an_interrupt_after_early_rejections_alone_gives_the_best_of_them_judged_whole() -> None:
    found = search(RECIPES, Made([3.0], partial=True, interrupt_at=3), 0.5)
    assert found.cut == "interrupt"
    assert [one.partial for one in found.tried] == [False, True]
    assert found.chosen is found.tried[0]
    assert found.chosen.verdict == "broken"
