"""Which accesses to memory come before which others: vector clocks, as in race detectors for threads.

Agents are the host and the streams. Each counts its own accesses, and knows how many accesses of every other agent come
before its own next one. Two accesses to the same memory, one of them a write, race if neither comes before the other.

Only the last write of an item and the reads since then are stored: an access that does not race with those does not
race with any earlier one (FastTrack, Flanagan and Freund, PLDI 2009). Knows nothing of streams, tensors or requests.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

HOST = 0
"""The host's index among the agents."""

Clock = list[int]
"""How many accesses of each agent come before something."""

Place = tuple[Hashable, int]
"""A memory, and an item of that memory; 0 where memory is not divided into items."""


class Access(NamedTuple):
    """One access, for messages.

    iteration: None outside any. site: the line of the host's program that enqueued it.
    """

    agent: str
    what: Literal["read", "write"]
    iteration: int | None
    site: str

    def __str__(self) -> str:
        when = "" if self.iteration is None else f" of iteration {self.iteration}"
        return f"{self.agent}'s {self.what}{when} ({self.site})"


class Race(NamedTuple):
    """Two accesses to a place, of which neither comes before the other."""

    place: Place
    later: Access
    earlier: Access


class History:
    """The accesses with which a later one may still race.

    known: `known[a][b]` accesses of agent b come before the next one of agent a.
    """

    def __init__(self, agents: Sequence[str]) -> None:
        """agents: names, the host's first."""
        self.known: list[Clock] = [[0] * len(agents) for _ in agents]
        self._agents = agents
        self._notes: list[list[tuple[int | None, str]]] = [[] for _ in agents]  # iteration and site of each access
        self._written: dict[Place, tuple[int, int]] = {}  # the last write: agent and number
        self._read: dict[Place, dict[int, int]] = defaultdict(dict)  # since then: number by agent

    def learn(self, agent: int, clock: Clock) -> None:
        """Order the agent's next accesses after all those that `clock` counts."""
        self.known[agent] = [*map(max, self.known[agent], clock)]

    def access(
        self, agent: int, iteration: int | None, site: str, reads: Iterable[Place], writes: Iterable[Place]
    ) -> Race | None:
        """Note that an agent reads and writes places, as one access; return a race with an earlier one."""
        self.known[agent][agent] += 1
        number = self.known[agent][agent]
        self._notes[agent].append((iteration, site))
        for place in reads:
            if earlier := self._conflict(agent, place, writing=False):
                return Race(place, Access(self._agents[agent], "read", iteration, site), earlier)
            self._read[place][agent] = number
        for place in writes:
            if earlier := self._conflict(agent, place, writing=True):
                return Race(place, Access(self._agents[agent], "write", iteration, site), earlier)
            self._written[place] = agent, number
            self._read.pop(place, None)
        return None

    def _conflict(self, agent: int, place: Place, *, writing: bool) -> Access | None:
        """The first access to the place that does not come before the agent's."""
        clock = self.known[agent]
        if place in self._written:
            by, number = self._written[place]
            if number > clock[by]:
                return Access(self._agents[by], "write", *self._notes[by][number - 1])
        for by, number in self._read[place].items() if writing and place in self._read else ():
            if number > clock[by]:
                return Access(self._agents[by], "read", *self._notes[by][number - 1])
        return None
