"""Facts about all requests of a run, which limits, KV cache and reports need before the first one arrives."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from cbatch.request import Request, spec_of
from cbatch.request_spec import NO_SLO


@dataclass(eq=False)
class Facts:
    """Facts about all requests of a run, needed before the run serves any.

    number: number of requests; None if it is not known beforehand. longest: the request with the most tokens.
    longest_prompt: the request with the longest prompt. is_open: longer requests may follow.
    clients: None stands for requests without a client. extra: the keys of `Request.extra`, in order of occurrence.
    stated: what some requests state, by the names in `Policy.depends_on`. lengths_known: `max_new_tokens` is the true length of every
    request. prefixes: some requests state which prefixes their prompts share.
    num_warming: requests that only fill the prefix cache before the measured part of the run.
    """

    longest: Request
    longest_prompt: Request
    number: int | None = 0
    is_open: bool = False
    clients: set[str | None] = field(default_factory=set)
    extra: dict[str, None] = field(default_factory=dict)
    stated: set[str] = field(default_factory=set)
    lengths_known: bool = True
    prefixes: bool = False
    num_warming: int = 0


def facts_of(requests: Iterable[Request]) -> Facts:
    """Reads each request once, and keeps only the longest. requests: at least one."""
    sessions, priorities = set[str](), set[int]()
    others = iter(requests)
    facts = Facts(first := next(others), first)
    for facts.number, request in enumerate(chain([first], others), 1):
        if request.max_tokens > facts.longest.max_tokens:
            facts.longest = request
        if request.num_prompt_tokens > facts.longest_prompt.num_prompt_tokens:
            facts.longest_prompt = request
        facts.clients.add(request.client)
        priorities.add(request.priority)
        slo, session = request.slo, request.session
        if slo is not NO_SLO:
            some = slo.ttft or slo.tbt or slo.total
            limits = {"ttft": slo.ttft, "tbt": slo.tbt, "objectives": some, "tpot": slo.tpot}
            facts.stated.update(name for name, seconds in limits.items() if seconds is not None)
        if session is not None:
            paused = ["pauses"] * (request.pause is not None)
            facts.stated.update(("sessions", *["turns"] * (session in sessions), *paused))
            sessions.add(session)
        facts.extra.update(dict.fromkeys(request.extra))
        facts.lengths_known &= not (spec_of(request).has_hidden_length or spec_of(request).can_stop)
        facts.prefixes |= bool(request.prefix_hashes or request.texts)
    facts.stated.update([*["clients"] * (facts.clients != {None}), *["priorities"] * (len(priorities) > 1)])
    return facts
