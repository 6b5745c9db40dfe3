"""How long the requests of an open loop are: prompt and output tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from cbatch.errors import WorkloadError
from experiments.workloads.checks import (
    bad_setting,
    check_at_most,
    check_choice,
    check_not_negative,
    check_positive,
    check_whole,
)
from experiments.workloads.fit import TooLong, fit
from experiments.workloads.histogram import Histogram
from experiments.workloads.readers import Format, read_trace
from experiments.workloads.trace import Floats, Ints

LONGEST = 10_000_000
"""Tokens of a request; beyond any model's positions."""


class Lengths(Protocol):
    """A length distribution."""

    def draw(self, generator: np.random.Generator, num: int, /) -> tuple[Ints, Ints]:
        """Prompt tokens and output tokens, [num] each, at least 1."""


def check_pd_ratio(key: str, pd_ratio: float, shortest: int) -> None:
    """Raise WorkloadError unless requests of `shortest` tokens can have this P:D with a token of each kind."""
    check_positive(key, pd_ratio, "prefill tokens / decode tokens")
    most = shortest - 1
    if not 1 / most <= pd_ratio <= most:
        raise bad_setting(
            key,
            pd_ratio,
            f"requests of {shortest} tokens allow {1 / most:.4g} to {most}; "
            "give a ratio in that range or longer requests",
        )


def split(length: Ints, pd_ratio: float | Floats) -> tuple[Ints, Ints]:
    """Prompt and output tokens that sum to `length`, in the ratio P:D as closely as whole tokens allow."""
    output_tokens = np.floor(length / (1 + pd_ratio) + 0.5).astype(np.int64)
    return length - output_tokens, output_tokens


@dataclass(frozen=True, kw_only=True)
class FixedLengths:
    """Every request has `length` tokens in all, split at P:D = `pd_ratio`."""

    length: int
    pd_ratio: float

    def __post_init__(self) -> None:
        check_whole("lengths.length", self.length, 2)
        check_pd_ratio("lengths.pd_ratio", self.pd_ratio, self.length)

    def draw(self, _: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        return split(np.full(num, self.length), self.pd_ratio)


@dataclass(frozen=True, kw_only=True)
class DriftingLengths:
    """Every request has `length` tokens in all, and P:D changes on the way: each of `pd_ratios` in turn.

    The ratios have equal shares of the requests, give or take one.
    """

    length: int
    pd_ratios: Sequence[float]

    def __post_init__(self) -> None:
        check_whole("lengths.length", self.length, 2)
        if not isinstance(self.pd_ratios, Sequence) or isinstance(self.pd_ratios, str) or not self.pd_ratios:
            raise bad_setting("lengths.pd_ratios", self.pd_ratios, "give a list of ratios, as in [50,5,14]")
        for ratio in self.pd_ratios:
            check_pd_ratio("lengths.pd_ratios", ratio, self.length)

    def draw(self, _: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        phase = np.arange(num) * len(self.pd_ratios) // num
        return split(np.full(num, self.length), np.asarray(self.pd_ratios, dtype=np.float64)[phase])


@dataclass(frozen=True, kw_only=True)
class UniformLengths:
    """Total lengths evenly from `min_length` to `max_length` tokens, both included, split at P:D = `pd_ratio`."""

    min_length: int
    max_length: int
    pd_ratio: float

    def __post_init__(self) -> None:
        _check_range(self.min_length, self.max_length, self.pd_ratio)

    def draw(self, generator: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        return split(generator.integers(self.min_length, self.max_length, num, endpoint=True), self.pd_ratio)


@dataclass(frozen=True, kw_only=True)
class ZipfLengths:
    """Total lengths from `min_length` to `max_length`, the k-th shortest with probability proportional to 1 / k^theta.

    theta 0 is uniform. SARATHI (arXiv:2308.16369, Fig 12) has theta 0.4 over 1K .. 4K with P:D = 10; the law over the
    rank k = L - min_length + 1 is the one of Vidur's generator, by the same authors.
    """

    theta: float
    min_length: int
    max_length: int
    pd_ratio: float

    def __post_init__(self) -> None:
        check_not_negative("lengths.theta", self.theta, "0 is uniform")
        _check_range(self.min_length, self.max_length, self.pd_ratio)

    def draw(self, generator: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        length = np.arange(self.min_length, self.max_length + 1)
        weights = np.power(length - self.min_length + 1.0, -self.theta, dtype=np.float64)
        return split(Histogram(length, weights).draw(generator, num), self.pd_ratio)


def _check_range(min_length: int, max_length: int, pd_ratio: float) -> None:
    check_whole("lengths.min_length", min_length, 2)
    check_whole("lengths.max_length", max_length, 2)
    check_at_most("lengths.max_length", max_length, LONGEST)
    if max_length < min_length:
        raise bad_setting("lengths.max_length", max_length, f"give at least lengths.min_length={min_length}")
    check_pd_ratio("lengths.pd_ratio", pd_ratio, min_length)


@dataclass(frozen=True, kw_only=True)
class TraceLengths:
    """The lengths of a trace or length table, prompt and output of one row together; its arrival times are not used.

    Fields:
        path, format: see `read_trace`.
        order: "file" takes rows from the first on, "random" draws them with replacement.
        length_scale, max_length, too_long: see `fit`.
    """

    path: str
    format: Format = "auto"
    order: Literal["file", "random"] = "file"
    length_scale: float = 1.0
    max_length: int | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        check_choice("lengths.order", self.order, ("file", "random"))

    def draw(self, generator: np.random.Generator, num: int) -> tuple[Ints, Ints]:
        in_order = self.order == "file"
        trace = read_trace(self.path, self.format)
        if in_order and num > len(trace):
            raise WorkloadError(
                f"{self.path}: has {len(trace)} rows, workload.num_requests={num}: "
                "ask for fewer, or set workload.lengths.order=random"
            )
        trace = fit(trace, self.length_scale, self.max_length, self.too_long, num if in_order else None)
        rows = slice(num) if in_order else generator.integers(len(trace), size=num)
        return trace.prompt_tokens[rows], trace.output_tokens[rows]
