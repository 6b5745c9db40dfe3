"""What every workload shares: the common fields, and the step from columns of lengths to requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from cbatch.errors import WorkloadError
from cbatch.request import Request
from cbatch.request_spec import GREEDY, Sampling
from experiments.workloads.checks import bad_setting, check_at_most, check_not_negative, check_whole, is_number
from experiments.workloads.seeds import Stream, request_seeds
from experiments.workloads.trace import Ints, Trace

MOST_REQUESTS = 10_000_000
"""Of one run; each takes about a kilobyte."""


class Vocabulary(Protocol):
    """What a workload needs to know of a model's tokens."""

    @property
    def size(self) -> int:
        """Token ids are 0 .. size - 1."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """End-of-sequence tokens; may be empty."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises a CbatchError where the model has no tokenizer."""


def sampling(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    """How every request of a workload samples; 0, 0 and 1 are greedy, no top-k and no top-p.

    Raises:
        WorkloadError: a value out of range.
    """
    check_not_negative("sampling.temperature", temperature, "0 is greedy")
    check_whole("sampling.top_k", top_k, 0)
    if not (is_number(top_p) and 0 < top_p <= 1):
        raise bad_setting("sampling.top_p", top_p, "give a number above 0, at most 1")
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p)


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """Makes the requests of a run. The same fields give the same requests, whatever the policy.

    Fields:
        seed: at least 0. The prompt and the sampling seed of request i depend on `seed` and i alone.
        num_requests: how many; what None means, each workload says.
        sampling: temperature, top-k and top-p of every request; its own seed is replaced by one for each request.
        use_stop_tokens: end a request at an end-of-sequence token. Without effect in simulation, which has no tokens.

    Raises:
        WorkloadError: when built, on a setting that cannot be used; by `requests`, on input that cannot.
    """

    seed: int = 0
    num_requests: int | None = None
    sampling: Sampling = GREEDY
    use_stop_tokens: bool = False

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0)
        if not isinstance(self.sampling, Sampling):
            raise bad_setting("sampling", self.sampling, "give keys of it, as in workload.sampling.temperature=0.7")
        if self.num_requests is not None:
            check_whole("num_requests", self.num_requests, 1)
            check_at_most("num_requests", self.num_requests, MOST_REQUESTS)

    @abstractmethod
    def requests(self, vocabulary: Vocabulary | None) -> list[Request]:
        """New requests in order of arrival, with ids 0, 1, ...

        vocabulary: None where only lengths matter (simulation): prompts stay None.
        """

    def _build(
        self, trace: Trace, vocabulary: Vocabulary | None, arrival_iteration: Ints | None = None
    ) -> list[Request]:
        """Requests from columns; with a vocabulary, prompts are token ids drawn evenly from all of it."""
        num = len(trace)
        prompt_tokens = trace.prompt_tokens.tolist()
        prompts: Sequence[list[int] | None] = [None] * num
        if vocabulary is not None:
            prompts = _random_prompts(self.seed, prompt_tokens, vocabulary.size)
        stop_tokens = self._stop_tokens(vocabulary)
        columns = zip(
            prompt_tokens,
            trace.output_tokens.tolist(),
            [0.0] * num if trace.arrival_time is None else trace.arrival_time.tolist(),
            [0] * num if arrival_iteration is None else arrival_iteration.tolist(),
            prompts,
            self._samplings(num),
            [None] * num if trace.client is None else trace.client.tolist(),
            strict=True,
        )
        return [
            Request(
                row,
                prompt_length,
                output_length,
                arrival_time=time,
                arrival_iteration=iteration,
                prompt=prompt,
                sampling=sampling,
                stop_tokens=stop_tokens,
                client=client,
            )
            for row, (prompt_length, output_length, time, iteration, prompt, sampling, client) in enumerate(columns)
        ]

    def _samplings(self, num: int) -> list[Sampling]:
        """The sampling of each request, [num]: the workload's, with a seed of its own."""
        return [replace(self.sampling, seed=seed) for seed in request_seeds(self.seed, Stream.SAMPLING, num)]

    def _stop_tokens(self, vocabulary: Vocabulary | None) -> tuple[int, ...]:
        if vocabulary is None or not self.use_stop_tokens:
            return ()
        if not vocabulary.stop_tokens:
            raise WorkloadError(
                "workload.use_stop_tokens=true: the model has no end-of-sequence token; "
                "set it to false or choose another model"
            )
        return vocabulary.stop_tokens


def _random_prompts(seed: int, lengths: list[int], vocabulary_size: int) -> list[list[int]]:
    seeds = request_seeds(seed, Stream.PROMPTS, len(lengths))
    return [
        np.random.default_rng(prompt_seed).integers(vocabulary_size, size=length).tolist()
        for prompt_seed, length in zip(seeds, lengths, strict=True)
    ]
