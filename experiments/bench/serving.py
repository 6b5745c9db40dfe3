"""What the benchmarks share: a server on the GPU, runs of a policy on it, and their figures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cbatch import Limits, ModelSpec, Policy, Request, RunRecord, Server
from cbatch.runtime.options import Options
from experiments.settings.backends import Cuda
from experiments.settings.servers import real_server
from experiments.store.benchmark_file import spread
from policies.chunking import TileAligned

MakeServer = Callable[[ModelSpec, Limits, Options], Server[Any]]


def gpu_server(spec: ModelSpec, limits: Limits, options: Options = Options()) -> Server[Any]:
    """Builds a server on the GPU with as much KV cache as its largest batch can use, if there is room."""
    return real_server(Cuda(), spec, limits, options)


def chunked(policy: type, name: str, *chunks: int, **settings: Any) -> dict[str, Callable[[], Policy]]:
    """Returns a policy with each of these tile-aligned chunks, by "NAME, CHUNK tokens"."""
    return {f"{name}, {chunk} tokens": partial(policy, TileAligned(chunk), **settings) for chunk in chunks}


class Served(NamedTuple):
    """Figures of one run.

    seconds: from the first plan to the last token on the host.
    iterations: their number.
    active_share: share of that time in which the device computes an iteration.
    host_milliseconds: median time per iteration that the host does not wait.
    tokens_per_second: prompt and output tokens.
    """

    seconds: float
    iterations: int
    active_share: float
    host_milliseconds: float
    tokens_per_second: float

    @property
    def milliseconds(self) -> float:
        """Mean time of an iteration."""
        return self.seconds / self.iterations * 1e3


class Runs(NamedTuple):
    """Repeated runs of the same requests.

    policy, record: of the last run. eager: iterations without a graph, per run; None in simulation.
    """

    served: Sequence[Served]
    policy: Policy
    record: RunRecord
    eager: int | None

    @property
    def counted(self) -> str:
        """The iterations of a run and, unless simulated, how many of them had no graph, for a printed line."""
        number = f"{self.served[0].iterations} iterations"
        return number if self.eager is None else f"{number}, {self.eager} eager"

    def spread(self, name: str) -> dict[str, float]:
        """Returns median and extremes of an attribute of `Served`."""
        return spread([getattr(run, name) for run in self.served])

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns the spreads that results files have of all runs, by their names there."""
        return {
            "tokens_per_second": self.spread("tokens_per_second"),
            "ms_per_iteration": self.spread("milliseconds"),
            "active_share": self.spread("active_share"),
            "host_ms_per_iteration": self.spread("host_milliseconds"),
        }


def repeat(
    server: Server[Any],
    policy: Callable[[], Policy],
    requests: Callable[[], Sequence[Request]],
    repeats: int,
    *,
    asynchronous: bool | None = None,
) -> Runs:
    """Serves the requests several times, each time with a new policy. asynchronous: None: as the server is set up."""
    served, before = [], _num_eager(server)
    for _ in range(repeats):
        used = policy()
        record = server.serve(used, requests(), asynchronous=asynchronous)
        served.append(summarize(record))
    after = _num_eager(server)
    eager = None if before is None or after is None else (after - before) // repeats
    return Runs(served, used, record, eager)


def _num_eager(server: Server[Any]) -> int | None:
    """Iterations without a graph so far; None in simulation, where nothing is launched."""
    if not server.executor.needs_tokens:
        return None
    iteration = getattr(server.executor, "iteration", None)
    return 0 if iteration is None else int(iteration.num_eager)


def compare(
    server: Server[Any],
    policies: Mapping[str, Callable[[], Policy]],
    requests: Callable[[], Sequence[Request]],
    repeats: int,
    warm_up: Callable[[], Sequence[Request]] | None = None,
) -> Iterator[tuple[str, Runs]]:
    """Serves the requests under each policy in turn; yields a policy's name and runs before the next one begins.

    warm_up: makes requests to be served before those of each policy.
    """
    for name, policy in policies.items():
        if warm_up is not None:
            server.serve(policy(), warm_up())
        yield name, repeat(server, policy, requests, repeats)


def summarize(record: RunRecord) -> Served:
    steps = record.steps
    seconds = steps[-1].received_at - steps[0].planned_at
    started = np.array([step.started for step in steps])
    ended = np.array([step.ended for step in steps])
    begun = np.maximum(started, np.concatenate([[-np.inf], ended[:-1]]))  # enqueued early, it begins when the last ends
    busy = float(np.sum(ended - begun))
    host = [step.launched_at - step.planned_at + step.done_at - step.received_at for step in steps]
    num_tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request in record.requests)
    return Served(seconds, len(steps), busy / seconds, float(np.median(host)) * 1e3, num_tokens / seconds)
