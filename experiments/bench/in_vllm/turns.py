"""A scheduler for benchmarks: one engine of vLLM takes turns between its own rule and policies, whenever it is idle.

Each request names in `vllm_xargs` (`SamplingParams.extra_args`) what is to serve it: `cbatch`, overrides as in the CBATCH variable, or
`vllm`: vLLM's own methods are then called in place of those that override them. The same model, captured graphs and KV cache then serve all of them. What the host spends
in the scheduler is timed for each in the same way, and written to the file that CBATCH_TIMES names whenever no request is left.
"""

import os
import shlex
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from cbatch.vllm import make_scheduler
from experiments.store.provenance import write_json
from experiments.vllm import make_adapter

ARGUMENT, VLLM, FILE = "cbatch", "vllm", "CBATCH_TIMES"


class TurnsScheduler:
    """Stands for vLLM's scheduler class."""

    def __new__(cls, *, vllm_config: Any, **arguments: Any) -> Any:
        scheduler: Any = make_scheduler(make_adapter(["policy=vllm_v1"]), vllm_config, **arguments)
        _Turns(scheduler)
        return scheduler


class _Turns:
    """Overrides three methods of a scheduler with a policy."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._current = VLLM
        self._seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._counts: dict[str, str] = {}
        self._scheduled = 0.0
        for name in ("add_request", "schedule", "update_from_output"):
            setattr(scheduler, name, getattr(self, name))

    def add_request(self, request: Any) -> None:
        wanted = (request.sampling_params.extra_args or {}).get(ARGUMENT, self._current)
        if wanted != self._current and not self._scheduler.requests:
            self._change(wanted)
        type(self._scheduler).add_request(self._scheduler, request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = self._kind.schedule(self._scheduler, *args, **kwargs)
        self._scheduled = time.perf_counter() - began
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The two calls of a turn of vLLM's loop count for the number of requests in the iteration that has ended."""
        began = time.perf_counter()
        outputs = self._kind.update_from_output(self._scheduler, scheduler_output, model_runner_output)
        seconds = time.perf_counter() - began + self._scheduled
        counts = scheduler_output.num_scheduled_tokens
        if counts and len(counts) == scheduler_output.total_num_scheduled_tokens:  # decodes only
            self._seconds[self._current][len(counts)].append(seconds)
        if not self._scheduler.requests:
            self._write()
        return outputs

    @property
    def _kind(self) -> Any:
        kind: Any = type(self._scheduler)
        return kind.base if self._current == VLLM else kind

    def _change(self, wanted: str) -> None:
        start = time.monotonic()
        overrides = ["policy=vllm_v1"] if wanted == VLLM else shlex.split(wanted)
        self._scheduler.leave()
        size = self._scheduler.vllm_config.parallel_config.tensor_parallel_size
        self._scheduler.follow(make_adapter(overrides, size), lambda: time.monotonic() - start)
        self._current = wanted

    def _write(self) -> None:
        if (path := os.environ.get(FILE)) is None:
            return
        if self._current != VLLM:
            self._counts[self._current] = str(self._scheduler.counts)
        host = {
            name: {
                number: {"milliseconds": median(seconds) * 1e3, "iterations": len(seconds)}
                for number, seconds in sorted(numbers.items())
                if len(seconds) >= 20
            }
            for name, numbers in self._seconds.items()
        }
        write_json(Path(path), {"host": host, "counts": self._counts})
