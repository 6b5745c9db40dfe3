"""Open loops: requests arrive independently of how busy the server is. In two of them prompts share prefixes."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Protocol, Self, runtime_checkable

import numpy as np
from pydantic import Field

from cbatch import Described, Request, WorkloadError
from cbatch.errors import call
from cbatch.validation import Give, check, positive, whole
from experiments.workloads.base import MOST_REQUESTS, Vocabulary, Workload
from experiments.workloads.lengths import LONGEST, Lengths, UniformLengths, limit_lengths
from experiments.workloads.seeds import Purpose, generator
from experiments.workloads.trace import Column, Floats, Trace, prefix_of

Draw = Callable[[np.random.Generator, int], Any]
_Tokens = Annotated[int, whole(1, LONGEST)]


@runtime_checkable
class ArrivalProcess(Protocol):
    """An arrival process."""

    def times(self, generator: np.random.Generator, num: int, /) -> Floats:
        """Draws arrival times in seconds, [num], never decreasing; the first is 0."""


@dataclass(frozen=True, kw_only=True, repr=False)
class GammaArrivals(Described):
    """Independent gamma-distributed intervals; with `cv` 1 a Poisson process.

    The first request arrives at 0. With the same seed, another `rate` only stretches time.

    rate: requests per second.
    cv: coefficient of variation of the intervals (standard deviation / mean); above 1 is bursty.
    """

    inlined = True  # the usual arrivals: open_loop(rate=20)

    rate: Annotated[float, positive("requests per second")]
    cv: Annotated[float, Field(ge=1e-3, le=1e3), Give("a number from 0.001 (regular) over 1 (Poisson) to 1000")] = 1.0

    def __post_init__(self) -> None:
        check(self, "workload.arrivals.", WorkloadError)

    def times(self, generator: np.random.Generator, num: int) -> Floats:
        shape = self.cv**-2
        intervals = generator.standard_gamma(shape, num - 1) / (shape * self.rate)
        return np.concatenate([[0.0], np.cumsum(intervals)])


@dataclass(frozen=True, kw_only=True, repr=False)
class DailyArrivals(Described):
    """A Poisson process whose rate is a cosine: lowest at 0, highest after half a period.

    rate: mean requests per second. period: seconds. swing: amplitude over the mean.
    """

    rate: Annotated[float, positive("requests per second")]
    period: Annotated[float, positive("seconds")] = 86_400.0
    swing: Annotated[float, Field(ge=0, lt=1), Give("a share from 0 to below 1")] = 0.8

    def __post_init__(self) -> None:
        check(self, "workload.arrivals.", WorkloadError)

    def times(self, generator: np.random.Generator, num: int) -> Floats:
        expected = np.concatenate([[0.0], np.cumsum(generator.standard_exponential(num - 1))])
        periods = 1 + int(expected[-1] / (self.rate * self.period))
        at = np.linspace(0.0, periods * self.period, 10_000 * periods + 1)
        phase = 2 * np.pi / self.period
        times: Floats = np.interp(expected, self.rate * (at - self.swing * np.sin(phase * at) / phase), at)
        return times


@dataclass(frozen=True, repr=False)
class AllAtOnce(Described):
    """Every request arrives at time 0: measures how long a queue takes to drain."""

    def times(self, _: np.random.Generator, num: int) -> Floats:
        return np.zeros(num)


@dataclass(frozen=True, kw_only=True, repr=False)
class DrawnRequests(Workload):
    """Base of workloads whose arrivals and lengths are drawn from separate streams: changing one does not affect the other."""

    num_requests: Annotated[int, whole(1, MOST_REQUESTS)] = 512
    arrivals: Annotated[ArrivalProcess, Give("keys of it, as in workload.arrivals._target_=...; it must have times()")]
    lengths: Annotated[Lengths, Give("keys of it, as in workload.lengths._target_=...; it must have draw()")] = field(
        default_factory=partial(UniformLengths, min_length=256, max_length=1024, pd_ratio=4)
    )

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        return self._build(self.trace(), vocabulary)

    @abstractmethod
    def trace(self) -> Trace:
        """Draws arrivals, lengths and shared prefixes."""

    def _lengths(self, num: int) -> Column:
        """Draws prompt and output tokens, [2, num]. Raises WorkloadError: `lengths` failed, or drew something else."""
        random, wanted = generator(self.seed, Purpose.LENGTHS), f"prompt and output tokens, {num} whole numbers each"
        return _drawn("lengths", self.lengths.draw, random, num, ((2, num), "iu", wanted))


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenLoop(DrawnRequests):
    """`num_requests` requests of any arrival process and any length distribution. rate_scale: 2 sends the same requests twice as fast."""

    rate_scale: Annotated[float, positive("1 keeps the rate")] = 1.0

    @property
    def unread(self) -> tuple[str, Collection[str]]:
        return "AllAtOnce, which has no rate", ["rate_scale"] if isinstance(self.arrivals, AllAtOnce) else ()

    def within(self, positions: int) -> Self:
        return replace(self, lengths=limit_lengths(self.lengths, positions, self.max_new_tokens))

    def trace(self) -> Trace:
        times = drawn_times(self.arrivals, generator(self.seed, Purpose.ARRIVALS), self.num_requests)
        prompts, outputs = self._lengths(self.num_requests)
        times = times / self.rate_scale
        return Trace(source="open loop", prompt_tokens=prompts, output_tokens=outputs, arrival_time=times)


@dataclass(frozen=True, kw_only=True, repr=False)
class PrefixGroups(DrawnRequests):
    """Each request belongs to a group drawn at random; the requests of a group share the first `prefix` tokens of their prompts.

    lengths: of the rest of the prompt, and of the output.
    """

    groups: Annotated[int, whole(1, MOST_REQUESTS)] = 32
    prefix: _Tokens = 2048

    def trace(self) -> Trace:
        prompts, outputs = self._lengths(self.num_requests)
        groups = generator(self.seed, Purpose.GROUPS).integers(self.groups, size=self.num_requests)
        return Trace(
            source="prefix groups",
            prompt_tokens=self.prefix + prompts,
            output_tokens=outputs,
            arrival_time=drawn_times(self.arrivals, generator(self.seed, Purpose.ARRIVALS), self.num_requests),
            fields=prefix_of(groups, self.prefix),
        )


def drawn_times(arrivals: ArrivalProcess, random: np.random.Generator, num: int) -> Column:
    """Draws arrival times in seconds, [num]. Raises WorkloadError: `arrivals` failed, or drew something else."""
    times = _drawn("arrivals", arrivals.times, random, num, ((num,), "iuf", f"{num} times in seconds, not intervals"))
    if len(decreases := np.flatnonzero(np.diff(times) < 0)):
        pair = " after ".join(f"{times[decreases[0] + step]:g}" for step in (1, 0))
        remedy = "return times that never decrease, as np.sort does"
        raise WorkloadError(f"workload.arrivals: times() returned {pair}; {remedy}")
    return times


def _drawn(
    key: str, draw: Draw, random: np.random.Generator, num: int, wanted: tuple[tuple[int, ...], str, str]
) -> Column:
    """Returns what an object's method draws, as an array. wanted: its shape, the kinds of its numbers (`dtype.kind`), and a text for both."""
    returned, (shape, kinds, text) = call(f"workload.{key}", draw, random, num), wanted
    try:
        drawn = np.asarray(returned)
    except ValueError:  # columns of different lengths
        drawn = np.asarray(None)
    if drawn.shape != shape or drawn.dtype.kind not in kinds:
        problem = f"{draw.__name__}() returned {drawn.dtype} of shape {list(drawn.shape)}"
        raise WorkloadError(f"workload.{key}: {problem}; return {text}")
    return drawn
