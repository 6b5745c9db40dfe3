"""A closed batch: B requests at a time, all of one shape, as in the SARATHI paper (arXiv:2308.16369, section 5).

    stagger=0        all together: every slot prefills, then every slot decodes (Orca's worst case)
    stagger=even     one life spread over the slots: in the steady state a prefill meets B-1 decodes (its best case)

    B=3, D=6         iteration   0  1  2  3  4  5  6  7  8 ...        P: whole prompt, samples a first token
                     slot 0      P  d  d  d  d  d  P  d  d            d: decode
                     slot 1            P  d  d  d  d  d  P
                     slot 2                  P  d  d  d  d

A request of D output tokens that is prefilled in one iteration lives for D iterations, as the prefill samples the first
token. The first B requests arrive at iteration round(i * D / B); the next one in slot i starts D iterations later, and
so on, so starts stay as evenly spaced as whole iterations allow (D / B apart, rounded). That holds where requests wait
for nothing but a slot: whole prompts mixed with decodes, ample KV, one pipeline stage. A policy that chunks prompts or
limits prefills per iteration changes the stagger. With s pipeline stages a life takes about s * D iterations: give `stagger` as a number.

The stagger counts iterations, not seconds, so it gives the same schedule on any hardware.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from cbatch import Request
from cbatch.validation import Give, whole
from experiments.workloads.base import Vocabulary, Workload
from experiments.workloads.lengths import PDRatio, check_pd_ratio, split
from experiments.workloads.trace import MOST_TOKENS, Trace

_Iterations = Annotated[float, Field(ge=0, le=MOST_TOKENS)]


@dataclass(frozen=True, kw_only=True, repr=False)
class ClosedBatch(Workload):
    """`batch` requests at a time, `num_requests` in all, each of `length` tokens.

    Requests after the first `batch` arrive with the last of these and queue: each starts when a slot becomes free. The
    policy must run at most `batch` requests at once; that limit is the run's, not the workload's.

    length: L = P + D, prompt and output tokens; at least 2.
    pd_ratio: P:D, prefill to decode tokens, from 1 / (L - 1) to L - 1. D is L / (1 + ratio), rounded.
    batch: B, requests at a time. num_requests: None is 8 * batch.
    stagger: 0, "even", or the iterations between the arrivals of the first `batch` requests (a fraction is rounded
        after multiplication). More than D / B leaves slots empty at first, which the queue then fills all at once.
    """

    length: Annotated[int, whole(2)]
    pd_ratio: PDRatio
    batch: Annotated[int, whole(1)]
    stagger: Annotated[Literal["even"] | _Iterations, Give("0, even, or a number of iterations of at least 0")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pd_ratio("pd_ratio", self.pd_ratio, self.length)

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        num = 8 * self.batch if self.num_requests is None else self.num_requests
        prompts, outputs = split(np.full(num, self.length), self.pd_ratio)
        slot = np.minimum(np.arange(num), self.batch - 1)
        offset = slot * int(outputs[0]) / self.batch if self.stagger == "even" else slot * self.stagger
        fields = {"arrival_iteration": np.floor(offset + 0.5).astype(np.int64)}
        trace = Trace(source="closed batch", prompt_tokens=prompts, output_tokens=outputs, fields=fields)
        return self._build(trace, vocabulary)
