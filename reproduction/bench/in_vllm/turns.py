"""A scheduler for benchmarks: one engine of vLLM takes turns between its own rule and policies, whenever it is idle.

Each request names in `vllm_xargs` (`SamplingParams.extra_args`) what is to serve it: `cbatch`, overrides as in the CBATCH variable, or
`vllm`: vLLM's own methods are then called in place of those that override them. The same model, captured graphs and KV cache then serve all of them.
A change begins a turn, and so does a request with `turn` beside it, a number N: if it is not 0, while all requests decode N iterations are the
policy's and the next N vLLM's own, of the same requests: a machine's moods, which change within a second, then meet both alike.
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
SETTLING, FEWEST, SWITCHING = 16, 20, 4
"""Of each number of requests, a turn's first iterations are left out, as are the first after a switch; fewer timed ones give no figures."""


class TurnsScheduler:
    """Stands for vLLM's scheduler class."""

    def __new__(cls, *, vllm_config: Any, **arguments: Any) -> Any:
        scheduler: Any = make_scheduler(make_adapter(["policy=vllm_v1"]), vllm_config, **arguments)
        _Turns(scheduler)
        return scheduler


class _Turns:
    """Overrides three methods of a scheduler with a policy.

    _timed: this turn's seconds in `schedule`, in both calls of an iteration, and in both of this thread on a CPU, by running requests and side.
    _stretch: iterations between switches; 0: none. _place: of the next iteration among those since all decode.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._current = VLLM
        self._timed: dict[int, dict[str, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
        self._counts: dict[str, str] = {}
        self._scheduled = 0.0, 0.0
        self._stretch = self._place = 0
        self._before = _disturbances()
        for name in ("add_request", "schedule", "update_from_output"):
            setattr(scheduler, name, getattr(self, name))

    def add_request(self, request: Any) -> None:
        extra = request.sampling_params.extra_args or {}
        wanted = extra.get(ARGUMENT, self._current)
        if (wanted != self._current or TURN in extra) and not self._scheduler.requests:
            self._begin(wanted, int(extra.get(TURN, 0)))
        type(self._scheduler).add_request(self._scheduler, request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        side = self._next_side()
        cpu, began = time.thread_time(), time.perf_counter()
        output = self._kind(side).schedule(self._scheduler, *args, **kwargs)
        self._scheduled = time.perf_counter() - began, time.thread_time() - cpu
        if side != self._current:
            self._scheduler._planner.population.leave_ending()
        output.side, place = side, self._place % max(self._stretch, 1)
        # the last of a stretch is left out, too: before it is updated, the other side schedules
        output.settled = not self._stretch or SWITCHING <= place < self._stretch - 1
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The two calls of a turn of vLLM's loop count for the number of requests in the iteration that has ended."""
        cpu, began = time.thread_time(), time.perf_counter()
        side, settled = scheduler_output.side, scheduler_output.settled
        outputs = self._kind(side).update_from_output(self._scheduler, scheduler_output, model_runner_output)
        updated = time.perf_counter() - began, time.thread_time() - cpu
        counts, scheduled = scheduler_output.num_scheduled_tokens, self._scheduled
        if settled and counts and len(counts) == scheduler_output.total_num_scheduled_tokens:  # decodes only
            self._timed[len(counts)][side].append((scheduled[0], scheduled[0] + updated[0], scheduled[1] + updated[1]))
        if not self._scheduler.requests:
            self._write()
        return outputs

    def _next_side(self) -> str:
        """Whoever decides the next iteration. What is no decode is left to the policy, whose adapter would miss it."""
        population = self._scheduler._planner.population
        alone = self._stretch and not population.waiting and not population.prefilling
        self._place = self._place + 1 if alone else 0
        return VLLM if alone and self._place // self._stretch % 2 else self._current

    def _kind(self, side: str) -> Any:
        kind: Any = type(self._scheduler)
        return kind.base if side == VLLM else kind

    def _begin(self, wanted: str, stretch: int) -> None:
        """Every turn begins alike: with a new policy and planner, also where vLLM's own rule follows itself, and without garbage."""
        start = time.monotonic()
        overrides = ["policy=vllm_v1"] if wanted == VLLM else shlex.split(wanted)
        self._scheduler.leave()
        size = self._scheduler.vllm_config.parallel_config.tensor_parallel_size
        self._scheduler.follow(make_adapter(overrides, size), lambda: time.monotonic() - start)
        self._current, self._stretch, self._place = wanted, stretch, 0
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
            number: {
                side: _figures(timed[SETTLING:]) | since
                for side, timed in sides.items()
                if len(timed) >= SETTLING + FEWEST
            }
            for number, sides in sorted(self._timed.items())
        }
        write_json(
            Path(path), {"host": {number: sides for number, sides in host.items() if sides}, "counts": self._counts}
        )


def _figures(timed: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Milliseconds per iteration: of both calls and of `schedule` the median; on a CPU the mean, as its clock may be coarse."""
    scheduled, both, cpu = zip(*timed, strict=True)
    times = {"milliseconds": median(both), "schedule": median(scheduled), "cpu": fmean(cpu)}
    return {name: round(seconds * 1e3, 5) for name, seconds in times.items()} | {"iterations": len(timed)}


def _disturbances() -> dict[str, int]:
    """Counts of this thread or process so far: garbage collections of the youngest and the oldest objects, context switches."""
    used, collected = getrusage(RUSAGE_THREAD), [each["collections"] for each in gc.get_stats()]
    return {"young": collected[0], "old": collected[2], "waits": used.ru_nvcsw, "preempted": used.ru_nivcsw}
