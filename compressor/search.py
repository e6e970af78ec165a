"""The search for the fastest engine that keeps the accuracy budget, with as few evaluations as it takes.

First the ladder of recipes that quantize everything. Where a few layers that cost next to nothing make the
error of the first one, these go back to float at once. Where no recipe keeps the budget, more layers do:
`Laboratory.mixed` ranks sets of them by the error that they remove for the time that they cost, each inside
the next, and bisection finds the first that is enough (about log2 of their number evaluations); then single
layers are given back to the integers. Every candidate is judged by the paired comparison on the engine
itself. The search can be cut at any moment; the best so far is its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from compressor.recipe import Recipe

__all__ = ["Found", "Laboratory", "Mix", "Rung", "search"]

Cut = Literal["budget", "interrupt"]
EXCHANGES = 3
MISSES = 2
BETTER = 0.8  # a rung whose drop is at most that share of the best one's is progress
CHEAP = 0.05  # share of the compute that may go to float before other recipes are tried
HARMLESS = 0.01  # an error of 20 dB below the signal seldom changes an answer
WORTH = 0.98  # a faster engine is tried if it is expected to take at most this share of the time


@dataclass(frozen=True)
class Rung:
    """A recipe that was tried: its comparison with the baseline, and what the pipeline keeps of it.

    `comparison` has "drop" ({"value", "verdict", ...} or None) and "agreement" ({"sqnr_db", ...}).
    `partial`: judged on a subset of the samples only, which was enough to reject it. `ms` is the time to
    expect of the engine from profiles, `speed` its measured speed against the float engine; `unsure`: it may
    only seem faster than the engine that it was to be faster than.
    """

    recipe: Recipe
    comparison: dict[str, Any]
    engine: Any
    seconds: float
    partial: bool = False
    ms: float | None = None
    speed: float | None = None
    unsure: bool = False

    @property
    def drop(self) -> dict[str, Any]:
        """The paired drop, empty where there is none."""
        return self.comparison.get("drop") or {}

    @property
    def verdict(self) -> str | None:
        """`kept`, `broken`, `undecided`, or None without a budget or labels."""
        return self.drop.get("verdict")

    def fits(self, max_drop: float | None) -> bool:
        """Whether the budget is kept, or not known to be broken with an estimate inside it."""
        if max_drop is None or self.verdict is None:
            return True
        return self.verdict == "kept" or (self.verdict == "undecided" and self.drop["value"] <= max_drop)

    def rank(self, max_drop: float | None) -> tuple[float, ...]:
        """Larger is better: inside the budget, proven, surely fast, not broken, small drop, high SQNR."""
        sqnr = (self.comparison.get("agreement") or {}).get("sqnr_db") or 0.0
        fits, kept = self.fits(max_drop), self.verdict == "kept"
        fast = (self.speed or 0.0, -(self.ms or 0.0)) if fits else (0.0, 0.0)
        return (
            fits,
            kept,
            not self.unsure,
            *fast,
            self.verdict != "broken",
            -self.drop.get("value", 0.0),
            sqnr,
        )


@dataclass(frozen=True)
class Mix:
    """A recipe that leaves layers in float, and what to expect of its engine.

    `ms` is its time (None: not known), `error` the noise power of the outputs over their signal power (0: not
    known).
    """

    recipe: Recipe
    ms: float | None
    error: float = 0.0


class Laboratory(Protocol):
    """Makes and measures candidates."""

    def attempt(self, recipe: Recipe, ms: float | None = None, *, early: bool) -> Rung:
        """Make an engine and judge it; `early`: reject it on a subset if that is enough."""

    def few(self, rung: Rung) -> Mix | None:
        """The mix that leaves few layers in float and should do, if it costs next to nothing."""

    def mixed(self, rung: Rung) -> tuple[list[Mix], float]:
        """Nested mixes of a rung's recipe, the fastest first, and the time of the rung itself (ms)."""

    def reduced(self, rung: Rung) -> list[Mix]:
        """Mixes with one layer less in float that should be faster, the most promising first."""

    def race(self, rungs: Sequence[Rung]) -> list[tuple[float, float]]:
        """Measured speeds of engines against the float engine, and the lower ends of their intervals."""


@dataclass(frozen=True)
class Found:
    """The chosen rung, all that were tried in order, and what cut the search short."""

    chosen: Rung
    tried: list[Rung]
    cut: Cut | None = None


class _Cut(Exception):  # noqa: N818 - a signal, not an error
    """The time is used up."""


def search(
    recipes: Sequence[Recipe],
    laboratory: Laboratory,
    max_drop: float | None,
    *,
    mixes: bool = False,
    timed: bool = False,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Found:
    """Climb `recipes` from the cheapest up, then mix in float where that is needed or pays.

    Without a budget the first recipe is taken. `mixes`: layers may stay float. `timed`: speed counts, so a
    mix that is expected to be faster is tried as well. The search ends when `out_of_time` says so or when it
    is interrupted, if there is a candidate by then; a first candidate is always finished.
    """
    return _Search(recipes, laboratory, max_drop, mixes, timed, out_of_time).run()


@dataclass
class _Search:
    recipes: Sequence[Recipe]
    laboratory: Laboratory
    max_drop: float | None
    mixes: bool
    timed: bool
    out_of_time: Callable[[], bool]
    tried: list[Rung] = field(default_factory=list)

    def run(self) -> Found:
        cut: Cut | None = None
        try:
            self._climb()
            if self.mixes:
                self._mix()
        except _Cut:
            cut = "budget"
        except KeyboardInterrupt:
            if not self.tried:
                raise
            cut = "interrupt"
        return Found(self._complete(cut), self.tried, cut)

    def _attempt(self, recipe: Recipe, ms: float | None = None, *, doubtful: bool = True) -> Rung:
        if self.tried and self.out_of_time():
            raise _Cut
        rung = self.laboratory.attempt(recipe, ms, early=doubtful and self.max_drop is not None)
        self.tried.append(rung)
        return rung

    def _best(self) -> Rung:
        return max(self.tried, key=lambda rung: rung.rank(self.max_drop))

    def _complete(self, cut: Cut | None) -> Rung:
        """The best rung, judged on all samples; once interrupted, one that is judged already, if any is."""
        best = self._best()
        whole = [rung for rung in self.tried if not rung.partial]
        if best.partial and cut == "interrupt" and whole:
            return max(whole, key=lambda rung: rung.rank(self.max_drop))
        if best.partial:
            self.tried[self.tried.index(best)] = best = self.laboratory.attempt(
                best.recipe, best.ms, early=False
            )
        return best

    def _climb(self) -> None:
        """Go on until one is kept, or one is inside the budget and the next is no better.

        Where layers may stay float instead, two that are hardly better than the best are enough.
        """
        missed = 0
        for recipe in self.recipes:
            before = self._best() if self.tried else None
            rung = self._attempt(recipe)
            if self.max_drop is None or rung.verdict in ("kept", None):
                return
            if before is None:
                if self._spot(rung):
                    return
                continue
            better = self._best() is rung
            if before.fits(self.max_drop) and not better:
                return
            least = BETTER * before.drop["value"]
            missed = (
                0 if better and (rung.verdict != before.verdict or rung.drop["value"] < least) else missed + 1
            )
            if self.mixes and missed >= MISSES:
                return

    def _spot(self, rung: Rung) -> bool:
        """Whether leaving a few cheap layers in float mends the first rung."""
        mix = self.laboratory.few(rung) if self.mixes and not rung.fits(self.max_drop) else None
        return bool(mix and self._attempt(mix.recipe, mix.ms, doubtful=False).fits(self.max_drop))

    def _mix(self) -> None:
        """Layers in float: as many as the budget takes; otherwise those that are slower in integers."""
        base = self._best()
        fits = base.fits(self.max_drop)
        if fits and not self.timed:
            return
        mixes, ms = self.laboratory.mixed(base)
        if ms:
            self.tried = [replace(rung, ms=ms) for rung in self.tried]
            base = self._best()
        mixes = [mix for mix in mixes if mix.recipe.steps != base.recipe.steps]
        if fits:
            self._faster(base, mixes, ms)
        elif mixes:
            self._bisect(mixes)

    def _faster(self, base: Rung, mixes: list[Mix], ms: float) -> None:
        if mixes and (mixes[0].ms or ms) <= WORTH * ms:
            rung = self._attempt(mixes[0].recipe, mixes[0].ms)
            if rung.fits(self.max_drop):
                self._race(base, rung)

    def _race(self, base: Rung, mix: Rung) -> None:
        """Measure both; layers go to float only where that is faster beyond the noise."""
        (speed, _), (other, least) = self.laboratory.race([base, mix])
        self.tried[self.tried.index(base)] = replace(base, speed=speed)
        self.tried[self.tried.index(mix)] = replace(mix, speed=other, unsure=least <= speed)

    def _bisect(self, mixes: list[Mix]) -> None:
        """The first mix inside the budget: drops are taken to fall along the ranking.

        It is looked for first where the error that is left becomes small, then right before that.
        """
        low, high = 0, len(mixes)
        found: Rung | None = None
        failed = float("inf")
        guess = next((at for at, mix in enumerate(mixes) if mix.error <= HARMLESS), high // 2)
        guesses = [guess, guess - 1]
        while low < high:
            middle = guesses.pop(0) if guesses else (low + high) // 2
            if not low <= middle < high:
                continue
            mix = mixes[middle]
            rung = self._attempt(mix.recipe, mix.ms, doubtful=not 0 < mix.error <= HARMLESS)
            if rung.fits(self.max_drop):
                high, found = middle, rung
            else:
                low, failed = middle + 1, mixes[middle].error
        if found:
            self._exchange(found, failed)

    def _exchange(self, found: Rung, failed: float) -> None:
        """Give single layers back to the integers while the budget takes it.

        Mixes that should err more than half as much as one that `failed` are left out.
        """
        left = EXCHANGES
        while left:
            mixes = [mix for mix in self.laboratory.reduced(found) if mix.error < failed / 2 or not mix.error]
            for mix in mixes[:left]:
                left -= 1
                rung = self._attempt(mix.recipe, mix.ms)
                if rung.fits(self.max_drop):
                    found = rung
                    break
                failed = min(failed, mix.error or failed)
            else:
                return
