"""Golden schedules of published policies on the unit machine: synchronous, one second an iteration, KV blocks of one
token, unless told otherwise.

Requests and schedules are written as in the papers' examples: "A 2/4 @0, B 6/2 @1" are requests of 2 and 6 prompt tokens and 4 and
2 output tokens, which arrive at 0 and 1 s; "A2 B2 | A1 pre B" are an iteration that computes two tokens of each, and one that
computes one of A and preempts B.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from plain_view import PlainRequest
from schedules import Wrapped

from cbatch import BatchShape, Eviction, Limits, Plan, Policy, Request, RequestSpec, Server, View
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor

AMPLE = 10_000


class CostOf:
    """seconds: of an iteration, from its shape."""

    def __init__(self, seconds: Callable[[BatchShape], float]) -> None:
        self.predict = seconds


class Golden(NamedTuple):
    """schedule: as text. ends: seconds at which each request ended. rejected: why, of those that were.

    found: tokens in the prefix cache at the first admission, and at later ones. recomputed: after preemptions.
    """

    schedule: str
    ends: dict[str, float]
    policy: Any
    rejected: dict[str, str]
    found: dict[str, tuple[int, int]]
    recomputed: dict[str, int]


def asked(text: str, **fields: dict[str, Any]) -> dict[str, Request]:
    """Requests by letter. fields: of `RequestSpec`, values by letter."""
    requests = {}
    for entry in text.split(","):
        found = re.fullmatch(r"(\w+) (\d+)/(\d+) @([\d.]+)", entry.strip())
        assert found, entry
        name, prompt, output, arrival = found.groups()
        own = {key: values[name] for key, values in fields.items() if name in values}
        requests[name] = Request(len(requests), int(prompt), int(output), arrival_time=float(arrival), **own)
    return requests


class _Written(Wrapped):
    """Any policy, with its plans written down. A plan that only preempts is made again at once, and adds to the next entry."""

    def __init__(self, policy: Policy, names: dict[Request, str]) -> None:
        super().__init__(policy)
        self.names, self.entries = names, list[str]()
        self._preempted: list[str] = []

    def plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        self._preempted += [f"pre {self.names[request]}" for request in plan.preempt]
        if len(plan):
            self.entries.append(" ".join([*(f"{self.names[each]}{tokens}" for each, tokens in plan), *self._preempted]))
            self._preempted = []
        return plan


def golden(
    policy: Policy,
    requests: str,
    *,
    batch: int = 100,
    tokens: int = AMPLE,
    memory: int = AMPLE,
    block: int = 1,
    seconds: Callable[[BatchShape], float] = lambda shape: 1.0,
    limits: dict[str, Any] | None = None,
    asynchronous: bool = False,
    prefix_cache: Eviction | None = None,
    **fields: dict[str, Any],
) -> Golden:
    """Serves the requests. batch, tokens: of an iteration. memory: blocks of KV cache, each of `block` tokens."""
    made = asked(requests, **fields)
    written = _Written(policy, {request: name for name, request in made.items()})
    within = Limits(batch, tokens, AMPLE, **{"tile": 1, **(limits or {})})
    cost = CostOf(seconds)
    server = Server(SimExecutor(cost), within, cost, KVSize(memory, block), asynchronous, prefix_cache=prefix_cache)
    engine = server.engine(written)
    engine.submit(made.values())
    engine.run()
    ends = {name: request.finished_at or 0.0 for name, request in made.items()}
    rejected = {name: request.reject_reason for name, request in made.items() if request.reject_reason}
    found = {name: (request.num_cached_tokens, request.num_cached_again) for name, request in made.items()}
    recomputed = {name: request.num_recomputed_tokens for name, request in made.items()}
    return Golden(" | ".join(written.entries), ends, policy, rejected, found, recomputed)


def running(id_: int, prompt: int, limit: int, new: int = 0, **fields: Any) -> PlainRequest:
    """A decoding request that has generated `new` tokens."""
    made = PlainRequest.from_spec(RequestSpec(id_, prompt, limit, **fields))
    made.total, made.computed, made.ready = prompt + new, prompt + new - 1, 1
    return made


def view_of(**values: Any) -> View:
    """A view of which a policy's method sees no more than these."""
    return cast(View, SimpleNamespace(**values))
