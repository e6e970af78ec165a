"""Order, budget and warm-up, on calls whose duration is known: a clock of the tests goes on with them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from serving.bench import interleave as module
from serving.bench.interleave import Calls, Measured, interleave

OPENING = 0.01


class Clock:
    """Stands still unless something takes time; a quarter of that time is the processor's."""

    def __init__(self) -> None:
        self.now = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)

    def process_time_ns(self) -> int:
        return round(self.now * 1e9 / 4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class Lanes:
    """Lanes that take given times and remember what was called when; opening one takes 10 ms."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.clock = clock
        self.log: list[int] = []
        self.opened: list[int] = []
        self.lanes = [self.lane(number, duration) for number, duration in enumerate(seconds)]

    def lane(self, number: int, duration: float) -> Callable[[], Calls]:
        def call() -> None:
            self.log.append(number)
            self.clock.spend(duration)

        def opened() -> Calls:
            self.opened.append(number)
            self.clock.spend(OPENING)
            return [call]

        return opened

    def measure(self, seconds: float) -> tuple[Measured, float]:
        begin = self.clock.now
        found = interleave(self.lanes, seconds, np.random.default_rng(0), lambda passed: None)
        return found, self.clock.now - begin


@pytest.mark.parametrize("duration", [0.00002, 0.002, 0.06])
def test_the_time_is_kept_whatever_a_call_takes(clock: Clock, duration: float) -> None:
    found, took = Lanes(clock, duration, duration, duration).measure(2.0)
    assert 1.4 <= took <= 2.6
    assert found.control
    assert len(found.clusters) >= 2


def test_every_lane_is_timed_equally_often_and_there_and_back(clock: Clock) -> None:
    lanes = Lanes(clock, 0.02, 0.02, 0.02)
    found, _ = lanes.measure(1.5)
    for cluster in found.clusters:
        assert len({len(cluster.blocks[lane]) for lane in range(3)}) == 1
    assert lanes.opened.count(0) == lanes.opened.count(2) == len(found.clusters)
    blocks = [lane for at, lane in enumerate(lanes.log) if at == 0 or lane != lanes.log[at - 1]]
    assert any(blocks[at : at + 5] == blocks[at : at + 5][::-1] for at in range(len(blocks) - 4))


def test_times_are_those_of_the_calls(clock: Clock) -> None:
    found, _ = Lanes(clock, 0.02, 0.01, 0.02).measure(2.0)
    for lane, nanoseconds in enumerate((20e6, 10e6, 20e6)):
        for cluster in found.clusters:
            times = np.concatenate(cluster.blocks[lane])
            np.testing.assert_allclose(times, nanoseconds, rtol=1e-6)
            assert cluster.cpu[lane] == pytest.approx(times.sum() / 4, rel=1e-6)


def test_too_little_time_leaves_the_control_out_and_times_every_engine_once(clock: Clock) -> None:
    found, took = Lanes(clock, 0.3, 0.3, 0.3).measure(1.0)
    assert not found.control
    assert len(found.clusters) == 1
    assert sorted(found.clusters[0].blocks) == [0, 1]
    assert took < 1.6


def test_warm_up_waits_until_calls_no_longer_get_faster(clock: Clock) -> None:
    """The first quarter of a second is slow; none of it must be in what is timed."""

    def call() -> None:
        clock.spend(0.02 if clock.now < 0.25 else 0.001)

    found = interleave([lambda: [call]] * 2, 3.0, np.random.default_rng(0), lambda passed: None)
    for blocks in found.clusters[0].blocks.values():
        np.testing.assert_allclose(np.concatenate(blocks), 1e6, rtol=1e-6)


def test_garbage_collection_is_off_while_timing_and_on_afterwards(clock: Clock) -> None:
    states = []

    def call() -> None:
        states.append(gc.isenabled())
        clock.spend(0.001)

    interleave([lambda: [call]] * 2, 0.5, np.random.default_rng(0), lambda passed: None)
    assert False in states
    assert gc.isenabled()
