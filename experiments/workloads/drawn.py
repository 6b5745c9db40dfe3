"""Requests made from columns when they are needed: all at once, or one after another for a long stream."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch import Request, Sampling, WorkloadError
from cbatch.request import spec_of
from cbatch.request_spec import NO_SLO

_AT_ONCE = 1000  # rows that are turned into Python objects together


@dataclass(frozen=True, eq=False)
class Drawn(Sequence[Request]):
    """A sequence of requests, made at the first access; `stream` makes new ones and keeps none.

    columns: fields of `RequestSpec` by name, [requests]; None stands for the default. sampling, stop_tokens: equal for all.
    seeds: sampling seeds of the requests, where `sampling` is no column.
    """

    columns: Mapping[str, NDArray[Any] | Sequence[Any]]
    sampling: Sampling
    seeds: NDArray[np.uint64]
    stop_tokens: tuple[int, ...]

    @cached_property
    def _made(self) -> list[Request]:
        return list(self.stream())

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._made)

    def stream(self) -> Iterator[Request]:
        """Makes and yields the requests, without keeping any. Raises WorkloadError for a value that no request can have."""
        for begin in range(0, len(self), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            parts = {name: column[part] for name, column in self.columns.items()}
            values = {
                name: column.tolist() if isinstance(column, np.ndarray) else column for name, column in parts.items()
            }
            if "sampling" not in values:
                values["sampling"] = [replace(self.sampling, seed=seed) for seed in self.seeds[part].tolist()]
            for id_, row in enumerate(zip(*values.values(), strict=True), begin):
                stated = {name: value for name, value in zip(values, row, strict=True) if value is not None}
                try:
                    yield Request(id_, **{"stop_tokens": self.stop_tokens, **stated})
                except ValueError as error:
                    raise WorkloadError(str(error)) from None


@dataclass(eq=False)
class Totals:
    """Facts about all requests of a run, needed before the run serves any.

    longest: the request with the most tokens. longest_prompt: that with the longest prompt. clients: None stands
    for requests without a client. extra: the keys of `Request.extra`, in order of occurrence. lengths_known: `max_new_tokens` is
    every request's true length. stated: what requests name, as policies depend on it (`Policy`). by_iteration: some requests arrive by iteration. prefixes: some have `prefix_hashes`.
    """

    longest: Request
    longest_prompt: Request
    clients: set[str | None] = field(default_factory=set)
    extra: dict[str, None] = field(default_factory=dict)
    stated: set[str] = field(default_factory=set)
    lengths_known: bool = True
    by_iteration: bool = False
    prefixes: bool = False


def totals_of(requests: Iterable[Request]) -> Totals:
    """Reads each request once, and keeps only the longest. requests: at least one.

    Raises:
        WorkloadError: some requests arrive by iteration and others by time: the first that has not arrived would hold up all others.
    """
    by_time, sessions, priorities = False, set[str](), set[int]()
    others = iter(requests)
    totals = Totals(first := next(others), first)
    for request in chain([first], others):
        if request.max_tokens > totals.longest.max_tokens:
            totals.longest = request
        if request.num_prompt_tokens > totals.longest_prompt.num_prompt_tokens:
            totals.longest_prompt = request
        totals.clients.add(request.client)
        priorities.add(request.priority)
        slo, session = request.slo, request.session
        if slo is not NO_SLO:
            limits = {"ttft": slo.ttft, "tbt": slo.tbt, "objectives": slo.ttft or slo.tbt or slo.total}
            totals.stated.update(name for name, seconds in limits.items() if seconds is not None)
        if session is not None:
            totals.stated.update(("sessions", *["turns"] * (session in sessions)))
            sessions.add(session)
        totals.extra.update(dict.fromkeys(request.extra))
        totals.lengths_known &= not (spec_of(request).has_hidden_length or spec_of(request).can_stop)
        totals.by_iteration |= request.arrival_iteration > 0
        totals.prefixes |= bool(request.prefix_hashes)
        by_time |= request.arrival_time > 0
    totals.stated.update([*["clients"] * (totals.clients != {None}), *["priorities"] * (len(priorities) > 1)])
    if totals.by_iteration and by_time:
        problem = "some requests have an arrival_iteration and some an arrival_time, and the two have no common order"
        raise WorkloadError(f"workload: {problem}; give all requests one of the two")
    return totals
