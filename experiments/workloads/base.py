"""The base class of workloads: the fields that all workloads have, and the conversion of columns to requests.

Service classes and predictions have separate random streams: adding one changes no other. The values of request i do not depend on
the number of requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidatorFunctionWrapHandler

from cbatch import SLO, Described, Request, Sampling, WorkloadError
from cbatch.arrivals import Arrivals, listed
from cbatch.model.checkpoint import Vocabulary as Vocabulary  # for the workloads of a user
from cbatch.request_spec import LATEST_ARRIVAL, NO_SLO
from cbatch.validation import Give, check, not_negative, positive, whole
from experiments.workloads.drawn import Drawn
from experiments.workloads.seeds import Purpose, generator, request_seeds
from experiments.workloads.trace import MOST_TOKENS, Column, Ints, Trace

MOST_REQUESTS = 10_000_000  # the most requests of a run
_LOAD = "a share above 0, at most 10, not percent: 0.5 for half of the highest rate that any policy can sustain"


def as_range(value: object, accept: ValidatorFunctionWrapHandler) -> Any:
    """Validates the least and the most of a range, given as a list, a tuple, or a single number for both."""
    pair = tuple(value) if isinstance(value, list) else (value, value) if isinstance(value, int | float) else value
    least, most = accept(pair)
    if least > most:
        raise ValueError
    return least, most


Limit = Annotated[
    Literal["exact"] | Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)],
    Give("exact, or a whole number of tokens, at least 1"),
]
BatchSize = Annotated[int, Field(ge=1, strict=True), Give("the batch size, a whole number of requests, at least 1")]
Timeout = Annotated[float, positive("seconds after its arrival at which a request's client leaves")]
Share = Annotated[float, Field(gt=0, le=1), Give("a number above 0, at most 1")]


@dataclass(frozen=True, kw_only=True, repr=False)
class Tier(Described):
    """A service class. share: its share of all requests. slo: None takes the workload's."""

    share: Share
    priority: Annotated[int, Field(strict=True), Give("a whole number")] = 0
    slo: SLO | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction(Described):
    """Output lengths predicted with a lognormal relative error. error: sigma of its logarithm; 0 is exact."""

    error: Annotated[float, not_negative("0 is exact")]


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingKeys(Described):
    """Sampling of a request; the defaults are greedy, without top-k and top-p."""

    temperature: Annotated[float, not_negative("0 is greedy")] = 0.0
    top_k: Annotated[int, whole(0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1), Give("a number above 0, at most 1")] = 1.0


@dataclass(frozen=True, kw_only=True, repr=False)
class Workload(Described, ABC):
    """Makes the requests of a run. The same fields give the same requests, whatever the policy.

    max_new_tokens: the limit that policies see. "exact": each request's true output length. A number limits all
        requests: longer outputs end there.
    tiers: service classes by name, drawn in proportion to their shares, which sum to 1.
    slo: objectives of requests whose tier has none.
    prediction: fills `predicted_new_tokens`.
    timeout: seconds after its arrival at which each request's client leaves, if it has not been served.
    pad_outputs: each group of this many consecutive requests gets its longest output, as in a system that returns batches of
        that size as a whole (FasterTransformer; Orca, OSDI 2022, section 2).
    seed: the draws for request i depend on `seed` and i alone.
    num_requests: the meaning of None differs between workloads.
    sampling: the same for every request, except for its own sampling seed.
    ignore_eos: whether requests go on after an end-of-sequence token. No effect in simulation, which has no tokens.
    load, replications: see `experiments.trials.load`; None keeps the workload's own rate.

    Raises WorkloadError: when built, for an unusable setting; by `requests`, for unusable input.
    """

    max_new_tokens: Limit = "exact"
    tiers: Mapping[str, Tier] | None = None
    slo: SLO | None = None
    prediction: Prediction | None = None
    timeout: Timeout | None = None
    pad_outputs: BatchSize | None = None
    seed: Annotated[int, whole(0)] = 0
    num_requests: Annotated[int, whole(1, MOST_REQUESTS)] | None = None
    sampling: Annotated[SamplingKeys, Give("keys of it, as in workload.sampling.temperature=0.7")] = SamplingKeys()
    ignore_eos: bool = True
    load: Annotated[float, Field(gt=0, le=10), Give(_LOAD)] | None = None
    replications: Annotated[int, whole(1, 10_000)] = 1

    def __post_init__(self) -> None:
        check(self, "workload.", WorkloadError)
        (reader, unread), defaults = self.unread, {field.name: field.default for field in fields(self)}
        if given := [f"workload.{name}" for name in unread if getattr(self, name) != defaults[name]]:
            remedy = f"leave {'them' if len(given) > 1 else 'it'} out"
            raise WorkloadError(f"{', '.join(given)}: not read by {reader}; {remedy}")
        if self.tiers and abs(1 - (total := sum(tier.share for tier in self.tiers.values()))) > 1e-6:
            raise WorkloadError(f"workload.tiers: the shares sum to {total:g}; give shares that sum to 1")
        if self.replications > 1 and self.load is None:
            raise WorkloadError(f"workload.replications={self.replications}: are those of a load; give workload.load=")

    @abstractmethod
    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        """Returns requests in order of arrival, with ids 0, 1, ...; without a vocabulary prompts stay None."""

    @property
    def unread(self) -> tuple[str, Collection[str]]:
        """Returns what reads only some of the fields, and the names of the others, which must keep their defaults."""
        return "", ()

    @property
    def answers_back(self) -> bool:
        """Whether requests may follow the ends of others, so that `requests` are not all."""
        return type(self).source is not Workload.source and getattr(self, "closed", True)

    def source(self, vocabulary: Vocabulary | None) -> Arrivals:
        """Returns the arrivals of a run: by default the requests of `requests`, all known beforehand.

        A workload whose requests depend on the ends of others overrides this method: see `Arrivals.ended`.
        """
        return listed(self.requests(vocabulary))

    def within(self, positions: int) -> Self:
        """Returns the workload for a model with this many positions: `too_long` of lengths from a file applies to them as well."""
        return self

    def _build(self, trace: Trace, vocabulary: Vocabulary | None, prompts: bool = True) -> Drawn:
        """Makes requests from columns; values of the trace win. Where it has no prompts, token ids are drawn uniformly, with `prompts`."""
        columns: dict[str, Column | Sequence[Any]] = {"num_prompt_tokens": trace.prompt_tokens}
        columns |= self.annotate(trace.output_tokens, self.seed)
        if trace.arrival_time is not None:
            columns["arrival_time"] = trace.arrival_time
            if not (last := trace.arrival_time.max(initial=0.0)) <= LATEST_ARRIVAL:
                problem = f"a request of {self!r} arrives after {last:.3g} s, and {LATEST_ARRIVAL:g} s is the latest"
                raise WorkloadError(
                    f"workload: {problem}; raise the rate, or subtract the first time from a trace's times"
                )
        for name, column in trace.fields.items():
            others = columns.get(name)
            columns[name] = column if others is None else np.where(column == None, others, column)  # noqa: E711 - of each row
        if prompts and vocabulary is not None and "prompt" not in trace.fields:
            generators = map(np.random.default_rng, request_seeds(self.seed, Purpose.PROMPTS, len(trace)).tolist())
            drawn = zip(generators, trace.prompt_tokens.tolist(), strict=True)
            tokens = [numbers.integers(vocabulary.size, size=length).tolist() for numbers, length in drawn]
            columns["prompt"] = self._with_shared(tokens, trace, vocabulary.size)
        seeds = request_seeds(self.seed, Purpose.SAMPLING, len(trace))
        stops = () if vocabulary is None or self.ignore_eos else vocabulary.stop_tokens
        iterations = {id_: int(at) for id_, at in enumerate(columns.pop("arrival_iteration", ())) if at}
        return Drawn(columns, Sampling(**vars(self.sampling)), seeds, stops, iterations)

    def _with_shared(self, prompts: list[list[int]], trace: Trace, vocabulary_size: int) -> list[list[int]]:
        """Replaces the tokens that prompts share: the tokens of texts, and of each hash id."""

        @lru_cache(maxsize=10_000)
        def drawn(kind: int, number: int, length: int) -> list[int]:
            numbers = generator(self.seed, Purpose.PROMPTS, kind, number)
            tokens: list[int] = numbers.integers(vocabulary_size, size=length).tolist()
            return tokens

        unshared = np.full(len(prompts), None)
        texts, hashes = (trace.fields.get(name, unshared) for name in ("texts", "prefix_hashes"))
        for row, (prompt, parts, ids) in enumerate(zip(prompts, texts, hashes, strict=True)):
            for text, start in parts or ():
                prompt[start:] = drawn(0, text, len(prompt) - start)
            size = int(trace.fields["hash_block"][row]) if ids and "hash_block" in trace.fields else 0
            for place, id_ in enumerate(ids if size else ()):
                part = slice(place * size, min((place + 1) * size, len(prompt)))
                prompt[part] = drawn(1, id_, size)[: part.stop - part.start]
        return prompts

    def annotate(self, output_tokens: Ints, seed: int) -> dict[str, Column]:
        """Fields of `RequestSpec` by name, [requests] each, for requests with these true output lengths."""
        num = len(output_tokens)
        if self.pad_outputs is not None:
            longest = np.maximum.reduceat(output_tokens, np.arange(0, num, self.pad_outputs))
            output_tokens = np.repeat(longest, self.pad_outputs)[:num]
        columns = self._limited(output_tokens)
        if self.prediction is not None:
            errors = np.exp(self.prediction.error * generator(seed, Purpose.PREDICTIONS).standard_normal(num))
            generated = np.minimum(output_tokens, columns["max_new_tokens"])
            predicted = np.clip(np.floor(generated * errors + 0.5), 1, MOST_TOKENS)
            columns["predicted_new_tokens"] = predicted.astype(np.int64)
        if self.timeout is not None:
            columns["timeout"] = np.full(num, self.timeout)
        if self.slo is not None:
            columns["slo"] = np.full(num, self.slo, object)
        if self.tiers:
            shares = np.array([tier.share for tier in self.tiers.values()])
            drawn = generator(seed, Purpose.TIERS).choice(len(shares), num, p=shares / shares.sum())
            of_tiers = [(name, tier.priority, tier.slo or self.slo or NO_SLO) for name, tier in self.tiers.items()]
            columns |= zip(("tier", "priority", "slo"), np.array(of_tiers, object)[drawn].T, strict=True)
        return columns

    def _limited(self, output_tokens: Ints) -> dict[str, Column]:
        """Returns the limits of requests, and the true lengths that they hide."""
        if self.max_new_tokens == "exact":
            return {"max_new_tokens": output_tokens}
        return {"max_new_tokens": np.full(len(output_tokens), self.max_new_tokens), "true_new_tokens": output_tokens}
