"""Recorded conversations of agents, served in closed loop: `workload.path` is a file of callanjfox/kv-cache-tester (Apache-2.0) as JSON lines."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Annotated, Any, Literal

from cbatch import WorkloadError
from cbatch.validation import not_negative, positive, whole
from experiments.workloads.base import MOST_REQUESTS
from experiments.workloads.open_loop import ArrivalProcess
from experiments.workloads.readers.table import at_line, json_objects, read_text
from experiments.workloads.scripts import Session, Turn
from experiments.workloads.seeds import Purpose, generator
from experiments.workloads.sessions import ClosedLoop
from experiments.workloads.trace import MOST_TOKENS


@dataclass(frozen=True, slots=True)
class _Call:
    """A recorded request. begin, end: seconds from the conversation's start. think: seconds after the previous call, if recorded."""

    begin: float
    end: float
    think: float | None
    prompt: int
    output: int
    hashes: tuple[int, ...]
    stop: str
    after: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Agents(ClosedLoop):
    """Recorded conversations: each request follows the previous one, and the sub-agents that had ended, after the recorded pause.

    Nothing follows a sub-agent that did not return: it has no duration, or ends after the last request. Its requests are served nevertheless.

    A request repeats the tokens that its hash ids share with an earlier request of its conversation; if these are all of that request's
    full blocks, also that request's answer. All conversations share their tools and system prompt. `extra["tool"]` is the recorded
    reason for the end: tool_use, or end_turn, after which a person thinks. Overlapping requests run one after another, without a pause.

    start, num_sessions: the conversations of the file, from number `start` on; None takes all. order: "seed" shuffles them by the seed.
    length_scale: multiplies all tokens, for models with fewer positions. pause_scale, max_pause: multiply pauses, then limit them, in seconds.
    """

    path: str
    start: Annotated[int, whole(0)] = 0
    num_sessions: Annotated[int, whole(1, MOST_REQUESTS)] | None = None
    order: Literal["seed", "recorded"] = "seed"
    length_scale: Annotated[float, positive("1 keeps the lengths of the trace")] = 1.0
    pause_scale: Annotated[float, not_negative("1 keeps the pauses of the trace")] = 1.0
    max_pause: Annotated[float, not_negative("seconds")] | None = None
    arrivals: ArrivalProcess | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_requests is not None:
            raise WorkloadError("workload.num_requests: conversations are whole; give workload.num_sessions=")

    def scripts(self) -> Sequence[Session]:
        return self._scripts

    @cached_property
    def _scripts(self) -> Sequence[Session]:
        records = json_objects(self.path, read_text(self.path))
        wanted = list(enumerate(records, start=1))[self.start :]
        if not wanted or len(wanted) < (self.num_sessions or 0):
            given = f"workload.start={self.start}, workload.num_sessions={self.num_sessions}"
            raise WorkloadError(f"{self.path}: {given}: the file has {len(records)} conversations; ask for fewer")
        if self.order == "seed":
            order = generator(self.seed, Purpose.ORDER).permutation(len(wanted))
            wanted = [wanted[place] for place in order]
        return [self._session(record, line) for line, record in wanted[: self.num_sessions]]

    def _session(self, record: Mapping[str, Any], line: int) -> Session:
        try:
            calls, shared = list(_calls(record)), record["tool_tokens"] + record["system_tokens"]
            size = int(record["block_size"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"not a recorded conversation ({error!r}); docs/sessions.md has the format"
            raise at_line(self.path, line, problem) from None
        if not calls:
            raise at_line(self.path, line, "the conversation has no requests; remove the line")
        scaled = [(self._scale(call.prompt), self._scale(call.output)) for call in calls]
        turns, prompts = list[Turn](), list[int]()
        system = min(self._scale(shared), scaled[0][0] - 1)
        for place, (call, (prompt, output)) in enumerate(zip(calls, scaled, strict=True)):
            repeats, kept, cut = None, system, None
            if place:
                common, repeats = max((_common(call.hashes, calls[other].hashes), other) for other in range(place))
                whole = prompts[repeats] + scaled[repeats][1]
                is_whole = common and common == len(calls[repeats].hashes)
                kept = min(whole, whole if is_whole else common and self._scale(common * size), prompt - 1)
                cut = kept if kept < whole else None
            new = max(prompt - kept, 1)
            turns.append(Turn(new, output, call.after, self._pause(call, calls), repeats, cut, {"tool": call.stop}))
            prompts.append(kept + new)
        return Session(str(record.get("id", line)), turns, system)

    def _scale(self, tokens: int) -> int:
        return min(max(int(tokens * self.length_scale + 0.5), 1), MOST_TOKENS)

    def _pause(self, call: _Call, calls: Sequence[_Call]) -> float:
        """Returns the pause before a call: as recorded, or from the latest end that it follows."""
        pause = call.begin if not call.after else max(call.begin - max(calls[before].end for before in call.after), 0.0)
        if len(call.after) == 1 and call.think is not None:
            pause = max(call.think, 0.0)
        pause *= self.pause_scale
        return pause if self.max_pause is None else min(pause, self.max_pause)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of equal leading ids, which are cumulative: equal ones precede unequal ones."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda place: one[place] != other[place])


def _calls(record: Mapping[str, Any]) -> Iterator[_Call]:
    """Yields the requests of a conversation, sub-agents' included, in an order in which each follows only earlier ones."""
    number, open_agents = 0, list[tuple[float, int]]()  # ends and last calls of sub-agents
    before: tuple[int, ...] = ()
    for entry in record["requests"]:
        begin = float(entry["t"])
        if entry["type"] == "subagent":
            follows = before
            for part in entry["requests"]:
                yield _call(part, begin, follows)
                follows, number = (number,), number + 1
            if follows != before:
                duration = entry.get("duration_ms")
                open_agents.append((inf if duration is None else begin + float(duration) / 1000, number - 1))
            continue
        joined = [last for end, last in open_agents if end <= begin]
        open_agents = [agent for agent in open_agents if agent[0] > begin]
        yield _call(entry, 0.0, (*before, *joined))
        before, number = (number,), number + 1


def _call(entry: Mapping[str, Any], origin: float, after: tuple[int, ...]) -> _Call:
    begin, think = origin + float(entry["t"]), entry.get("think_time")
    end, think = begin + float(entry.get("api_time") or 0.0), None if think is None else float(think)
    said = int(entry["in"]), int(entry["out"]), tuple(entry["hash_ids"]), str(entry.get("stop") or "")
    return _Call(begin, end, think, *said, after)
