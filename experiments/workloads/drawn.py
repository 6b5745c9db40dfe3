"""Requests made from columns when they are needed: all at once, or one after another for a long stream."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch import Request, Sampling, WorkloadError

_AT_ONCE = 1000  # rows that are turned into Python objects together


@dataclass(frozen=True, eq=False)
class Drawn(Sequence[Request]):
    """A sequence of requests, made at the first access; `stream` makes new ones and keeps none.

    columns: fields of `RequestSpec` by name, [requests]; None stands for the default. sampling, stop_tokens: equal for all.
    seeds: sampling seeds of the requests, where `sampling` is no column.
    iterations: by id, the iterations of the requests that arrive by iteration.
    """

    columns: Mapping[str, NDArray[Any] | Sequence[Any]]
    sampling: Sampling
    seeds: NDArray[np.uint64]
    stop_tokens: tuple[int, ...]
    iterations: Mapping[int, int]

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
            values = dict[str, Sequence[Any]]()
            for name, column in self.columns.items():
                rows = column[part]
                values[name] = rows.tolist() if isinstance(rows, np.ndarray) else rows
            if "sampling" not in values:
                values["sampling"] = [replace(self.sampling, seed=seed) for seed in self.seeds[part].tolist()]
            for id_, row in enumerate(zip(*values.values(), strict=True), begin):
                stated = {name: value for name, value in zip(values, row, strict=True) if value is not None}
                try:
                    yield Request(id_, **{"stop_tokens": self.stop_tokens, **stated})
                except ValueError as error:
                    raise WorkloadError(str(error)) from None
