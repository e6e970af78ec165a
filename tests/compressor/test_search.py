import pytest

from compressor.recipe import Recipe
from compressor.search import Rung, climb


def rung(recipe: Recipe, verdict: str | None, drop: float, sqnr: float = 20.0) -> Rung:
    comparison = {"drop": {"value": drop, "verdict": verdict}, "agreement": {"sqnr_db": sqnr}}
    return Rung(recipe, comparison, None, 1.0)


RECIPES = (Recipe("a"), Recipe("b"), Recipe("c"))


@pytest.mark.parametrize(
    ("outcomes", "budget", "chosen", "tried"),
    [
        ({"a": ("kept", 0.1)}, 0.5, "a", 1),
        ({"a": ("broken", 2.0), "b": ("kept", 0.2)}, 0.5, "b", 2),
        ({"a": ("undecided", 0.4), "b": ("broken", 3.0), "c": ("broken", 1.0)}, 0.5, "a", 3),
        ({"a": ("broken", 4.0), "b": ("broken", 3.0), "c": ("broken", 3.5)}, 0.5, "b", 3),
        ({"a": (None, 9.0)}, None, "a", 1),
    ],
)
def test_the_cheapest_rung_that_keeps_the_budget_is_chosen(
    outcomes: dict[str, tuple[str | None, float]], budget: float | None, chosen: str, tried: int
) -> None:
    best, all_tried = climb(RECIPES, lambda recipe: rung(recipe, *outcomes[recipe.name]), budget)
    assert best.recipe.name == chosen
    assert len(all_tried) == tried


def test_equal_drops_are_told_apart_by_sqnr() -> None:
    sqnr = {"a": 10.0, "b": 30.0, "c": 20.0}
    best, _ = climb(RECIPES, lambda recipe: rung(recipe, "undecided", 0.5, sqnr[recipe.name]), 0.4)
    assert best.recipe.name == "b"
