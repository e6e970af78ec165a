"""Minimum s-t cut by Dinic's algorithm (1970) with real capacities."""

from __future__ import annotations

from collections import deque

__all__ = ["Network"]

_EPSILON = 1e-12


class Network:
    """A directed graph whose nodes are numbered as they are added; 0 is the source, 1 the sink."""

    SOURCE, SINK = 0, 1

    def __init__(self) -> None:
        self._out: list[list[int]] = [[], []]
        self._to: list[int] = []
        self._left: list[float] = []

    def node(self) -> int:
        """A new node's number."""
        self._out.append([])
        return len(self._out) - 1

    def edge(self, start: int, end: int, capacity: float) -> None:
        """An edge that costs `capacity` if `start` stays with the source and `end` with the sink."""
        if capacity > 0:
            for one, other, room in ((start, end, capacity), (end, start, 0.0)):
                self._out[one].append(len(self._to))
                self._to.append(other)
                self._left.append(room)

    def source_side(self) -> set[int]:
        """The nodes on the source's side of the minimum cut that has the fewest of them."""
        while self._push_all():
            pass
        return set(self._levels())

    def _levels(self) -> dict[int, int]:
        levels, waiting = {self.SOURCE: 0}, deque([self.SOURCE])
        while waiting:
            node = waiting.popleft()
            for edge in self._out[node]:
                if self._left[edge] > _EPSILON and self._to[edge] not in levels:
                    levels[self._to[edge]] = levels[node] + 1
                    waiting.append(self._to[edge])
        return levels

    def _push_all(self) -> bool:
        """A blocking flow along the shortest paths; whether there was any."""
        levels = self._levels()
        if self.SINK not in levels:
            return False
        tried = [0] * len(self._out)
        path: list[int] = []
        while True:
            node = self._to[path[-1]] if path else self.SOURCE
            if node == self.SINK:
                room = min(self._left[edge] for edge in path)
                for edge in path:
                    self._left[edge] -= room
                    self._left[edge ^ 1] += room
                path = []
            elif tried[node] < len(self._out[node]):
                edge = self._out[node][tried[node]]
                if self._left[edge] > _EPSILON and levels.get(self._to[edge]) == levels[node] + 1:
                    path.append(edge)
                else:
                    tried[node] += 1
            elif path:
                tried[self._to[path.pop() ^ 1]] += 1
            else:
                return True
