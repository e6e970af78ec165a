"""Engines timed in turns: short blocks in the order A B B A, in sessions opened anew again and again.

Every engine has a *lane*; the baseline has two, of which the second is the A/A control. A pass runs one
block in each lane and the next pass goes back the same way, so that a drift of the machine cancels; then
the order is drawn anew, so that no lane keeps a better place.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIRST_WARM_UP", "Calls", "Cluster", "Lane", "Measured", "interleave", "warm_up"]

Calls = list[Callable[[], Any]]
"""One call for each of several inputs, to be made in rotation."""

_BLOCK = 0.008
_REFILL = 0.05
"""A call shorter than this is made once, untimed, at the start of a block: it finds the caches full of
another engine's data, which a deployed engine does not. In a longer call that is lost in the whole."""
_MAX_CLUSTERS = 32
_WANTED_CLUSTERS = 8
FIRST_WARM_UP = (0.2, 10)
"""Seconds, and calls."""
_LATER_WARM_UP = (0.02, 2)
_LONGEST_WARM_UP = 2.0


@dataclass
class Cluster:
    """Times with one set of fresh sessions: per lane its blocks in order (ns), and its CPU time (ns)."""

    blocks: dict[int, list[NDArray[np.float64]]] = field(default_factory=dict)
    cpu: dict[int, int] = field(default_factory=dict)

    def add(self, lane: int, times: list[int], cpu: int) -> None:
        """Keep one block."""
        self.blocks.setdefault(lane, []).append(np.array(times, np.float64))
        self.cpu[lane] = self.cpu.get(lane, 0) + cpu


@dataclass(frozen=True)
class Measured:
    """All clusters; `control` says whether there was time for the A/A control."""

    clusters: list[Cluster]
    control: bool


@dataclass
class Lane:
    """An open session: its calls in endless rotation, and how long one takes (s)."""

    number: int
    calls: Iterator[Callable[[], Any]]
    cost: float = 0.0

    @property
    def block(self) -> float:
        """What a block takes, the untimed call included (s)."""
        return max(_BLOCK, self.cost) + (self.cost if self.cost < _REFILL else 0.0)


def interleave(
    lanes: list[Callable[[], Calls]],
    seconds: float,
    rng: np.random.Generator,
    on_progress: Callable[[float], None],
) -> Measured:
    """Time the lanes for about `seconds`. Lane 0 is the baseline, the last one its control.

    A lane opens a fresh session and gives its calls. Sessions are opened anew as often as the time
    allows, up to 32 times. One call in every lane is timed even if `seconds` is too short for it; then
    the control is left out. `on_progress` hears the seconds that have passed.
    """
    started = time.perf_counter()
    deadline = started + seconds
    opened, opening = _open(lanes, range(len(lanes)), rng)
    opened.sort(key=lambda lane: lane.number)
    control = not _too_slow(opened, deadline)
    if not control:
        del opened[-1]
    for lane in opened:
        warm_up(lane, *FIRST_WARM_UP, at_most=0.1 * seconds / len(opened))
    opening += sum(_later_warm_up(lane.cost) for lane in opened)
    clusters: list[Cluster] = []
    while True:
        remaining = deadline - time.perf_counter()
        more = _clusters_that_fit(remaining, opening, opened, _MAX_CLUSTERS - len(clusters))
        until = time.perf_counter() + (remaining - (more - 1) * opening) / more
        clusters.append(_measure(opened, until, rng))
        on_progress(time.perf_counter() - started)
        if more == 1:
            return Measured(clusters, control)
        numbers = [lane.number for lane in opened]
        opened.clear()
        gc.collect()
        opened, opening = _reopen(lanes, numbers, rng)


def _open(
    lanes: list[Callable[[], Calls]], numbers: Sequence[int], rng: np.random.Generator
) -> tuple[list[Lane], float]:
    """Open sessions in random order; gives them, in that order, and the seconds it took.

    They are warmed up in the same order: with two threads, the one that always came first was 1.5 %
    faster than an identical one that always came last.
    """
    begin = time.perf_counter()
    opened = [Lane(int(number), cycle(lanes[number]())) for number in rng.permutation(list(numbers))]
    return opened, time.perf_counter() - begin


def _reopen(
    lanes: list[Callable[[], Calls]], numbers: list[int], rng: np.random.Generator
) -> tuple[list[Lane], float]:
    begin = time.perf_counter()
    opened, _ = _open(lanes, numbers, rng)
    for lane in opened:
        warm_up(lane, *_LATER_WARM_UP, at_most=_LONGEST_WARM_UP)
    return opened, time.perf_counter() - begin


def _too_slow(opened: list[Lane], deadline: float) -> bool:
    """Make the first call in every lane; whether there is no time for a second one in all of them."""
    for lane in opened[:-1]:
        lane.cost = _call(lane)
    spent = sum(lane.cost for lane in opened)
    if time.perf_counter() + 2 * opened[0].cost + spent > deadline:
        return True
    opened[-1].cost = _call(opened[-1])
    return False


def _call(lane: Lane) -> float:
    begin = time.perf_counter()
    next(lane.calls)()
    return time.perf_counter() - begin


def warm_up(lane: Lane, floor: float, calls: int, *, at_most: float) -> None:
    """Run until the median of a block no longer falls, for `floor` seconds and `calls` calls at least.

    No call is begun that would take it past `at_most` seconds, but one is made if none was before.
    Leaves the time of a call in `lane.cost`.
    """
    begin, made, best = time.perf_counter(), 0, float("inf")
    while not lane.cost or time.perf_counter() - begin + lane.cost < at_most:
        times = [_call(lane) for _ in range(max(1, int(0.1 * floor / lane.cost) if lane.cost else 1))]
        made += len(times)
        lane.cost = float(np.median(times))
        if made >= calls and time.perf_counter() - begin >= floor and lane.cost > 0.98 * best:
            return
        best = min(best, lane.cost)


def _later_warm_up(cost: float) -> float:
    floor, calls = _LATER_WARM_UP
    return max(floor, min(calls * cost, _LONGEST_WARM_UP), cost)


def _clusters_that_fit(remaining: float, opening: float, opened: list[Lane], most: int) -> int:
    """How many clusters, the open one included, leave each at least as long for timing as for opening.

    If these are few, more of them are worth more than many passes in each.
    """
    one_pass = sum(lane.block for lane in opened)
    fit = int((remaining + opening) / (opening + max(opening, one_pass)))
    if fit < _WANTED_CLUSTERS:
        fit = min(_WANTED_CLUSTERS, int((remaining + opening) / (opening + one_pass)))
    return max(1, min(most, fit))


def _measure(opened: list[Lane], until: float, rng: np.random.Generator) -> Cluster:
    """Passes there and back until the time is over; at least one pass."""
    cluster = Cluster()
    pass_cost = sum(lane.block for lane in opened)
    with _no_garbage_collection():
        while True:
            there = [opened[at] for at in rng.permutation(len(opened))]
            for order in (there, there[::-1]):
                for lane in order:
                    _block(lane, cluster)
                if time.perf_counter() + pass_cost > until:
                    return cluster


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _block(lane: Lane, cluster: Cluster) -> None:
    """Make one block's calls, each timed by the wall clock, all together by the CPU clock.

    Their number is fixed beforehand: a block that ended by the clock would hold few calls just when
    the machine is busy with something else.
    """
    clock, times = time.perf_counter_ns, []
    if lane.cost < _REFILL:
        next(lane.calls)()
    cpu = time.process_time_ns()
    for _ in range(max(1, round(_BLOCK / lane.cost))):
        call = next(lane.calls)
        begin = clock()
        call()
        times.append(clock() - begin)
    cluster.add(lane.number, times, time.process_time_ns() - cpu)
