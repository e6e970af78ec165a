"""The ladder: recipes tried from the cheapest up, until one keeps the accuracy budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.recipe import Recipe

__all__ = ["Rung", "climb"]


@dataclass(frozen=True)
class Rung:
    """A recipe that was tried: its comparison with the baseline, and what the pipeline keeps of it.

    `comparison` has "drop" ({"value", "verdict", ...} or None) and "agreement" ({"sqnr_db", ...}).
    """

    recipe: Recipe
    comparison: dict[str, Any]
    engine: Any
    seconds: float

    @property
    def verdict(self) -> str | None:
        """`kept`, `broken`, `undecided`, or None without a budget or labels."""
        drop = self.comparison.get("drop") or {}
        return drop.get("verdict")

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Larger is better: budget not broken, then small drop, then high SQNR."""
        drop = self.comparison.get("drop") or {}
        sqnr = (self.comparison.get("agreement") or {}).get("sqnr_db") or 0.0
        return (self.verdict != "broken", -drop.get("value", 0.0), sqnr)


def climb(
    recipes: Sequence[Recipe], attempt: Callable[[Recipe], Rung], max_drop: float | None
) -> tuple[Rung, list[Rung]]:
    """Try `recipes` in turn; the first whose drop is known to be kept is chosen.

    Without a budget the first one is taken. If none is kept, the best of them is chosen: one whose drop
    is undecided before one that is broken, then the smaller drop, then the higher SQNR.
    """
    tried: list[Rung] = []
    for recipe in recipes:
        rung = attempt(recipe)
        tried.append(rung)
        if max_drop is None or rung.verdict in ("kept", None):
            return rung, tried
    return max(tried, key=lambda rung: rung.rank), tried
