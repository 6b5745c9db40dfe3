"""Autoscaling: the phases of a replica's lifetime, and the autoscaler that decides how many replicas run.

phase   closed | starting | ready | draining        | closed | ...
               | asked    | gets requests           |
paid           |------------------------------------|
                                  | gets none; closes when the requests that it has are over
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from operator import index
from typing import Any, Protocol, SupportsIndex

from cbatch.cluster.views import ClusterView, Phase
from cbatch.errors import ConfigError, PolicyError, call
from cbatch.record import Life

_CLOSE, _READY, _TICK = range(3)
"""Kinds of events, in the order in which those of one time happen; requests are routed and iterations begin after all of them."""


class Autoscaler(Protocol):
    """Decides how many replicas there are."""

    def wanted(self, view: ClusterView) -> Mapping[str, int] | int:
        """Returns the replicas wanted, with pools of each by its name; asked at 0 s and at each tick.

        Replicas that start count; those that drain do not. The cluster keeps the numbers between `Scaling.least` and the pool's replicas.
        """


@dataclass(frozen=True)
class Scaling:
    """How replicas start and stop. All values but `least` are seconds.

    autoscaler: copied for each run. What it wants at 0 s is ready at 0 s. tick: between its decisions.
    start_seconds: until a replica that was asked for is ready. least: replicas of each pool that are always there.
    up_after, down_after: for which it must have wanted more, or fewer, replicas (the stabilisation windows of Kubernetes' HPA).
    """

    autoscaler: Autoscaler
    tick: float = 15.0
    start_seconds: float = 240.0
    least: int = 1
    up_after: float = 0.0
    down_after: float = 300.0

    def __post_init__(self) -> None:
        if not callable(getattr(self.autoscaler, "wanted", None)):
            raise ConfigError(f"autoscale: {type(self.autoscaler).__name__} has no method wanted(view)")
        if self.tick <= 0 or self.least < 1 or min(self.start_seconds, self.up_after, self.down_after) < 0:
            raise ConfigError(f"scaling: need tick above 0, least of at least 1 and no negative seconds; got {self}")


class Fleet:
    """Starts and drains the replicas of a cluster.

    lives: of all replicas, in the order in which they were asked for. next_at: when the next event is due.
    is_cut: whether the autoscaler ever wanted more replicas than there are.
    """

    def __init__(
        self,
        scaling: Scaling,
        replicas: ClusterView,
        look: Callable[[float], ClusterView],
        idle_at: Callable[[int], float],
        restart: Callable[[int], object],
    ) -> None:
        """
        look: returns the view of the autoscaler at a time. restart: is called when a replica starts again.
        idle_at: returns since when a replica has had no request; infinity if it has one.
        """
        self.lives: list[Life] = []
        self.is_cut = False
        self._scaling, self._views, self._look, self._idle_at, self._restart = scaling, replicas, look, idle_at, restart
        self._pools: dict[str, list[int]] = {}
        for number, replica in enumerate(replicas):
            self._pools.setdefault(replica.pool, []).append(number)
            replicas.set_phase(number, Phase.CLOSED)
        self._latest: list[int] = [-1] * len(replicas)  # the number in `lives` of each replica's latest life
        self._events = [(scaling.tick, _TICK, 1)]  # a heap of time, kind, and number of the life or of the tick
        self._targets = self._wanted(0.0)
        self._history = {pool: deque([(0.0, target)]) for pool, target in self._targets.items()}
        for pool in self._pools:
            self._steer(pool, 0.0, start_seconds=0.0)
        self.advance(0.0)

    @property
    def next_at(self) -> float:
        return self._events[0][0]

    def advance(self, now: float) -> None:
        """Carries out the events due by `now`, in the order of time, kind and number."""
        while self._events[0][0] <= now:
            at, kind, number = heappop(self._events)
            if kind == _TICK:
                self._tick(at, number)
            elif (life := self.lives[number]).closed == inf:  # otherwise its start was cancelled
                if kind == _READY:
                    life.ready = at
                    self._views.set_phase(life.replica, Phase.READY)
                else:
                    life.closed = at
                    self._views.set_phase(life.replica, Phase.CLOSED)
                    self._steer(self._views[life.replica].pool, at)

    def note_idle(self, replica: int) -> None:
        """Closes a replica that drains once it has no request."""
        if self._views[replica].phase is Phase.DRAINING and (at := self._idle_at(replica)) < inf:
            life = self.lives[self._latest[replica]]
            heappush(self._events, (max(at, life.draining), _CLOSE, self._latest[replica]))

    def _tick(self, at: float, number: int) -> None:
        heappush(self._events, ((number + 1) * self._scaling.tick, _TICK, number + 1))
        for pool, wanted in self._wanted(at).items():
            self._targets[pool] = self._stabilise(pool, wanted, at)
            self._steer(pool, at)

    def _wanted(self, at: float) -> dict[str, int]:
        """Asks the autoscaler; returns the wanted replicas by pool within their limits."""
        scaler, pools = self._scaling.autoscaler, self._pools
        where = f"autoscaler {type(scaler).__name__}, {at:g} s"
        answer: Any = call(where, scaler.wanted, self._look(at))
        numbers = answer if isinstance(answer, Mapping) or len(pools) > 1 else dict.fromkeys(pools, answer)
        valid = isinstance(numbers, Mapping) and numbers.keys() == pools.keys()
        counts = numbers.values() if valid else [None]
        if not all(isinstance(n, SupportsIndex) and not isinstance(n, bool) and index(n) >= 0 for n in counts):
            of = f" of each pool, as in {dict.fromkeys(pools, 1)}" if any(pools) else ""
            remedy = f"return the number of replicas{of} (whole, at least 0)"
            raise PolicyError(f"{where}: wanted() returned {answer!r}; {remedy}")
        self.is_cut |= any(index(numbers[pool]) > len(pools[pool]) for pool in pools)
        return {pool: min(max(index(numbers[pool]), self._scaling.least), len(pools[pool])) for pool in pools}

    def _stabilise(self, pool: str, wanted: int, at: float) -> int:
        """Returns the target that lies between the least and the most that was wanted in the two windows, next to the present one."""
        history, scaling = self._history[pool], self._scaling
        history.append((at, wanted))
        while history[0][0] < at - max(scaling.up_after, scaling.down_after):
            history.popleft()
        least = min(number for time, number in history if time >= at - scaling.up_after)
        most = max(number for time, number in history if time >= at - scaling.down_after)
        return min(max(self._targets[pool], least), most)

    def _steer(self, pool: str, at: float, start_seconds: float | None = None) -> None:
        """Starts closed replicas, lowest index first; or cancels starts, then drains ready replicas, newest first."""
        views, target = self._views, self._targets[pool]
        counted = [replica for replica in self._pools[pool] if views[replica].phase in (Phase.STARTING, Phase.READY)]
        lives = [self.lives[self._latest[replica]] for replica in counted]
        lives.sort(key=lambda life: (views[life.replica].phase is Phase.STARTING, life.asked, life.replica))
        for life in lives[target:]:
            if views[life.replica].phase is Phase.STARTING:
                life.closed = at
                views.set_phase(life.replica, Phase.CLOSED)
            else:
                life.draining = at
                views.set_phase(life.replica, Phase.DRAINING)
                self.note_idle(life.replica)
        closed = [replica for replica in self._pools[pool] if views[replica].phase is Phase.CLOSED]
        for replica in closed[: max(target - len(lives), 0)]:
            seconds = self._scaling.start_seconds if start_seconds is None else start_seconds
            if self._latest[replica] >= 0:
                self._restart(replica)
            self._latest[replica] = len(self.lives)
            views.set_phase(replica, Phase.STARTING)
            heappush(self._events, (at + seconds, _READY, len(self.lives)))
            self.lives.append(Life(replica, at))
