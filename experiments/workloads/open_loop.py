"""An open loop: requests arrive when they arrive, however busy the server is."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.request import Request
from experiments.workloads.arrivals import Arrivals
from experiments.workloads.base import Vocabulary, Workload
from experiments.workloads.checks import check_part, check_whole
from experiments.workloads.lengths import Lengths
from experiments.workloads.seeds import Stream, generator
from experiments.workloads.trace import Trace


@dataclass(frozen=True, kw_only=True)
class OpenLoop(Workload):
    """`num_requests` (mandatory) requests of any arrival process and any length distribution.

    Arrivals and lengths are drawn from streams of their own: changing one leaves the other as it was.
    """

    arrivals: Arrivals
    lengths: Lengths

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("num_requests", self.num_requests, 1)
        check_part("arrivals", self.arrivals, "times")
        check_part("lengths", self.lengths, "draw")

    def requests(self, vocabulary: Vocabulary | None) -> list[Request]:
        assert self.num_requests is not None, "checked when built"
        arrival_time = self.arrivals.times(generator(self.seed, Stream.ARRIVALS), self.num_requests)
        prompt_tokens, output_tokens = self.lengths.draw(generator(self.seed, Stream.LENGTHS), self.num_requests)
        trace = Trace(
            source="open loop", prompt_tokens=prompt_tokens, output_tokens=output_tokens, arrival_time=arrival_time
        )
        return self._build(trace, vocabulary)
