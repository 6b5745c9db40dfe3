"""A closed batch: B requests at a time, all of one shape, as in the SARATHI paper (arXiv:2308.16369, section 5).

    stagger=0        all together: every slot prefills, then every slot decodes (Orca's worst case)
    stagger=even     one life spread over the slots: in the steady state a prefill meets B-1 decodes (its best case)

    B=3, D=6         iteration   0  1  2  3  4  5  6  7  8 ...        P: whole prompt, samples a first token
                     slot 0      P  d  d  d  d  d  P  d  d            d: decode
                     slot 1            P  d  d  d  d  d  P
                     slot 2                  P  d  d  d  d

A request of D output tokens that is prefilled in one iteration lives for D iterations, as the prefill samples the first
of them. The first B requests arrive round(i * D / B) iterations into the run; the next one to take slot i starts D
iterations later, and so on: the offsets modulo D stay as they were, so starts are for ever as evenly spaced as whole
iterations allow (D / B apart, rounded). That holds where no request waits for anything but a slot: whole prompts mixed
with decodes, ample KV, one pipeline stage. A policy that chunks prompts or limits prefills to one an iteration makes
its own stagger from there. With s pipeline stages a life takes about s * D iterations: give `stagger` as a number.

The stagger counts iterations, not seconds, so that the same schedule is meant on any hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cbatch.request import Request
from experiments.workloads.base import Vocabulary, Workload
from experiments.workloads.checks import bad_setting, check_at_most, check_whole, is_number
from experiments.workloads.lengths import check_pd_ratio, split
from experiments.workloads.trace import MOST_TOKENS, Ints, Trace


@dataclass(frozen=True, kw_only=True)
class ClosedBatch(Workload):
    """`batch` requests at a time, `num_requests` in all, each of `length` tokens.

    Requests after the first `batch` arrive with the last of these and queue: each starts when a slot becomes free. The
    policy must run at most `batch` requests at once; that limit is the run's, not the workload's.

    Fields:
        length: L = P + D, prompt and output tokens; at least 2.
        pd_ratio: P:D, prefill to decode tokens, from 1 / (L - 1) to L - 1. D is L / (1 + ratio), rounded.
        batch: B, requests at a time.
        num_requests: None is 8 * batch.
        stagger: 0, "even", or the iterations between the arrivals of the first `batch` requests (a fraction is rounded
            after multiplication). More than D / B leaves slots empty at first, which the queue then fills all at once.
    """

    length: int
    pd_ratio: float
    batch: int
    stagger: float | Literal["even"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("length", self.length, 2)
        check_whole("batch", self.batch, 1)
        check_pd_ratio("pd_ratio", self.pd_ratio, self.length)
        if self.stagger != "even" and not (is_number(self.stagger) and self.stagger >= 0):
            raise bad_setting("stagger", self.stagger, "give 0, 'even', or a number of iterations of at least 0")
        if self.stagger != "even":
            check_at_most("stagger", self.stagger, MOST_TOKENS)

    def requests(self, vocabulary: Vocabulary | None) -> list[Request]:
        num = 8 * self.batch if self.num_requests is None else self.num_requests
        prompt_tokens, output_tokens = split(np.full(num, self.length), self.pd_ratio)
        trace = Trace(source="closed batch", prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        return self._build(trace, vocabulary, arrival_iteration=self._arrivals(num, int(output_tokens[0])))

    def _arrivals(self, num: int, num_output_tokens: int) -> Ints:
        """The iteration at which each request arrives, [num]."""
        slot = np.minimum(np.arange(num), self.batch - 1)
        offset = slot * num_output_tokens / self.batch if self.stagger == "even" else slot * self.stagger
        return np.floor(offset + 0.5).astype(np.int64)
