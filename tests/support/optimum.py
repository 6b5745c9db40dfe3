"""Exact optima of tiny instances: best-first search over all schedules that the rules of plans allow.

In each iteration any set of requests computes, whole prompts or chunks of them; a request that does not may keep its KV cache
or lose it and be recomputed. It may also wait for the next arrival. Knows nothing of `cbatch.bounds`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations, product
from typing import NamedTuple

from cbatch import BatchShape


class Ask(NamedTuple):
    prompt: int
    output: int
    arrival: float = 0.0
    total: float | None = None

    @property
    def due(self) -> float:
        return self.arrival + self.total if self.total else float("inf")


State = tuple[tuple[int, int], ...]
"""For each request: tokens generated, tokens in the KV cache."""


@dataclass(frozen=True)
class Machine:
    """seconds: of an iteration. chunks: prompts may be cut."""

    batch: int
    tokens: int
    memory: int
    seconds: Callable[[BatchShape], float] = lambda shape: 1.0
    chunks: bool = False

    def best(self, asked: list[Ask], objective: str) -> float:
        """The least sum of latencies, last end ("makespan"), or number of requests that end late ("late")."""
        start: State = ((0, 0),) * len(asked)
        queue: list[tuple[float, float, float, State]] = [(0.0, 0.0, 0.0, start)]
        done: dict[State, list[tuple[float, float]]] = {}
        while True:
            _, cost, now, state = heappop(queue)
            if all(new == ask.output for (new, _), ask in zip(state, asked, strict=True)):
                return cost
            seen = done.setdefault(state, [])
            if any(other <= cost and time <= now for other, time in seen):
                continue
            seen.append((cost, now))
            for then, after in self._successors(asked, now, state):
                more = cost + self._cost(asked, objective, now, state, then, after)
                heappush(queue, (more + self._ahead(asked, objective, then, after), more, then, after))

    def _cost(self, asked: list[Ask], objective: str, now: float, state: State, then: float, after: State) -> float:
        if objective == "makespan":
            return then - now
        ended = [old[0] < ask.output == new[0] for ask, old, new in zip(asked, state, after, strict=True)]
        if objective == "late":
            return sum(end and then > ask.due + 1e-9 for end, ask in zip(ended, asked, strict=True))
        return sum(then - ask.arrival for end, ask in zip(ended, asked, strict=True) if end)

    def _ahead(self, asked: list[Ask], objective: str, now: float, state: State) -> float:
        """What is still to be paid, at least: each token takes an iteration."""
        step = self.seconds(BatchShape((), 1, 1))
        ends = [
            (ask, max(now, ask.arrival) + (ask.output - new) * step)
            for ask, (new, _) in zip(asked, state, strict=True)
            if new < ask.output
        ]
        if objective == "makespan":
            return max((end - now for _, end in ends), default=0.0)
        if objective == "late":
            return sum(end > ask.due + 1e-9 for ask, end in ends)
        return sum(end - ask.arrival for ask, end in ends)

    def _successors(self, asked: list[Ask], now: float, state: State) -> Iterator[tuple[float, State]]:
        unfinished = [i for i, ask in enumerate(asked) if state[i][0] < ask.output]
        for begin in (now, *sorted({asked[i].arrival for i in unfinished if asked[i].arrival > now})):
            here = [i for i in unfinished if asked[i].arrival <= begin]
            for number in range(1, min(len(here), self.batch) + 1):
                for chosen in combinations(here, number):
                    yield from self._iterations(asked, begin, state, chosen)

    def _iterations(
        self, asked: list[Ask], now: float, state: State, chosen: tuple[int, ...]
    ) -> Iterator[tuple[float, State]]:
        left = [asked[i].prompt + state[i][0] - state[i][1] for i in chosen]
        sizes = [range(1 if self.chunks else most, most + 1) for most in left]
        holders = [i for i, (_, held) in enumerate(state) if held and i not in chosen]
        for grant in product(*sizes):
            if sum(grant) > self.tokens:
                continue
            used = sum(state[i][1] + tokens for i, tokens in zip(chosen, grant, strict=True))
            shape = BatchShape(
                tuple((tokens, state[i][1]) for i, tokens in zip(chosen, grant, strict=True) if tokens > 1),
                sum(tokens == 1 for tokens in grant),
                sum(state[i][1] + 1 for i, tokens in zip(chosen, grant, strict=True) if tokens == 1),
            )
            for kept in self._kept(state, holders, self.memory - used):
                after = [(new, held if i in kept else 0) for i, (new, held) in enumerate(state)]
                for i, tokens, most in zip(chosen, grant, left, strict=True):
                    new, held = state[i][0] + (tokens == most), state[i][1] + tokens
                    after[i] = (new, 0 if new == asked[i].output else held)
                yield now + self.seconds(shape), tuple(after)

    @staticmethod
    def _kept(state: State, holders: list[int], room: int) -> Iterator[tuple[int, ...]]:
        """The largest sets of others that keep their KV cache: to keep more is never worse."""
        if room < 0:
            return
        fit = [
            kept
            for number in range(len(holders) + 1)
            for kept in combinations(holders, number)
            if sum(state[i][1] for i in kept) <= room
        ]
        yield from (kept for kept in fit if not any(set(kept) < set(other) for other in fit))
