"""Rollouts of reinforcement learning: several outputs of each prompt, of long-tailed lengths, all queued at the start."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from cbatch import Request
from cbatch.validation import not_negative, whole
from experiments.workloads.base import MOST_REQUESTS, Vocabulary, Workload
from experiments.workloads.seeds import Purpose, generator
from experiments.workloads.trace import MOST_TOKENS, Trace, prefix_of

_Tokens = Annotated[int, whole(1, MOST_TOKENS)]
_Sigma = Annotated[float, not_negative("standard deviation of a logarithm")]


@dataclass(frozen=True, kw_only=True, repr=False)
class Rollout(Workload):
    """`groups` prompts with `samples` outputs each, one group after another, all at time 0.

    The logarithm of an output's length is normal around its group's, which is normal around `median`: hard prompts have
    long outputs. `predicted_new_tokens` is the group's median, as an earlier round would show it, unless `prediction` is set.

    prompt: tokens of each prompt; the samples of a group share all of them. median, longest: tokens of an output.
    group_sigma, sigma: standard deviations of the logarithms of groups' medians, and of outputs in a group.
    num_requests: the first N; None takes all.
    """

    groups: Annotated[int, whole(1, MOST_REQUESTS)] = 64
    samples: Annotated[int, whole(1, MOST_REQUESTS)] = 8
    prompt: _Tokens = 512
    median: _Tokens = 1024
    longest: _Tokens = 16384
    group_sigma: _Sigma = 0.8
    sigma: _Sigma = 0.6

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        group = np.repeat(np.arange(self.groups), self.samples)
        of_groups, of_outputs = (generator(self.seed, purpose) for purpose in (Purpose.GROUPS, Purpose.LENGTHS))
        medians = self.median * np.exp(self.group_sigma * of_groups.standard_normal(self.groups))
        spread = np.exp(self.sigma * of_outputs.standard_normal(len(group)))
        lengths = np.clip(np.rint([medians[group] * spread, medians[group]]), 1, self.longest).astype(np.int64)
        outputs, expected = lengths[:, : self.num_requests]
        prompts = np.full(len(outputs), self.prompt)
        fields = prefix_of(group[: self.num_requests], self.prompt)
        if self.prediction is None:
            fields["predicted_new_tokens"] = expected
        trace = Trace(source="rollout", prompt_tokens=prompts, output_tokens=outputs, fields=fields)
        return self._build(trace, vocabulary)
