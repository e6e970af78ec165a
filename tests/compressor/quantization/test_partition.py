"""Minimum cuts and the chain of choices, against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.quantization.minimum_cut import Network
from compressor.quantization.partition import Node, Problem, chain, costs


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 9)), max_size=25))
def test_the_cut_is_the_smallest_of_all(edges: list[tuple[int, int, int]]) -> None:
    network = Network()
    for _ in range(5):
        network.node()
    for start, end, capacity in edges:
        network.edge(start, end, capacity)

    def cut(side: set[int]) -> int:
        return sum(capacity for start, end, capacity in edges if start in side and end not in side)

    inner = range(2, 7)
    every = [{0, *some} for size in range(6) for some in itertools.combinations(inner, size)]
    found = network.source_side()
    assert 0 in found
    assert 1 not in found
    assert cut(found) == min(map(cut, every))
    assert len(found) == min(len(side) for side in every if cut(side) == cut(found))


TIMES = st.floats(0.0, 4.0).map(lambda value: round(value, 2))
ERRORS = st.floats(0.0, 2.0).map(lambda value: round(value, 2))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A chain of layers with one skipping connection, all of which may be integers."""
    count = draw(st.integers(2, 6))
    skip = draw(st.integers(0, count - 1))
    nodes = []
    for layer in range(count):
        inputs = [f"t{layer}", *([f"t{skip}"] if layer == count - 1 and skip < layer else [])]
        nodes.append(
            Node(f"n{layer}", tuple(inputs), (f"t{layer + 1}",), draw(TIMES), draw(TIMES), draw(ERRORS))
        )
    conversion = {f"t{layer}": draw(TIMES) for layer in range(count + 1)}
    error = {f"t{layer}": draw(ERRORS) for layer in range(count + 1)}
    return Problem(nodes, conversion, error, frozenset({f"t{count}"}))


@settings(max_examples=60)
@given(problems())
def test_the_chain_begins_with_the_fastest_and_never_wastes_time(problem: Problem) -> None:
    names = [node.name for node in problem.nodes]
    every = [some for size in range(len(names) + 1) for some in itertools.combinations(names, size)]
    choices = chain(problem)
    assert choices[0].ms == pytest.approx(min(costs(problem, some)[0] for some in every))
    assert choices[-1].exclude == tuple(names)
    for one, other in itertools.pairwise(choices):
        assert set(one.exclude) < set(other.exclude)
        assert one.ms < other.ms
        assert one.error >= other.error - 1e-9
    for choice in choices:
        assert costs(problem, choice.exclude) == pytest.approx((choice.ms, choice.error))


def layers(count: int, bad: int) -> Problem:
    """Layers that are twice as fast in integers; the weight of one brings in nearly all of the error."""
    nodes = [
        Node(f"n{layer}", (f"t{layer}",), (f"t{layer + 1}",), 2.0, 1.0, 100.0 if layer == bad else 0.1)
        for layer in range(count)
    ]
    tensors = [f"t{layer}" for layer in range(count + 1)]
    return Problem(nodes, dict.fromkeys(tensors, 0.3), dict.fromkeys(tensors, 0.05), frozenset(tensors[-1:]))


def test_the_layer_with_the_error_goes_first() -> None:
    choices = chain(layers(40, 17))
    assert choices[0].exclude == ()
    assert choices[1].exclude == ("n17",)
    assert choices[1].ms == pytest.approx(40 + 0.3 + 0.3 + 1 + 0.6)


def test_the_error_of_an_activation_needs_both_its_neighbours() -> None:
    problem = layers(10, 99)
    problem = Problem(problem.nodes, problem.conversion, {"t4": 50.0}, problem.outputs)
    assert chain(problem)[1].exclude in (("n3", "n4"), ("n3",), ("n4",))
    both = next(choice for choice in chain(problem) if {"n3", "n4"} <= set(choice.exclude))
    assert both.error == pytest.approx(0.8)
    assert len(both.exclude) == 2


def test_layers_that_are_slower_in_integers_are_float_at_once() -> None:
    nodes = [
        Node("fast", ("a",), ("b",), 4.0, 1.0),
        Node("relu", ("b",), ("c",), 0.0, 0.0, free=True),
        Node("slow", ("c",), ("d",), 1.0, 3.0),
        Node("slower", ("d",), ("e",), 1.0, 3.0),
        Node("softmax", ("e",), ("f",), 1.0, None),
    ]
    problem = Problem(nodes, dict.fromkeys("abcdef", 0.2), {}, frozenset("f"))
    choices = chain(problem)
    assert choices[0].exclude == ("slow", "slower")
    assert choices[0].ms == pytest.approx(1 + 0.2 + 0.2 + 1 + 1 + 1)


def test_a_conversion_can_cost_more_than_a_slow_layer() -> None:
    nodes = [
        Node("one", ("a",), ("b",), 9.0, 1.0),
        Node("slow", ("b",), ("c",), 1.0, 1.5),
        Node("two", ("c",), ("d",), 9.0, 1.0),
    ]
    assert chain(Problem(nodes, dict.fromkeys("abcd", 0.4), {}, frozenset("d")))[0].exclude == ()


def test_a_large_graph_is_done_in_a_moment() -> None:
    assert len(chain(layers(400, 3))) > 10
