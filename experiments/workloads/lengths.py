"""Length distributions: prompt and output tokens of requests in an open loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import Field, InstanceOf

from cbatch import Described, WorkloadError
from cbatch.validation import Give, check, not_negative, positive, whole
from experiments.workloads.readers.traces import read_trace
from experiments.workloads.trace import Fit, Floats, Format, Ints, ScaledFit, Trace

LONGEST = 10_000_000  # maximum tokens per request; beyond the positions of any model

PDRatio = Annotated[float, positive("prefill tokens / decode tokens")]
_Several = Annotated[Sequence[PDRatio], Field(min_length=1)]


@runtime_checkable
class Lengths(Protocol):
    """A length distribution."""

    def draw(self, generator: np.random.Generator, num: int, /) -> tuple[Ints, Ints]:
        """Draws prompt tokens and output tokens, each [num] and at least 1."""


def check_pd_ratio(key: str, pd_ratio: float, shortest: int) -> None:
    """Raises WorkloadError unless requests of `shortest` tokens can have this P:D with at least one token of each kind."""
    most = shortest - 1
    if not 1 / most <= pd_ratio <= most:
        allowed = f"requests of {shortest} tokens allow {1 / most:.4g} to {most}"
        raise WorkloadError(f"workload.{key}={pd_ratio}: {allowed}; give a ratio in that range or longer requests")


def split(length: Ints, pd_ratio: float | Floats) -> tuple[Ints, Ints]:
    """Splits `length` into prompt and output tokens, in the ratio P:D as closely as whole tokens allow."""
    output_tokens = np.floor(length / (1 + pd_ratio) + 0.5).astype(np.int64)
    return length - output_tokens, output_tokens


class _Checked(Described):
    """Base of distributions that validate their fields by type on construction. Raises WorkloadError."""

    def __post_init__(self) -> None:
        check(self, "workload.lengths.", WorkloadError)


@dataclass(frozen=True, kw_only=True, repr=False)
class FixedLengths(_Checked):
    """Every request has `length` tokens, split at P:D = `pd_ratio`. Several ratios apply one after another, to equal shares of requests."""

    length: Annotated[int, whole(2)]
    pd_ratio: Annotated[PDRatio | _Several, Give("a number above 0, or several, as in [50,5,14]")]

    def __post_init__(self) -> None:
        super().__post_init__()
        for ratio in np.atleast_1d(self.pd_ratio).tolist():
            check_pd_ratio("lengths.pd_ratio", ratio, self.length)

    def draw(self, _: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        ratios = np.atleast_1d(np.asarray(self.pd_ratio, np.float64))
        return split(np.full(num, self.length), ratios[np.arange(num) * len(ratios) // max(num, 1)])


@dataclass(frozen=True, kw_only=True, repr=False)
class _Range(_Checked):
    """Total lengths from `min_length` to `max_length` tokens, inclusive, split at P:D = `pd_ratio`."""

    min_length: Annotated[int, whole(2)]
    max_length: Annotated[int, whole(2, LONGEST)]
    pd_ratio: PDRatio

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < self.min_length:
            given = f"workload.lengths.max_length={self.max_length}"
            raise WorkloadError(f"{given}: give at least lengths.min_length={self.min_length}")
        check_pd_ratio("lengths.pd_ratio", self.pd_ratio, self.min_length)


@dataclass(frozen=True, kw_only=True, repr=False)
class UniformLengths(_Range):
    """Total lengths drawn uniformly from the range."""

    def draw(self, generator: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        return split(generator.integers(self.min_length, self.max_length, num, endpoint=True), self.pd_ratio)


@dataclass(frozen=True, kw_only=True, repr=False)
class ZipfLengths(_Range):
    """Total lengths from the range, the k-th shortest with probability proportional to 1 / k^theta.

    theta 0 is uniform. SARATHI (arXiv:2308.16369, Fig 12) uses theta 0.4 over 1K .. 4K with P:D = 10. The law over the
    rank k = L - min_length + 1 is taken from Vidur's generator, by the same authors.
    """

    theta: Annotated[float, not_negative("0 is uniform")]

    def draw(self, generator: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        length = np.arange(self.min_length, self.max_length + 1)
        weights = np.power(length - self.min_length + 1.0, -self.theta, dtype=np.float64)
        return split(generator.choice(length, num, p=weights / weights.sum()), self.pd_ratio)


@dataclass(frozen=True, kw_only=True, repr=False)
class TraceLengths(_Checked, ScaledFit):
    """The lengths of a trace or length table, with prompt and output from the same row. Arrival times are not used.

    path, format: see `experiments.workloads.readers.traces.read_trace`. order: "file" takes rows in order, "random" draws rows with replacement.
    """

    path: str
    format: Format = "auto"
    order: Literal["file", "random"] = "file"

    section = "workload.lengths"

    def draw(self, generator: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        in_order = self.order == "file"
        trace = self._trace
        if in_order and num > len(trace):
            remedy = "ask for fewer, or set workload.lengths.order=random"
            raise WorkloadError(f"{self.path}: has {len(trace)} rows, workload.num_requests={num}; {remedy}")
        trace = self.fit(trace, num if in_order else None)
        rows = slice(num) if in_order else generator.integers(len(trace), size=num)
        return trace.prompt_tokens[rows], trace.output_tokens[rows]

    @cached_property
    def _trace(self) -> Trace:
        return read_trace(self.path, self.format, "workload.lengths", timed=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class Part(Described):
    """A kind of requests. share: its share of all requests, relative to the shares of the other kinds."""

    share: Annotated[float, positive("shares need not sum to 1")]
    lengths: Annotated[InstanceOf[Lengths], Give("keys of it, as in {_target_: ..., length: 65536, pd_ratio: 100}")]


@dataclass(frozen=True, kw_only=True, repr=False)
class MixedLengths(_Checked):
    """Draws the kind of each request at random, for example a share of long contexts (Medha).

    parts: kinds by name, each with the fields of `Part`.
    """

    parts: Annotated[Mapping[str, Part], Give("kinds by name, as in {short: {share: 0.95, lengths: ...}, ...}")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parts:
            raise WorkloadError("workload.lengths.parts={}: give at least one kind of requests")

    def draw(self, generator: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        parts = list(self.parts.values())
        choosing, *drawing = generator.spawn(1 + len(parts))
        shares = np.array([part.share for part in parts])
        kinds = choosing.choice(len(parts), num, p=shares / shares.sum())
        prompts, outputs = np.zeros((2, num), np.int64)
        for kind, (part, random) in enumerate(zip(parts, drawing, strict=True)):
            chosen = kinds == kind
            prompts[chosen], outputs[chosen] = part.lengths.draw(random, int(chosen.sum()))
        return prompts, outputs


def limit_lengths(lengths: Lengths, positions: int, max_new_tokens: int | str) -> Lengths:
    """Returns lengths whose `too_long` also applies to a model's positions, including each kind of a mix."""
    match lengths:
        case Fit():
            return lengths.limit_to(positions, max_new_tokens)
        case MixedLengths(parts=parts):
            kinds = {name: limit_lengths(part.lengths, positions, max_new_tokens) for name, part in parts.items()}
            return replace(lengths, parts={name: replace(parts[name], lengths=kinds[name]) for name in parts})
    return lengths
