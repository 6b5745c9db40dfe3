"""Requests as columns, without tokens, from a trace file, a generator or a length distribution."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from cbatch import WorkloadError
from cbatch.validation import positive, whole

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Strings = NDArray[np.str_]
Column = NDArray[Any]

Format = Literal["auto", "azure", "bailian", "mooncake", "lengths", "vtc", "decisions"]
"""Format of a trace file; see `experiments.workloads.readers.traces`."""

MOST_TOKENS = 2**31 - 1  # maximum length, so that sums and 32-bit columns stay in range


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """Requests in order of arrival; each column has shape [rows].

    source: the file or generator, for messages.
    prompt_tokens, output_tokens: at least 1 each.
    arrival_time: seconds since the first row of a file, never decreasing; None if the source has no times.
    line: line number of each row in its file, from 1; None for generated rows.
    fields: other fields of `RequestSpec` by name, and `arrival_iteration`. Rows without a value have None.
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
        """Returns the place of a row, for messages."""
        return f"{self.source}, row {row + 1}" if self.line is None else f"{self.source}, line {self.line[row]}"

    def select(self, rows: slice | NDArray[np.bool_]) -> "Trace":
        """Returns the rows of a slice or a mask, in order. Times count from the first selected row."""
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
        """Returns the first rows; None: all rows. Raises WorkloadError if there are fewer rows."""
        if num_requests is not None and num_requests > len(self):
            usable = f"{len(self)} requests are usable; ask for at most {len(self)}"
            raise WorkloadError(f"{self.source}: workload.num_requests={num_requests}, but {usable}")
        return self.select(slice(num_requests))


def prefix_of(groups: Ints, size: int) -> dict[str, Column]:
    """Returns the fields of requests whose prompts begin with `size` tokens of their group, [rows] each. groups: [rows]."""
    ids = [(group,) for group in groups.tolist()]
    return {"prefix_hashes": np.fromiter(ids, object, len(ids)), "hash_block": np.full(len(ids), size)}


def join_clients(source: str, parts: Iterable[tuple[Column, Floats, Ints, Ints]], num: int | None = None) -> Trace:
    """Returns the first `num` requests of several clients in order of arrival; None: all requests.

    parts: columns with client, arrival times, prompt and output tokens. Parts may differ in length.
    """
    columns = list(map(np.concatenate, zip(*parts, strict=True)))
    rows = np.argsort(columns[1], kind="stable")[:num]
    clients, times, prompts, outputs = (column[rows] for column in columns)
    fields = {"client": clients}
    return Trace(source=source, prompt_tokens=prompts, output_tokens=outputs, arrival_time=times, fields=fields)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Common fields of workloads that read lengths from a file.

    max_length: maximum tokens of prompt and output together; None: no limit.
    new_tokens: counted instead of each output's length; None: output lengths are counted.
    too_long: for longer requests, "error" raises, "drop" leaves them out, "clip" shortens the prompt, like a server that
        truncates prompts, and shortens the output only if the prompt is down to 1 token.
    """

    max_length: Annotated[int, whole(2)] | None = None
    new_tokens: Annotated[int, whole(1)] | None = None
    too_long: Literal["error", "clip", "drop"] = "error"

    section: ClassVar[str] = "workload"

    def limit_to(self, positions: int, max_new_tokens: int | str = "exact", *, refuse: bool = False) -> Self:
        """Limits `max_length` to a model's positions, with too_long=error only to `refuse` a line by its number; else the engine refuses it."""
        if self.too_long == "error" and not refuse:
            return self
        new_tokens = max_new_tokens if isinstance(max_new_tokens, int) else self.new_tokens
        return replace(self, max_length=min(self.max_length or positions, positions), new_tokens=new_tokens)

    def fit(self, trace: Trace, num_requests: int | None = None) -> Trace:
        """Returns the first requests of a trace that are not dropped, with lengths that fit; None: all requests.

        Raises WorkloadError if a request is too long, or if there are fewer than `num_requests`.
        """
        if self.max_length is None:
            return trace.first(num_requests)
        fits = trace.prompt_tokens + self._limits(trace) <= self.max_length
        limit = f"{self.section}.max_length={self.max_length} (as set, or the model's positions)"
        limit += f"; raise it if it is set, choose another model, or set {self.section}.too_long"
        if self.too_long == "drop" and not fits.any():
            raise WorkloadError(f"{trace.source}: every request exceeds {limit}=clip")
        trace = (trace.select(fits) if self.too_long == "drop" else trace).first(num_requests)
        if self.too_long == "error" and not (fits := fits[: len(trace)]).all():
            row = int(np.argmin(fits))
            lengths = f"{trace.prompt_tokens[row]} prompt + {self._limits(trace)[row]} output tokens"
            raise WorkloadError(f"{trace.where(row)}: {lengths} exceed {limit} to clip or drop")
        return _clip(trace, self.max_length, self._limits(trace)) if self.too_long == "clip" else trace

    def _limits(self, trace: Trace) -> Ints:
        """Returns the maximum output tokens of each request, from its line in the file or from the workload."""
        limits = np.full(len(trace), self.new_tokens) if self.new_tokens else trace.output_tokens
        stated = trace.fields.get("max_new_tokens", np.full(len(trace), None))
        return np.where(stated == None, limits, stated).astype(np.int64)  # noqa: E711 - for each row


@dataclass(frozen=True, kw_only=True)
class ScaledFit(Fit):
    """Fields of `Fit`, for requests without text.

    length_scale: for small models, multiplies prompt and output lengths before limits apply; rounded, at least 1 token each.
    """

    length_scale: Annotated[float, positive("1 keeps the lengths of the trace")] = 1.0

    def fit(self, trace: Trace, num_requests: int | None = None) -> Trace:
        if self.length_scale != 1:
            trace = _scale(trace, float(self.length_scale))
        return super().fit(trace, num_requests)


def _scale(trace: Trace, factor: float) -> Trace:
    """Multiplies the tokens of each request, including its limits and predictions. Raises WorkloadError if the trace has prompts."""
    if "prompt" in trace.fields:
        problem = f"{trace.source} has prompts, whose tokens cannot be scaled"
        remedy = "leave it out, or give workload.max_length=TOKENS and workload.too_long=clip"
        raise WorkloadError(f"workload.length_scale={factor:g}: {problem}; {remedy}")
    columns = np.array([trace.prompt_tokens, trace.output_tokens]) * factor
    prompts, outputs = np.clip(np.floor(columns + 0.5), 1, MOST_TOKENS).astype(np.int64)
    fields = dict(trace.fields)
    for name in {"max_new_tokens", "true_new_tokens", "predicted_new_tokens"} & fields.keys():
        scaled = [number and min(max(int(number * factor + 0.5), 1), MOST_TOKENS) for number in fields[name]]
        fields[name] = np.array(scaled, object)  # None stays None
    if "hash_block" in fields:
        sizes = fields["hash_block"] * factor
        fields["hash_block"] = np.where(sizes % 1 == 0, sizes, 0).astype(np.int64)  # 0: no whole tokens per id
    return replace(trace, prompt_tokens=prompts, output_tokens=outputs, fields=fields)


def _clip(trace: Trace, max_length: int, new_tokens: Ints) -> Trace:
    output_tokens = np.minimum(trace.output_tokens, max_length - 1)
    prompt_tokens = np.minimum(trace.prompt_tokens, max_length - np.minimum(new_tokens, max_length - 1))
    fields = dict(trace.fields)
    if "max_new_tokens" in fields:
        fields["max_new_tokens"] = np.minimum(new_tokens, max_length - 1)
    sizes = fields.get("hash_block", np.zeros(len(trace), np.int64))
    for name in {"prompt", "prefix_hashes"} & fields.keys():
        fields[name] = fields[name].copy()
        for row in np.flatnonzero(prompt_tokens < trace.prompt_tokens):
            values, kept, whole = fields[name][row], int(prompt_tokens[row]), int(trace.prompt_tokens[row])
            of_each = int(sizes[row]) if name == "prefix_hashes" else 1
            fields[name][row] = values[: -(-kept // of_each) if of_each else -(-len(values) * kept // whole)]
    return replace(trace, prompt_tokens=prompt_tokens, output_tokens=output_tokens, fields=fields)
