"""The requests of a workload, made from columns when they are needed: all at once, or one after another for a long stream."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from cbatch import Request, Sampling
from cbatch.request import spec_of

_AT_ONCE = 1000  # rows that are turned into Python objects together


@dataclass(frozen=True, eq=False)
class Drawn(Sequence[Request]):
    """A sequence of requests, made when one of them is first asked for; `stream` makes others and keeps none.

    columns: fields of `RequestSpec` by name, [requests]; None stands for the default. sampling, stop_tokens: of every request.
    seeds: of their sampling, where `sampling` is no column.
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

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._made[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._made)

    def stream(self) -> Iterator[Request]:
        """Makes each request as it is asked for."""
        for begin in range(0, len(self), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            values = {name: _listed(column[part]) for name, column in self.columns.items()}
            if "sampling" not in values:
                values["sampling"] = [replace(self.sampling, seed=seed) for seed in self.seeds[part].tolist()]
            for id_, row in enumerate(zip(*values.values(), strict=True), begin):
                given = {name: value for name, value in zip(values, row, strict=True) if value is not None}
                yield Request(id_, stop_tokens=self.stop_tokens, **given)


def _listed(column: NDArray[Any] | Sequence[Any]) -> Sequence[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else column


@dataclass(eq=False)
class Totals:
    """What a run needs to know of all its requests before it serves them.

    longest: the request of the most tokens. longest_prompt, new_tokens: tokens; the latter of all requests. clients: None stands for
    requests that name none. extra: names of attributes of their own, in the order in which they occur. lengths_known: whether
    `max_new_tokens` is every request's true length. by_iteration: whether some arrive by iteration.
    """

    longest: Request
    longest_prompt: int = 0
    new_tokens: int = 0
    clients: set[str | None] = field(default_factory=set)
    extra: dict[str, None] = field(default_factory=dict)
    lengths_known: bool = True
    by_iteration: bool = False


def totals_of(requests: Iterable[Request]) -> Totals:
    """Looks at each request once, and holds none but the longest; there is at least one."""
    others = iter(requests)
    totals = Totals(first := next(others))
    for request in chain([first], others):
        if request.max_tokens > totals.longest.max_tokens:
            totals.longest = request
        totals.longest_prompt = max(totals.longest_prompt, request.num_prompt_tokens)
        totals.new_tokens += request.max_new_tokens
        totals.clients.add(request.client)
        totals.extra.update(dict.fromkeys(request.extra))
        totals.lengths_known &= not spec_of(request).has_hidden_length
        totals.by_iteration |= request.arrival_iteration > 0
    return totals
