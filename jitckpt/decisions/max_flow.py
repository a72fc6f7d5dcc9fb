"""Maximum flow by Dinic's method, in Python: the reference for native/algorithms, and for small problems."""

from collections import deque
from collections.abc import Sequence


class FlowNetwork:
    """A directed network under construction and, after `maximum`, its flow."""

    def __init__(self, vertices: int) -> None:
        self._edges_of: list[list[int]] = [[] for _ in range(vertices)]
        self._target: list[int] = []
        self._residual: list[float] = []

    def add(self, source: int, target: int, capacity: float) -> int:
        """Add an edge; return its number (its reverse edge has the next)."""
        edge = len(self._target)
        self._target += [target, source]
        self._residual += [capacity, 0]
        self._edges_of[source].append(edge)
        self._edges_of[target].append(edge + 1)
        return edge

    def flow(self, edge: int) -> float:
        return self._residual[edge + 1]

    def enlarge(self, edge: int, by: float) -> None:
        """Raise an edge's capacity; a flow already found stays valid."""
        self._residual[edge] += by

    def maximum(self, source: int, sink: int, least_step: float = 0.0) -> float:
        """Add to the flow what edges with more than `least_step` left allow; return how much that is."""
        total = 0.0
        while (level := self._levels(source, least_step))[sink] >= 0:
            used = [0] * len(level)
            while (pushed := self._push(source, sink, level, used, least_step)) > 0:
                total += pushed
        return total

    def source_side(self, source: int, least_step: float = 0.0) -> Sequence[bool]:
        """After `maximum`: which vertices lie on the source's side of a least cut."""
        return [level >= 0 for level in self._levels(source, least_step)]

    def _levels(self, source: int, least_step: float) -> list[int]:
        level = [-1] * len(self._edges_of)
        level[source] = 0
        queue = deque([source])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges_of[vertex]:
                target = self._target[edge]
                if self._residual[edge] > least_step and level[target] < 0:
                    level[target] = level[vertex] + 1
                    queue.append(target)
        return level

    def _push(self, source: int, sink: int, level: list[int], used: list[int], least_step: float) -> float:
        """Find one path along the levels and fill it; `used` skips edges that led nowhere."""
        path: list[int] = []
        vertex = source
        while vertex != sink:
            edges = self._edges_of[vertex]
            while used[vertex] < len(edges):
                edge = edges[used[vertex]]
                if self._residual[edge] > least_step and level[self._target[edge]] == level[vertex] + 1:
                    break
                used[vertex] += 1
            else:
                if not path:
                    return 0.0
                vertex = self._target[path.pop() ^ 1]
                used[vertex] += 1
                continue
            path.append(edge)
            vertex = self._target[edge]
        amount = min(self._residual[edge] for edge in path)
        for edge in path:
            self._residual[edge] -= amount
            self._residual[edge ^ 1] += amount
        return amount
