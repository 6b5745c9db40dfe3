"""Requests as columns: what a trace file, a generator or a length distribution says of them, without tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cbatch import WorkloadError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Strings = NDArray[np.str_]
Column = NDArray[Any]

Format = Literal["auto", "azure", "mooncake", "lengths", "vtc", "decisions"]
"""Of a trace file, see `experiments.workloads.readers.traces`."""

MOST_TOKENS = 2**31 - 1
"""No length is greater: sums and 32-bit columns stay in range."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """Requests in order of arrival; each column has shape [rows].

    source: the file or generator, for messages.
    prompt_tokens, output_tokens: at least 1 each.
    arrival_time: seconds, never decreasing, from the first row of a file; None if the source has no times.
    line: the line of the file that each row was read from, counted from 1; None for generated rows.
    fields: other fields of `RequestSpec` by name; None for rows without a value.
    """

    source: str
    prompt_tokens: Ints
    output_tokens: Ints
    arrival_time: Floats | None = None
    line: Ints | None = None
    fields: Mapping[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def where(self, row: int) -> str:
        """Names a row in a message."""
        return f"{self.source}, row {row + 1}" if self.line is None else f"{self.source}, line {self.line[row]}"

    def select(self, rows: slice | NDArray[np.bool_]) -> "Trace":
        """The rows named by a slice or a mask, in their order, with times from the first of them."""
        times = None if self.arrival_time is None else self.arrival_time[rows]
        return Trace(
            source=self.source,
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            arrival_time=times if times is None or len(times) == 0 else times - times[0],
            line=None if self.line is None else self.line[rows],
            fields={name: column[rows] for name, column in self.fields.items()},
        )

    def first(self, num_requests: int | None) -> "Trace":
        """The first rows; None keeps all. Raises WorkloadError if there are fewer."""
        if num_requests is not None and num_requests > len(self):
            found = f"{len(self)} requests are usable; ask for at most {len(self)}"
            raise WorkloadError(f"{self.source}: workload.num_requests={num_requests}, but {found}")
        return self.select(slice(num_requests))
