"""How often 95% intervals cover the truth: M/M/1 and M/D/1 queues of our own parts, whose capacity and mean are known, and curves.

Orca with a batch of one serves requests of one output token on a device that takes 1 ms per prompt token: a single server, first come,
first served. Its waits obey Lindley's recursion of 1952, which the repetitions use (a test compares it with the engine). Beside each
interval is the naive one, which treats requests as independent. Whole searches stop once their interval is narrow; they also search on curves:
violations with a known mean, and of three distributions between replications.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import pdtr, pdtrik

from experiments.capacity.control import Control
from experiments.capacity.estimate import Shares
from experiments.capacity.search import Goal, Search
from experiments.capacity.simulation import Outcome
from experiments.report.intervals import mean_of
from experiments.settings.command_line import Count
from experiments.settings.hardware import cpu_name
from experiments.store.provenance import write_benchmark
from reproduction import BENCH, RESULTS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVEL, REQUESTS, WARMUP, REPLICATIONS = 0.99, 2000, 100, 20
SPREAD = (0.76, 0.88, 0.96, 1.04, 1.12, 1.24)
"""The rates, over the true capacity."""

_MEAN_AT = 0  # the rate at which the mean is estimated
_TOKENS = 1000  # of a mean prompt: one second
_KNOWN, _DRAWN = 25, 400  # the control variate: shape of the error of its services, and its replications


@dataclass(frozen=True)
class Queue:
    """A queue with mean service 1 s. limit: seconds in which a request must end. deterministic: all services are equal."""

    limit: float
    deterministic: bool

    def within(self, rate: float) -> float:
        """The true share of requests that end in time: exponential sojourns, or Erlang's formula of 1909 for M/D/1."""
        if not self.deterministic:
            return 1 - math.exp((rate - 1) * self.limit)
        wait = self.limit - 1
        terms = (rate * (k - wait) for k in range(int(wait) + 1))
        return (1 - rate) * sum(term**k / math.factorial(k) * math.exp(-term) for k, term in enumerate(terms))

    @property
    def capacity(self) -> float:
        return float(brentq(lambda rate: self.within(rate) - LEVEL, 0.01, 0.99))

    def mean(self, rate: float) -> float:
        """The true mean seconds from arrival to end (Pollaczek and Khinchine)."""
        return 1 + rate / (1 - rate) / (2 if self.deterministic else 1)

    def draw(self, seed: int) -> tuple[Floats, Ints]:
        """Arrival times at rate 1 and prompt tokens of one replication, [requests]."""
        random = np.random.default_rng(seed)
        arrivals, services = np.cumsum(random.exponential(size=REQUESTS)), random.exponential(size=REQUESTS)
        tokens = np.full(REQUESTS, _TOKENS) if self.deterministic else np.maximum(np.round(services * _TOKENS), 1)
        return arrivals, tokens.astype(np.int64)

    def blurred(self, first: int, number: int, _: int) -> tuple[Floats, Floats]:
        """Arrivals and services of replication `number` from seed `first` on, the services with an error of a fifth."""
        arrivals, tokens = self.draw(first + number)
        return arrivals, tokens * np.random.default_rng([first, number]).gamma(_KNOWN, size=REQUESTS)

    def recur(self, seeds: range, rates: Floats) -> Floats:
        """Seconds from arrival to end of several replications' requests at several rates, [requests, replications, rates]."""
        draws = [self.draw(seed) for seed in seeds]
        arrivals = np.stack([arrivals for arrivals, _ in draws], axis=1)[..., None] / rates
        services = np.stack([tokens for _, tokens in draws], axis=1)[..., None] / _TOKENS
        begun = np.cumsum(services, axis=0) - services - arrivals
        return begun - np.minimum.accumulate(begun) + services

    def serve(self, seed: int, rate: float, warmup: int) -> tuple[int, int, float]:
        """Returns the good requests of one replication, those that count, and the mean number in the system."""
        [found] = self.recur(range(seed, seed + 1), np.array([rate])).T[0]
        counted = found[warmup : REQUESTS - warmup]
        return int((counted <= self.limit + 1e-9).sum()), len(counted), rate * float(found.mean())


@dataclass(frozen=True)
class Curve:
    """Violations of 1% at rate 1, which grow with the eighth power of the rate, as near the capacity of the M/M/1 queue.

    requests: in a replication. luck: draws the factor, of mean 1, of a replication's violations, whose number has a Poisson distribution.
    """

    requests: int
    luck: Callable[[np.random.Generator], float]
    capacity = 1.0

    def serve(self, seed: int, rate: float, warmup: int) -> tuple[int, int, float]:
        """Returns as `Queue.serve`. At all rates a replication is equally lucky."""
        random, counted = np.random.default_rng(seed), self.requests - 2 * warmup
        mean = counted * min((1 - LEVEL) * rate**8, 1.0) * self.luck(random)
        bad = min(poisson_quantile(random.random(), mean), counted)
        waiting = self.requests / 3 * rate if rate > 1000 else 1.0  # all at once: a throughput of 1.5
        return counted - bad, counted, waiting


def poisson_quantile(share: float, mean: float) -> int:
    """Returns the smallest number of events whose cumulative probability reaches the share."""
    number = math.ceil(pdtrik(share, mean)) if mean else 0
    return number - 1 if number and pdtr(number - 1, mean) >= share else number


CURVES = {
    "normal": Curve(20_000, lambda random: max(1 + random.normal() / 2, 0)),
    "skewed": Curve(2000, lambda random: random.lognormal(-0.32, 0.8)),
    "discrete": Curve(200, lambda random: 1.0),
}
"""By the distribution of a replication's violations: about 200 with a normal factor, 20 with a lognormal one of skewness 3.7, and 2."""

QUEUES = {"M/M/1": Queue(12.0, deterministic=False), "M/D/1": Queue(7.0, deterministic=True)}

TRUTHS: dict[str, Queue | Curve] = {**QUEUES, **CURVES}

COLUMNS = ("capacity", "capacity, control variate", "capacity, naive", "mean", "mean, naive")
SEARCHES = {"search, control variate": True, "search": False}
"""Whole searches to ±3%, by column: whether they have the control variate."""


def main(repetitions: Count = 1000, searches: Count = 1000, folder: str = RESULTS) -> None:
    """Repeat, print and write coverage.json."""
    figures: dict[str, Any] = {}
    with ProcessPoolExecutor() as pool:
        for name, queue in QUEUES.items():
            print(f"{name}: {repetitions} repetitions of {REPLICATIONS} replications of {REQUESTS} requests")
            covered = np.array(list(pool.map(partial(repeat, queue), range(repetitions), chunksize=5)))
            figures[name] = dict(zip(COLUMNS, covered.mean(axis=0).tolist(), strict=True))
            figures[name]["true_capacity"] = queue.capacity
        for name, control in [*product(QUEUES, SEARCHES), *product(CURVES, ["search"])]:
            ended = np.array(list(pool.map(partial(search, name, SEARCHES[control]), range(searches), chunksize=5)))
            is_within = [low <= TRUTHS[name].capacity <= high for low, high, _ in ended]
            mean = {f"{control}: replications": float(ended[:, 2].mean())}
            figures.setdefault(name, {}).update({control: float(np.mean(is_within)), **mean})
    for name, shares in figures.items():
        print(name, *(f"  {column:40} {share:.3f}" for column, share in shares.items()), sep="\n")
    conditions = {"level": LEVEL, "requests": REQUESTS, "replications": REPLICATIONS, "repetitions": repetitions}
    conditions["searches"] = searches
    print(f"written: {write_benchmark('coverage', cpu_name(), {**conditions, 'figures': figures}, folder, BENCH)}")


def repeat(queue: Queue, number: int) -> list[bool]:
    """Whether the intervals of one repetition cover the truth, in the order of `COLUMNS`."""
    rates, seeds = queue.capacity * np.array(SPREAD), range(number * REPLICATIONS, (number + 1) * REPLICATIONS)
    found = queue.recur(seeds, rates)[WARMUP:]
    good = (found <= queue.limit + 1e-9).sum(axis=0).astype(float)
    shares = Shares(rates, good, np.full(good.shape, float(len(found))), LEVEL)
    times, truth = found[..., _MEAN_AT], queue.mean(rates[_MEAN_AT])
    mean, naive = mean_of(times.mean(axis=0).tolist()), mean_of(times.ravel().tolist())
    low, high = shares.interval()
    control = Control(partial(queue.blurred, seeds.start), REQUESTS, WARMUP, 1.0, _DRAWN)
    narrow_low, narrow_high = control.adjust(shares).interval()
    share = shares.share()
    half = 1.96 * np.sqrt(share * (1 - share) / (len(found) * REPLICATIONS))  # as if requests were independent
    naive_low, naive_high = shares.crossing(share - half), shares.crossing(share + half)
    return [
        low <= queue.capacity <= high,
        narrow_low <= queue.capacity <= narrow_high,
        naive_low <= queue.capacity <= naive_high,
        abs(mean.mean - truth) <= mean.half,
        abs(naive.mean - truth) <= naive.half,
    ]


def search(name: str, control: bool, number: int) -> tuple[float, float, int]:
    """Returns the ends of the interval of whole search `number`, whose replications no other search has, and their number."""
    first, truth = 1_000_000 + 10_000 * number, TRUTHS[name]

    def simulate(pairs: Sequence[tuple[int, float]], requests: int, warmup: int) -> list[Outcome]:
        served = [truth.serve(first + replication, rate, warmup) for replication, rate in pairs]
        return [
            Outcome(rate, replication, requests, warmup, good, counted, in_system, 1.0)
            for (replication, rate), (good, counted, in_system) in zip(pairs, served, strict=True)
        ]

    queue = partial(truth.blurred, first) if control and isinstance(truth, Queue) else None
    requests = REQUESTS if isinstance(truth, Queue) else truth.requests
    found = Search(Goal(LEVEL, requests, 10_000, 0.03, queue=queue), simulate, lambda line: None).run()
    return found.low, found.high, len(found.shares.good)
