"""Pauses of sessions, in which a tool runs or a person thinks: predictions from the pauses so far, and how long to keep KV blocks for.

`request.extra["tool"]` names the tool that a request's answer calls. It is read when the request has ended; before, no server knows it.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from cbatch import ConfigError, Described, Request
from policies.shared.latest import Latest
from policies.shared.programs import ends_program, program_of


class Pauses(Described):
    """Predicts the pause after a request from the last `window` pauses after calls of its tool; if those are fewer than `least`, after all."""

    def __init__(self, least: int = 1, window: int = 200) -> None:
        if not 1 <= least <= window:
            raise ConfigError(f"pauses: need 1 <= {least=} <= {window=}")
        self.least, self.window = least, window
        self._ended = Latest[Hashable, tuple[float, Hashable]]()  # by session: end of the latest request, and its tool
        self._of_tool: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=window))
        self._of_all = deque[float](maxlen=window)

    def add(self, tool: Hashable, seconds: float) -> None:
        """Adds an observed pause. tool: None: no tool was called."""
        self._of_all.append(seconds)
        self._of_tool[tool].append(seconds)

    def note_end(self, request: Request, now: float) -> None:
        """Called when a request has ended, or was preempted."""
        if ends_program(request):
            self._ended.pop(program_of(request), None)
        else:
            self._ended[program_of(request)] = now, request.extra.get("tool")

    def note_arrival(self, request: Request) -> None:
        """Called after a request's arrival, perhaps again after a preemption. Without `Request.pause` its session's latest end counts."""
        if not request.num_preemptions and (ended := self._ended.pop(program_of(request), None)) is not None:
            end, tool = ended
            self.add(tool, max(request.arrival_time - end, 0.0) if request.pause is None else request.pause)

    def after(self, request: Request) -> Sequence[float]:
        """Returns the pauses, in seconds, that predict the one after a request; empty if too few are known."""
        of_tool = self.of_tool(request)
        known = of_tool if len(of_tool) >= self.least else self._of_all
        return known if len(known) >= self.least else ()

    def of_tool(self, request: Request) -> Sequence[float]:
        return self._of_tool.get(request.extra.get("tool"), ())

    def mean(self, request: Request) -> float | None:
        """Returns the predicted pause after a request; None if too few are known."""
        known = self.after(request)
        return sum(known) / len(known) if known else None


class TimeToLive(Described):
    """Says for how long to keep the KV blocks of a session after a request: Continuum (arXiv 2511.02230).

    worth None is the rule of the code (Whrlicht/vllm-continuum): `seconds` if the answer calls a tool whose mean pause is at most that, or
    is unknown, otherwise 0. Else the paper's rule, from secondary notes: the time t with the largest P(pause <= t) * `worth` - t, where P is
    the distribution of the observed pauses, or `seconds` if none is known. `worth`: seconds that it takes to compute a whole KV cache, if
    a miss costs time in proportion to its tokens; the paper's cost of losing the turn in the queue is left out.
    """

    def __init__(self, pauses: Pauses, seconds: float = 2.0, worth: float | None = None) -> None:
        if seconds < 0 or (worth is not None and worth < 0):
            raise ConfigError(f"ttl: {seconds=} and {worth=} must be at least 0 seconds")
        self.pauses, self.seconds, self.worth = pauses, seconds, worth

    def after(self, request: Request) -> float:
        """Returns how many seconds to keep the KV blocks of an ended request."""
        if self.worth is not None:
            known = self.pauses.after(request)
            return best_time(known, self.worth) if known else self.seconds
        known = self.pauses.of_tool(request)
        is_short = not known or sum(known) / len(known) <= self.seconds
        return self.seconds if is_short and "tool" in request.extra else 0.0


def best_time(pauses: Sequence[float], worth: float) -> float:
    """Returns the t with the largest P(pause <= t) * worth - t: one of the pauses, or 0."""
    ascending = sorted(pauses)
    gains = [(number / len(ascending) * worth - pause, -pause) for number, pause in enumerate(ascending, 1)]
    return -max([(0.0, 0.0), *gains])[1]
