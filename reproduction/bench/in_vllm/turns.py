"""A scheduler for benchmarks: one engine of vLLM takes turns between its own rule and policies, whenever it is idle.

Each request names in `vllm_xargs` (`SamplingParams.extra_args`) what is to serve it: `cbatch`, overrides as in the CBATCH variable, or
`vllm`: vLLM's own methods are then called in place of those that override them. The same model, captured graphs and KV cache then serve all of them.
A change begins a turn, and so does a request with `turn` beside it.
What the host spends in the scheduler is timed in the same way for all; whenever no request is left, that of the present turn is written
to the file that CBATCH_TIMES names.
"""

import gc
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from statistics import fmean, median
from typing import Any

from cbatch.vllm import make_scheduler
from experiments.store.provenance import write_json
from experiments.vllm import make_adapter

ARGUMENT, TURN, VLLM, FILE = "cbatch", "turn", "vllm", "CBATCH_TIMES"
SETTLING, FEWEST = 16, 20
"""For each number of requests: a turn's first iterations, which are left out, and the fewest timed ones that give figures."""


class TurnsScheduler:
    """Stands for vLLM's scheduler class."""

    def __new__(cls, *, vllm_config: Any, **arguments: Any) -> Any:
        scheduler: Any = make_scheduler(make_adapter(["policy=vllm_v1"]), vllm_config, **arguments)
        _Turns(scheduler)
        return scheduler


class _Turns:
    """Overrides three methods of a scheduler with a policy.

    _timed: this turn's seconds in `schedule`, in both calls of an iteration, and in both of this thread on a CPU, by running requests.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._current = VLLM
        self._timed: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        self._counts: dict[str, str] = {}
        self._scheduled = 0.0, 0.0
        self._before = _disturbances()
        for name in ("add_request", "schedule", "update_from_output"):
            setattr(scheduler, name, getattr(self, name))

    def add_request(self, request: Any) -> None:
        extra = request.sampling_params.extra_args or {}
        wanted = extra.get(ARGUMENT, self._current)
        if (wanted != self._current or TURN in extra) and not self._scheduler.requests:
            self._begin(wanted)
        type(self._scheduler).add_request(self._scheduler, request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        cpu, began = time.thread_time(), time.perf_counter()
        output = self._kind.schedule(self._scheduler, *args, **kwargs)
        self._scheduled = time.perf_counter() - began, time.thread_time() - cpu
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The two calls of a turn of vLLM's loop count for the number of requests in the iteration that has ended."""
        cpu, began = time.thread_time(), time.perf_counter()
        outputs = self._kind.update_from_output(self._scheduler, scheduler_output, model_runner_output)
        updated = time.perf_counter() - began, time.thread_time() - cpu
        counts, scheduled = scheduler_output.num_scheduled_tokens, self._scheduled
        if counts and len(counts) == scheduler_output.total_num_scheduled_tokens:  # decodes only
            self._timed[len(counts)].append((scheduled[0], scheduled[0] + updated[0], scheduled[1] + updated[1]))
        if not self._scheduler.requests:
            self._write()
        return outputs

    @property
    def _kind(self) -> Any:
        kind: Any = type(self._scheduler)
        return kind.base if self._current == VLLM else kind

    def _begin(self, wanted: str) -> None:
        """Every turn begins alike: with a new policy and planner, also where vLLM's own rule follows itself, and without garbage."""
        start = time.monotonic()
        overrides = ["policy=vllm_v1"] if wanted == VLLM else shlex.split(wanted)
        self._scheduler.leave()
        size = self._scheduler.vllm_config.parallel_config.tensor_parallel_size
        self._scheduler.follow(make_adapter(overrides, size), lambda: time.monotonic() - start)
        self._current = wanted
        self._timed.clear()
        gc.collect()
        self._before = _disturbances()

    def _write(self) -> None:
        if (path := os.environ.get(FILE)) is None:
            return
        if self._current != VLLM:
            self._counts[self._current] = str(self._scheduler.counts)
        since = {name: value - self._before[name] for name, value in _disturbances().items()}
        host = {
            number: {self._current: _figures(timed[SETTLING:]) | since}
            for number, timed in sorted(self._timed.items())
            if len(timed) >= SETTLING + FEWEST
        }
        write_json(Path(path), {"host": host, "counts": self._counts})


def _figures(timed: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Milliseconds per iteration: of both calls and of `schedule` the median; on a CPU the mean, as its clock may be coarse."""
    scheduled, both, cpu = zip(*timed, strict=True)
    times = {"milliseconds": median(both), "schedule": median(scheduled), "cpu": fmean(cpu)}
    return {name: round(seconds * 1e3, 5) for name, seconds in times.items()} | {"iterations": len(timed)}


def _disturbances() -> dict[str, int]:
    """Counts of this thread or process so far: garbage collections of the youngest and the oldest objects, context switches."""
    used, collected = getrusage(RUSAGE_THREAD), [each["collections"] for each in gc.get_stats()]
    return {"young": collected[0], "old": collected[2], "waits": used.ru_nvcsw, "preempted": used.ru_nivcsw}
