"""An open loop: requests arrive independently of how busy the server is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from cbatch import Request
from cbatch.validation import Give, positive, whole
from experiments.workloads.arrivals import Arrivals
from experiments.workloads.base import MOST_REQUESTS, Vocabulary, Workload
from experiments.workloads.lengths import Lengths, UniformLengths
from experiments.workloads.seeds import Stream, generator
from experiments.workloads.trace import Trace


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenLoop(Workload):
    """`num_requests` requests of any arrival process and any length distribution.

    Arrivals and lengths are drawn from separate streams: changing one does not affect the other.

    rate_scale: 2 sends the same requests twice as fast.
    """

    num_requests: Annotated[int | None, whole(1, MOST_REQUESTS)] = 512
    arrivals: Annotated[Arrivals, Give("keys of it, as in workload.arrivals._target_=...; it must have times()")]
    lengths: Annotated[Lengths, Give("keys of it, as in workload.lengths._target_=...; it must have draw()")] = field(
        default_factory=partial(UniformLengths, min_length=256, max_length=1024, pd_ratio=4)
    )
    rate_scale: Annotated[float, positive("1 keeps the rate")] = 1.0

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        return self._build(self.trace(), vocabulary)

    def trace(self) -> Trace:
        """Arrivals and lengths alone."""
        assert self.num_requests is not None, "checked when built"
        times = self.arrivals.times(generator(self.seed, Stream.ARRIVALS), self.num_requests) / self.rate_scale
        prompts, outputs = self.lengths.draw(generator(self.seed, Stream.LENGTHS), self.num_requests)
        return Trace(source="open loop", prompt_tokens=prompts, output_tokens=outputs, arrival_time=times)
