"""Checks evictions and routers: serves small workloads in simulation, and keeps the first one that violates each property."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from cbatch import CbatchError, ConfigError, Limits, Request, RequestSpec
from policies.orca import Orca

BLOCK = 4  # tokens per KV block

_CHATS, _MOST_BLOCKS, _MOST_OUTPUT = 3, 4, 9
_LONGEST = (_MOST_BLOCKS + 1) * BLOCK + _MOST_OUTPUT
_REPEATS = 5  # runs of a workload that must agree before a changed future is blamed for a changed decision
_SHOWN = 30  # decisions of a counterexample's text; earlier ones are left out

LIMITS = Limits(3, 100, _LONGEST, tile=1)


class Plain(Orca):
    """Orca without leaps over repeated decodes, so that each iteration is observed."""


class Event(NamedTuple):
    """A decision. at: seconds; of a router the arrival of the request."""

    at: float
    text: str


class History(NamedTuple):
    """The decisions for a workload, and violations seen meanwhile, by the property's name."""

    events: Sequence[Event]
    problems: dict[str, str]


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. num_blocks: KV blocks, at least those of the longest request."""

    requests: tuple[RequestSpec, ...]
    num_blocks: int

    def made(self) -> list[Request]:
        return [Request.from_spec(request) for request in self.requests]

    def __str__(self) -> str:
        return "\n".join([f"kv_tokens={self.num_blocks * BLOCK} block_size={BLOCK}", *map(_text, self.requests)])


class Subject(NamedTuple):
    """A plug-in to check.

    name: as printed. run: serves a workload with a fresh copy of the plug-in. rules: the text of each property, by name.
    needed: the properties that the plug-in must have. hides_length: whether decisions end before the last request's length shows.
    """

    name: str
    run: Callable[[Workload], History]
    rules: Mapping[str, str]
    needed: frozenset[str]
    hides_length: bool


def workloads(number: int) -> Iterator[Workload]:
    """Yields random workloads, fewest requests first: turns of chats, whose prompts begin alike, with pauses of 0, 5 ms or 20 s."""
    for seed in range(number):
        numbers, at, turns = random.Random(seed), 0.0, [0] * _CHATS
        requests = list[RequestSpec]()
        for id_ in range(2 + 11 * seed // number):
            chat, blocks = numbers.randrange(_CHATS), numbers.randint(1, _MOST_BLOCKS)
            new, at = numbers.randint(1, _MOST_OUTPUT), at + numbers.choice((0.0, 0.005, 20.0)) * (id_ > 0)
            fields: dict[str, Any] = {"session": f"chat {chat}", "turn": turns[chat], "last": numbers.random() < 0.2}
            fields |= {"prefix_hashes": tuple(range(10 * chat, 10 * chat + blocks)), "hash_block": BLOCK}
            fields |= {"true_new_tokens": numbers.randint(1, new), "arrival_time": at}
            requests.append(RequestSpec(id_, BLOCK * blocks + numbers.randrange(BLOCK), new, **fields))
            turns[chat] += 1
        yield Workload(tuple(requests), -(-_LONGEST // BLOCK) + numbers.randint(0, 6))


def find(subject: Subject, number: int, tick: Callable[[], object]) -> dict[str, str]:
    """Returns a counterexample for each violated property, by its name. number: workloads to try. tick: called after each."""
    found: dict[str, str] = {}
    for workload in workloads(number):
        events, problems = _run(subject, workload)
        if not {"legal", "deterministic"} & {*problems, *found}:  # else runs cannot be compared
            problems |= _find_differences(subject, workload, events)
        for name, why in problems.items():
            left_out = [f"... {len(events) - _SHOWN} decisions"] if len(events) > _SHOWN else []
            shown = [f"{event.at:.3f} s: {event.text}" for event in events[-_SHOWN:]]
            found.setdefault(name, "\n".join([str(workload), *left_out, *shown, f"<- {why}"]))
        tick()
        if found.keys() == subject.rules.keys():
            break
    if "deterministic" in found:  # an earlier difference may have been chance, too
        found.pop("blind", None)
    return found


def _run(subject: Subject, workload: Workload) -> History:
    try:
        return subject.run(workload)
    except ConfigError:
        raise
    except CbatchError as error:
        return History((), {"legal": str(error)})


def _find_differences(subject: Subject, workload: Workload, events: Sequence[Event]) -> dict[str, str]:
    """Returns the violations that show in a second run: of the same workload, or of one with another future."""
    if why := _difference(events, _run(subject, workload).events):
        return {"deterministic": f"a second run {why}"}
    *others, last = workload.requests
    futures = [("without the last request", (*others,), last.arrival_time)]
    if subject.hides_length:
        length = last.max_new_tokens if last.true_new_tokens == 1 else 1
        changed = (*others, replace(last, true_new_tokens=length))
        futures.append((f"if the last request ended after {length} tokens", changed, inf))
    for what, requests, until in futures:
        again = _run(subject, replace(workload, requests=requests)).events
        if why := _difference(*([event for event in each if event.at < until] for each in (events, again))):
            repeats = (_difference(events, _run(subject, workload).events) for _ in range(_REPEATS))
            by_chance = next(filter(None, repeats), "")
            return {"deterministic": f"another run {by_chance}"} if by_chance else {"blind": f"{what}, the run {why}"}
    return {}


def _difference(first: Sequence[Event], second: Sequence[Event]) -> str:
    """Returns how the second run's decisions differ from the first run's; empty if they do not."""
    for one, other in zip(first, second, strict=False):
        if one.text != other.text:
            return f"{other.text}, where the run above {one.text}"
    return "" if len(first) == len(second) else f"makes {len(second)} decisions in place of {len(first)}"


def _text(request: RequestSpec) -> str:
    lengths = f"{request.num_prompt_tokens} prompt and {request.true_new_tokens} of {request.max_new_tokens} new tokens"
    turn = f"{request.session}, turn {request.turn}{' (the last)' * bool(request.last)}"
    return f"request {request.id}: {lengths}, from {request.arrival_time:g} s on, {turn}"
