"""Order, budget and warm-up, on calls whose duration is known."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest

from serving.bench.interleave import Calls, Measured, interleave


class Lanes:
    """Lanes that sleep for given times and remember what was called when."""

    def __init__(self, *seconds: float) -> None:
        self.log: list[int] = []
        self.opened: list[int] = []
        self.lanes = [self.lane(number, duration) for number, duration in enumerate(seconds)]

    def lane(self, number: int, duration: float) -> Callable[[], Calls]:
        def call() -> None:
            self.log.append(number)
            time.sleep(duration)

        def opened() -> Calls:
            self.opened.append(number)
            return [call]

        return opened

    def measure(self, seconds: float) -> tuple[Measured, float]:
        begin = time.perf_counter()
        found = interleave(self.lanes, seconds, np.random.default_rng(0), lambda passed: None)
        return found, time.perf_counter() - begin


@pytest.mark.parametrize("duration", [0.00002, 0.002, 0.06])
def test_the_time_is_kept_whatever_a_call_takes(duration: float) -> None:
    found, took = Lanes(duration, duration, duration).measure(2.0)
    assert 1.4 <= took <= 2.6
    assert found.control
    assert len(found.clusters) >= 2


def test_every_lane_is_timed_equally_often_and_there_and_back() -> None:
    lanes = Lanes(0.02, 0.02, 0.02)
    found, _ = lanes.measure(1.5)
    for cluster in found.clusters:
        assert len({len(cluster.blocks[lane]) for lane in range(3)}) == 1
    assert lanes.opened.count(0) == lanes.opened.count(2) == len(found.clusters)
    blocks = [lane for at, lane in enumerate(lanes.log) if at == 0 or lane != lanes.log[at - 1]]
    assert any(blocks[at : at + 5] == blocks[at : at + 5][::-1] for at in range(len(blocks) - 4))


def test_times_are_those_of_the_calls() -> None:
    found, _ = Lanes(0.02, 0.01, 0.02).measure(2.0)
    times = {lane: np.concatenate([b for c in found.clusters for b in c.blocks[lane]]) for lane in range(3)}
    assert np.median(times[0]) == pytest.approx(20e6, rel=0.1)
    assert np.median(times[1]) == pytest.approx(10e6, rel=0.1)
    assert found.clusters[0].cpu[0] < 0.5 * sum(block.sum() for block in found.clusters[0].blocks[0])


def test_too_little_time_leaves_the_control_out_and_times_every_engine_once() -> None:
    found, took = Lanes(0.3, 0.3, 0.3).measure(1.0)
    assert not found.control
    assert len(found.clusters) == 1
    assert sorted(found.clusters[0].blocks) == [0, 1]
    assert took < 1.6


def test_warm_up_waits_until_calls_no_longer_get_faster() -> None:
    """The first quarter of a second is slow; none of it must be in what is timed."""
    begin = time.perf_counter()

    def call() -> None:
        time.sleep(0.02 if time.perf_counter() - begin < 0.25 else 0.001)

    found = interleave([lambda: [call]] * 2, 3.0, np.random.default_rng(0), lambda passed: None)
    first = found.clusters[0].blocks
    assert np.median(first[0][0]) < 15e6
    assert np.median(first[1][0]) < 15e6


def test_garbage_collection_is_off_while_timing_and_on_afterwards() -> None:
    states = []
    interleave(
        [lambda: [lambda: states.append(gc.isenabled())]] * 2,
        0.5,
        np.random.default_rng(0),
        lambda passed: None,
    )
    assert False in states
    assert gc.isenabled()
