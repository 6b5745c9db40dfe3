"""Adds what traces and length distributions lack: the visible limit, service classes, objectives, predictions.

Each column has its own random stream, so that adding one changes no other, and the values of request i do not depend on
the number of requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from cbatch import SLO, Described, WorkloadError
from cbatch.request_spec import NO_SLO
from cbatch.validation import Give, check, not_negative, positive
from experiments.workloads.seeds import Stream, generator
from experiments.workloads.trace import MOST_TOKENS, Column, Ints

Limit = Annotated[
    Literal["exact"] | Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)],
    Give("exact, or a whole number of tokens, at least 1"),
]
BatchSize = Annotated[int, Field(ge=1, strict=True), Give("the batch size, a whole number of requests, at least 1")]
Timeout = Annotated[float, positive("seconds after its arrival at which a request's client leaves")]
Share = Annotated[float, Field(gt=0, le=1, strict=True), Give("a number above 0, at most 1")]


@dataclass(frozen=True, kw_only=True, repr=False)
class Tier(Described):
    """A service class. share: of all requests. slo: None takes that of the workload."""

    share: Share
    priority: Annotated[int, Field(strict=True), Give("a whole number")] = 0
    slo: SLO | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction(Described):
    """Output lengths predicted with a lognormal relative error. error: sigma of its logarithm; 0 is exact."""

    error: Annotated[float, not_negative("0 is exact")]


@dataclass(frozen=True, kw_only=True, repr=False)
class Annotations(Described):
    """Fields of every workload: what it adds to each `RequestSpec`; None adds nothing.

    max_new_tokens: the limit that policies see. "exact": each request's true output length. A number limits all
        requests: longer outputs end there.
    tiers: service classes by name, drawn in proportion to their shares, which sum to 1.
    slo: objectives of requests whose tier has none.
    prediction: fills `predicted_new_tokens`.
    timeout: seconds after its arrival at which each request's client leaves, if it has not been served.
    pad_outputs: each group of this many consecutive requests gets its longest output, which is what a system computes
        that returns a batch as a whole, with a batch of that size (FasterTransformer; Orca, OSDI 2022, section 2).
    """

    max_new_tokens: Limit = "exact"
    tiers: Mapping[str, Tier] | None = None
    slo: SLO | None = None
    prediction: Prediction | None = None
    timeout: Timeout | None = None
    pad_outputs: BatchSize | None = None

    def __post_init__(self) -> None:
        check(self, "workload.", WorkloadError)
        if self.tiers and abs(1 - (total := sum(tier.share for tier in self.tiers.values()))) > 1e-6:
            raise WorkloadError(f"workload.tiers: the shares sum to {total:g}; give shares that sum to 1")

    def annotate(self, output_tokens: Ints, seed: int) -> dict[str, Column]:
        """Fields of `RequestSpec` by name, [requests] each, for requests with these true output lengths."""
        num = len(output_tokens)
        if self.pad_outputs is not None:
            longest = np.maximum.reduceat(output_tokens, np.arange(0, num, self.pad_outputs))
            output_tokens = np.repeat(longest, self.pad_outputs)[:num]
        columns = self._limited(output_tokens)
        if self.prediction is not None:
            errors = np.exp(self.prediction.error * generator(seed, Stream.PREDICTIONS).standard_normal(num))
            generated = np.minimum(output_tokens, columns["max_new_tokens"])
            predicted = np.clip(np.floor(generated * errors + 0.5), 1, MOST_TOKENS)
            columns["predicted_new_tokens"] = predicted.astype(np.int64)
        if self.timeout is not None:
            columns["timeout"] = np.full(num, self.timeout)
        if self.slo is not None:
            columns["slo"] = np.full(num, self.slo, object)
        if self.tiers:
            shares = np.array([tier.share for tier in self.tiers.values()])
            drawn = generator(seed, Stream.TIERS).choice(len(shares), num, p=shares / shares.sum())
            of_tiers = [(name, tier.priority, tier.slo or self.slo or NO_SLO) for name, tier in self.tiers.items()]
            columns |= zip(("tier", "priority", "slo"), np.array(of_tiers, object)[drawn].T, strict=True)
        return columns

    def _limited(self, output_tokens: Ints) -> dict[str, Column]:
        """Returns the limits of requests, and the true lengths that they hide."""
        if self.max_new_tokens == "exact":
            return {"max_new_tokens": output_tokens}
        return {"max_new_tokens": np.full(len(output_tokens), self.max_new_tokens), "true_new_tokens": output_tokens}
