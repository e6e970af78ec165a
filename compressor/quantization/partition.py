"""Which layers to leave in float: the fewest milliseconds for each bit of error that is removed.

Every node of the graph is given to the integers or to the floats. A choice costs the measured time of each
node in its type, a conversion wherever a tensor crosses from one to the other, and, weighed by a price, the
error of every weight and every activation that is quantized. The cheapest choice for a price is a minimum
cut. As the price rises from nothing (layers that are slower in integers go first, for free) to infinity,
ever more nodes turn to float, each set inside the next (Gallo, Grigoriadis and Tarjan, 1989): a ranking
that knows of the conversions. The sets are found as the corners of the lower hull of (time, error), as
Eisner and Severance (1976) do; between two corners nodes are added one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from compressor.quantization.minimum_cut import Network

__all__ = ["Choice", "Node", "Problem", "chain", "costs"]

_ALWAYS = 1e12  # a capacity that no cut pays
Floats = frozenset[str]


@dataclass(frozen=True)
class Node:
    """What a node costs in floats and in integers (None: it cannot), and the error of its weight.

    `free` nodes (movers of values, absorbed activations) follow their neighbours and are no layers.
    Times in milliseconds; errors as noise power over signal power of the outputs.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    float_ms: float
    integer_ms: float | None
    error: float = 0.0
    free: bool = False


@dataclass(frozen=True)
class Problem:
    """Nodes in order, the cost of converting a tensor (ms), the error of quantizing a tensor, the outputs."""

    nodes: Sequence[Node]
    conversion: Mapping[str, float]
    error: Mapping[str, float]
    outputs: frozenset[str] = field(default_factory=frozenset)

    @cached_property
    def makers(self) -> dict[str, str]:
        """The node that makes each tensor."""
        return {name: node.name for node in self.nodes for name in node.outputs}

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        """The nodes that read each tensor; "" stands for the graph's output."""
        found: dict[str, list[str]] = {name: [""] for name in self.outputs}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found.setdefault(name, []).append(node.name)
        return found

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """All tensors, in the order in which they come to be."""
        return tuple(dict.fromkeys([*self.readers, *self.makers]))


class Choice(NamedTuple):
    """Layers left in float, with the time (ms) and the error to expect."""

    exclude: tuple[str, ...]
    ms: float
    error: float


def chain(problem: Problem) -> list[Choice]:
    """Nested choices, from the fastest (price 0) on, ever slower with less error; the last is all float."""
    first, last = _cheapest(problem, 0.0), frozenset(node.name for node in problem.nodes)
    corners = [first, *_between(problem, first, last), last]
    found = [first]
    for low, high in pairwise(corners):
        found += _one_by_one(problem, low, high)
    choices = [Choice(_layers(problem, floats), *_costs(problem, floats)) for floats in found]
    kept = choices[-1:]
    for choice in reversed(choices[:-1]):
        if choice.ms < kept[-1].ms and len(choice.exclude) < len(kept[-1].exclude):
            kept.append(choice)
    return kept[::-1]


def costs(problem: Problem, exclude: Sequence[str]) -> tuple[float, float]:
    """Time (ms) and error with the layers `exclude` in float; free nodes follow what they read."""
    return _costs(
        problem, _closed(problem, frozenset(exclude), frozenset(node.name for node in problem.nodes))
    )


def _layers(problem: Problem, floats: Floats) -> tuple[str, ...]:
    return tuple(
        node.name
        for node in problem.nodes
        if node.name in floats and not node.free and node.integer_ms is not None
    )


def _between(problem: Problem, low: Floats, high: Floats) -> list[Floats]:
    """The corners of the lower hull strictly between two of its points."""
    (time_low, error_low), (time_high, error_high) = _costs(problem, low), _costs(problem, high)
    if error_low <= error_high or time_high <= time_low:
        return []
    price = (time_high - time_low) / (error_low - error_high)
    middle = _cheapest(problem, price)
    time, error = _costs(problem, middle)
    gain = (time_low + price * error_low) - (time + price * error)
    if middle in (low, high) or gain <= 1e-9 * (time_low + price * error_low):
        return []
    return [*_between(problem, low, middle), middle, *_between(problem, middle, high)]


def _one_by_one(problem: Problem, low: Floats, high: Floats) -> list[Floats]:
    """From one choice to a larger one, a layer at a time: first what brings most error for its time."""
    time, _ = _costs(problem, low)

    def worth(node: Node) -> float:
        more, _ = _costs(problem, _closed(problem, low | {node.name}, high))
        tensors = sum(problem.error.get(name, 0.0) for name in {*node.inputs, *node.outputs})
        return (node.error + tensors) / max(more - time, 1e-3 * time, 1e-9)

    layers = [node for node in problem.nodes if node.name in high - low and not node.free]
    found, floats = [], low
    for node in sorted(layers, key=worth, reverse=True):
        floats = _closed(problem, floats | {node.name}, high)
        found.append(floats)
    return [*found[:-1], high]


def _closed(problem: Problem, floats: Floats, within: Floats) -> Floats:
    """With the free nodes of `within` that read nothing but floats."""
    found = set(floats)
    for node in problem.nodes:
        if (
            node.free
            and node.name in within
            and all(problem.makers[name] in found for name in node.inputs if name in problem.makers)
        ):
            found.add(node.name)
    return frozenset(found)


def _costs(problem: Problem, floats: Floats) -> tuple[float, float]:
    """Time (ms) and error of a choice."""
    integers = {node.name for node in problem.nodes if node.integer_ms is not None} - floats
    time = error = 0.0
    for node in problem.nodes:
        inside = node.name in integers
        time += (node.integer_ms or 0.0) if inside else node.float_ms
        error += node.error if inside else 0.0
    for name in problem.tensors:
        made = problem.makers.get(name) in integers
        read = [reader in integers for reader in problem.readers.get(name, [])]
        crossed = not all(read) if made else any(read)
        time += problem.conversion.get(name, 0.0) if crossed else 0.0
        error += problem.error.get(name, 0.0) if made or any(read) else 0.0
    return time, error


def _cheapest(problem: Problem, price: float) -> Floats:
    """The nodes in float where an error of 1 costs `price` ms: a minimum cut; integers are the source."""
    network = Network()
    numbers: dict[str, int] = {}
    for node in problem.nodes:
        if node.integer_ms is not None:
            number = numbers[node.name] = network.node()
            network.edge(number, network.SINK, node.integer_ms + price * node.error)
            network.edge(network.SOURCE, number, node.float_ms)
    for name in problem.tensors:
        maker = numbers.get(problem.makers.get(name, ""), network.SINK)
        readers = {numbers.get(reader, network.SINK) for reader in problem.readers.get(name, [])}
        _cross(network, maker, readers, problem.conversion.get(name, 0.0))
        _pair(network, {maker, *readers}, price * problem.error.get(name, 0.0))
    inside = network.source_side()
    return frozenset(node.name for node in problem.nodes if numbers.get(node.name) not in inside)


def _cross(network: Network, maker: int, readers: set[int], cost: float) -> None:
    """`cost` once, if the maker is an integer node and some reader is not, or the other way round."""
    if cost <= 0:
        return
    if maker != network.SINK:
        out = network.node()
        network.edge(maker, out, cost)
        for reader in readers:
            network.edge(out, reader, _ALWAYS)
    into = network.node()
    network.edge(into, maker, cost)
    for reader in readers - {network.SINK}:
        network.edge(reader, into, _ALWAYS)


def _pair(network: Network, ends: set[int], cost: float) -> None:
    """`cost` if any of the nodes that make or read a tensor is an integer node."""
    if cost > 0:
        pair = network.node()
        network.edge(pair, network.SINK, cost)
        for end in ends - {network.SINK}:
            network.edge(end, pair, _ALWAYS)
