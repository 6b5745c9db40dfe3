"""Adds what traces and length distributions lack: the visible limit, service classes, objectives, predictions.

Each column has its own random stream, so that adding one changes no other, and the values of request i do not depend on
the number of requests.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from cbatch import SLO, WorkloadError
from cbatch.request_spec import NO_SLO
from cbatch.validation import Give, not_negative
from experiments.workloads.seeds import Histogram, Stream, generator
from experiments.workloads.trace import MOST_TOKENS, Column, Ints

Limit = Annotated[
    Literal["exact"] | Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)],
    Give("exact, or a whole number of tokens, at least 1"),
]
BatchSize = Annotated[int, Field(ge=1, strict=True), Give("the batch size, a whole number of requests, at least 1")]
Share = Annotated[float, Field(gt=0, le=1, strict=True), Give("a number above 0, at most 1")]


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A service class. share: of all requests. slo: None takes that of the workload."""

    share: Share
    priority: Annotated[int, Field(strict=True), Give("a whole number")] = 0
    slo: SLO | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Output lengths predicted with a lognormal relative error. error: sigma of its logarithm; 0 is exact."""

    error: Annotated[float, not_negative("0 is exact")]


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """The fields of `RequestSpec` that a workload adds.

    max_new_tokens: the limit that policies see. "exact": each request's true output length. A number limits all
        requests: longer outputs end there.
    tiers: service classes by name, drawn in proportion to their shares, which sum to 1.
    slo: objectives of requests whose tier has none.
    prediction: fills `predicted_new_tokens`.
    pad_outputs: each group of this many consecutive requests gets its longest output, which is what a system computes
        that returns a batch as a whole, with a batch of that size (FasterTransformer; Orca, OSDI 2022, section 2).
    """

    max_new_tokens: Limit = "exact"
    tiers: dict[str, Tier] = field(default_factory=dict)
    slo: SLO = NO_SLO
    prediction: Prediction | None = None
    pad_outputs: BatchSize | None = None

    def __post_init__(self) -> None:
        total = sum(tier.share for tier in self.tiers.values())
        if self.tiers and abs(total - 1) > 1e-6:
            raise WorkloadError(f"workload.tiers: the shares sum to {total:g}; give shares that sum to 1")

    def columns(self, output_tokens: Ints, seed: int) -> dict[str, Column]:
        """Fields of `RequestSpec` by name, [requests] each, for requests with these true output lengths."""
        num = len(output_tokens)
        if self.pad_outputs is not None:
            longest = np.maximum.reduceat(output_tokens, np.arange(0, num, self.pad_outputs))
            output_tokens = np.repeat(longest, self.pad_outputs)[:num]
        columns: dict[str, Column] = {"max_new_tokens": output_tokens}
        if self.max_new_tokens != "exact":
            columns["max_new_tokens"] = np.full(num, self.max_new_tokens)
            columns["true_new_tokens"] = output_tokens
            output_tokens = np.minimum(output_tokens, self.max_new_tokens)
        if self.prediction is not None:
            errors = np.exp(self.prediction.error * generator(seed, Stream.PREDICTIONS).standard_normal(num))
            predicted = np.clip(np.floor(output_tokens * errors + 0.5), 1, MOST_TOKENS)
            columns["predicted_new_tokens"] = predicted.astype(np.int64)
        if self.slo != NO_SLO:
            columns["slo"] = _column([self.slo] * num)
        return columns | self._tier_columns(seed, num)

    def _tier_columns(self, seed: int, num: int) -> dict[str, Column]:
        if not self.tiers:
            return {}
        shares = np.array([tier.share for tier in self.tiers.values()])
        drawn = Histogram(np.arange(len(shares)), shares).draw(generator(seed, Stream.TIERS), num)
        return {
            "tier": _column(list(self.tiers))[drawn],
            "priority": np.array([tier.priority for tier in self.tiers.values()])[drawn],
            "slo": _column([tier.slo or self.slo for tier in self.tiers.values()])[drawn],
        }


def _column(values: list[Any]) -> Column:
    return np.array(values, dtype=object)
