"""Which accesses to memory come before which others: vector clocks, as in race detectors for threads.

Agents are the host and the streams. Each counts its own accesses, and knows how many accesses of every other agent come
before its own next one. Two accesses to the same memory, one of them a write, race if neither comes before the other.

Only the last write and each agent's last read of an item are stored: an access that does not race with those does not
race with any earlier one (FastTrack, Flanagan and Freund, PLDI 2009). Knows nothing of streams, tensors or requests.
"""

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cbatch.request import Ints

HOST = 0
"""The host's index among the agents."""

WHOLE = np.zeros(1, np.int64)
"""The only item of memory that is not divided into items."""

_TIDY_INTERVAL = 1024  # accesses of an agent between two deletions of those that can no longer race

Clock = Ints
"""[agents]; how many accesses of each agent come before something."""


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
    """Two accesses to `item` of `memory`, of which neither comes before the other."""

    memory: Hashable
    item: int
    later: Access
    earlier: Access


class Clocks:
    """The clocks of all agents: `known[a, b]` accesses of agent b come before the next one of agent a."""

    def __init__(self, num_agents: int) -> None:
        self.known = np.zeros((num_agents, num_agents), np.int64)

    def tick(self, agent: int) -> int:
        """Count an access of the agent and return its number, from 1."""
        self.known[agent, agent] += 1
        return int(self.known[agent, agent])

    def of(self, agent: int) -> Clock:
        """Return a copy of the agent's clock."""
        return cast(Clock, self.known[agent].copy())

    def learn(self, agent: int, clock: Clock) -> None:
        """Order the agent's next accesses after all those that `clock` counts."""
        np.maximum(self.known[agent], clock, out=self.known[agent])

    def known_to_all(self) -> Clock:
        """Accesses that come before every agent's next one."""
        return cast(Clock, self.known.min(axis=0))


class History:
    """The accesses with which a later one may still race."""

    def __init__(self, agents: Sequence[str]) -> None:
        """agents: names, the host's first."""
        self.clocks = Clocks(len(agents))
        self._agents = agents
        self._memories: dict[Hashable, _Memory] = {}
        self._accesses: list[dict[int, tuple[int | None, str]]] = [{} for _ in agents]  # iteration and site by number

    def access(
        self,
        agent: int,
        iteration: int | None,
        site: str,
        *,
        reads: Sequence[tuple[Hashable, Ints]] = (),
        writes: Sequence[tuple[Hashable, Ints]] = (),
    ) -> Race | None:
        """Note that an agent reads and writes items of memories, as one access; return a race with an earlier one."""
        number = self.clocks.tick(agent)
        self._accesses[agent][number] = iteration, site
        if number % _TIDY_INTERVAL == 0:
            self._tidy()
        for (memory, items), writing in chain(((part, False) for part in reads), ((part, True) for part in writes)):
            kept = self._memory(memory, items)
            if found := kept.conflict(self.clocks.known[agent], items, writing):
                item, other, other_number, other_wrote = found
                later = Access(self._agents[agent], "write" if writing else "read", iteration, site)
                return Race(memory, item, later, self._earlier(other, other_number, other_wrote))
            kept.note(agent, number, items, writing)
        return None

    def _memory(self, memory: Hashable, items: Ints) -> "_Memory":
        kept = self._memories.get(memory)
        if kept is None:
            kept = self._memories[memory] = _Memory(len(self._agents))
        kept.hold(items)
        return kept

    def _earlier(self, agent: int, number: int, wrote: bool) -> Access:
        return Access(self._agents[agent], "write" if wrote else "read", *self._accesses[agent][number])

    def _tidy(self) -> None:
        """Delete the sites of accesses that come before every agent's next one: they can no longer race."""
        for accesses, known in zip(self._accesses, self.clocks.known_to_all().tolist(), strict=True):
            for number in [number for number in accesses if number <= known]:
                del accesses[number]


class _Memory:
    """The last accesses to the items of one memory.

    wrote_by, wrote_at: int64 [items]; the agent that wrote last, and the number of that access, 0 if none did.
    read_at: int64 [agents, items]; number of each agent's last read, 0 if there is none.
    """

    def __init__(self, num_agents: int) -> None:
        self.wrote_by = np.zeros(0, np.int64)
        self.wrote_at = np.zeros(0, np.int64)
        self.read_at = np.zeros((num_agents, 0), np.int64)

    def hold(self, items: Ints) -> None:
        """Extend the columns up to the largest item."""
        missing = int(items.max(initial=-1)) + 1 - len(self.wrote_at)
        if missing > 0:
            self.wrote_by, self.wrote_at = (np.pad(column, (0, missing)) for column in (self.wrote_by, self.wrote_at))
            self.read_at = np.pad(self.read_at, ((0, 0), (0, missing)))

    def conflict(self, clock: Clock, items: Ints, writing: bool) -> tuple[int, int, int, bool] | None:
        """Return the first access that is not before `clock`: (item, agent, number, whether it was a write)."""
        by, at = self.wrote_by[items], self.wrote_at[items]
        unknown: NDArray[np.bool_] = at > clock[by]
        if unknown.any():
            place = int(unknown.argmax())
            return int(items[place]), int(by[place]), int(at[place]), True
        if writing:
            read_at = self.read_at[:, items]  # [agents, items]
            unread = read_at > clock[:, None]
            if unread.any():
                agent, place = (int(index) for index in np.argwhere(unread)[0])
                return int(items[place]), agent, int(read_at[agent, place]), False
        return None

    def note(self, agent: int, number: int, items: Ints, writing: bool) -> None:
        if writing:
            self.wrote_by[items], self.wrote_at[items] = agent, number
        else:
            self.read_at[agent, items] = number
