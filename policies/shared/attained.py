"""Queues by attained service: a call joins the queue whose range holds the seconds that its program was served before.

A call that was served for the width of its queue's range moves to the tail of the next queue with its next token, since calls that
lose their KV cache to one another could otherwise compute prompts for ever. A call that has waited for long, compared
with the service of its program, moves to the first queue.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from cbatch import ConfigError, Request
from policies.shared.programs import OpenPrograms, ended_at, program_of


@dataclass(eq=False)
class Program:
    """Seconds for which ended calls were served, and waited. chains: by call, the longest chain of service up to its end."""

    served: float = 0.0
    waited: float = 0.0
    chains: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """place: number of the queue, and order of joining. left: seconds of the quantum. since: of the latest promotion, or the arrival.

    served, recent: seconds of service, in all and since then.
    """

    program: Program
    inherited: float
    since: float
    place: tuple[int, int] = (0, 0)
    left: float = inf
    served: float = 0.0
    recent: float = 0.0


class AttainedQueues:
    """The calls that have not ended."""

    def __init__(self, thresholds: Sequence[float], beta: float) -> None:
        """thresholds: seconds at which the ranges of the second and the further queues begin. beta: inf: no promotion."""
        if [*thresholds] != sorted({*thresholds}) or not all(each > 0 for each in (*thresholds, beta)):
            raise ConfigError(f"policy: {thresholds=} must ascend from above 0 seconds, and {beta=} be above 0")
        self._thresholds, self._beta = thresholds, beta
        self._widths = [end - begin for begin, end in zip([0.0, *thresholds], [*thresholds, inf], strict=True)]
        self._calls: dict[Request, Call] = {}
        self._programs, self._open = defaultdict[Hashable, Program](Program), OpenPrograms()
        self._num_joined = 0
        self._due: list[
            tuple[float, int, Request]
        ] = []  # when calls in lower queues are promoted, unless served until then

    def place(self, request: Request) -> tuple[int, int]:
        """Returns a call's place, ascending from the head of the first queue to the tail of the last one."""
        return self._calls[request].place

    def join(self, request: Request, attained: Callable[[Program, Request], float]) -> None:
        """Adds a call. attained: returns the seconds of service that its program has attained."""
        self._open.arrive(request)
        program = self._programs[program_of(request)]
        inherited = attained(program, request)
        self._calls[request] = Call(program, inherited, request.arrival_time)
        self._move(request, bisect_right(self._thresholds, inherited))

    def charge(self, request: Request, seconds: float, samples: bool) -> None:
        """Counts the service of an iteration. samples: whether the call gets a token."""
        call = self._calls[request]
        call.served += seconds
        call.recent += seconds
        call.left -= seconds
        if call.left <= 0 and samples:
            self._move(request, call.place[0] + 1)

    def leave(self, request: Request) -> None:
        """Adds the service of an ended call to its program's."""
        call = self._calls.pop(request)
        program, end = call.program, ended_at(request)
        program.served += call.served
        program.waited += max(end - request.arrival_time - call.served, 0.0)
        program.chains[request.id] = call.inherited + call.served
        if self._open.finish(request):
            del self._programs[program_of(request)]

    def promote(self, now: float) -> Iterator[Request]:
        """Moves calls that have waited too long to the first queue, and yields them."""
        while self._due and self._due[0][0] <= now:
            *_, request = heappop(self._due)
            if (call := self._calls.get(request)) is None:
                continue
            if (due := self._due_at(call)) > now:
                heappush(self._due, (due, call.place[1], request))
            else:
                call.since, call.recent = now, 0.0
                self._move(request, 0)
                yield request

    def next_change(self, now: float, served: Iterable[Request]) -> float:
        """Returns a time, in seconds, before which no call moves if these are served, unless twice as fast as predicted."""
        left = min((self._calls[request].left for request in served), default=inf)
        return min(now + left / 2, self._due[0][0] if self._due else inf)

    def _due_at(self, call: Call) -> float:
        """Returns when, without further service, the program and the call have waited `beta` times as long as they were served."""
        program = call.program
        return call.since + call.recent + self._beta * (program.served + call.recent) - program.waited

    def _move(self, request: Request, queue: int) -> None:
        call = self._calls[request]
        is_low = call.place[0] > 0
        self._num_joined += 1
        call.place, call.left = (queue, self._num_joined), self._widths[queue]
        if queue and not is_low and self._beta < inf:
            heappush(self._due, (self._due_at(call), self._num_joined, request))
