"""Measures the host time of an iteration in both loops, from requests served by the real engine.

In the synchronous loop the host time is the device's pause between two iterations: tokens are downloaded and absorbed, and the
next iteration is planned, packed, uploaded and launched. In the asynchronous loop it is the host's work per iteration, without
waiting; longer iterations of the device hide this work. Both are measured on decodes, replayed from graphs. The extra time of
launching operation by operation is measured separately.
"""

from itertools import pairwise
from typing import get_args

import numpy as np
from scipy.optimize import nnls

from cbatch import Server
from cbatch.sim import HostTime
from cbatch.sim.measured import HostTimes
from cbatch.sim.provenance import Loop
from experiments.profile.batches import prompts
from experiments.profile.laboratory import Batch, Laboratory
from experiments.settings.servers import equal_requests
from policies.prefill_first import PrefillFirst

PROMPT, NEW = 16, 48
_ATTEMPTS = 5


def host_times(server: Server, laboratory: Laboratory, vocabulary_size: int, captured: int) -> HostTimes:
    """Returns the host times of both loops. captured: most tokens of an iteration with a graph; 0 without graphs."""
    eager = eager_seconds(laboratory, captured) if captured else 0.0
    times = {loop: _host_time(server, vocabulary_size, loop == "async") for loop in get_args(Loop)}
    return {
        loop: HostTime(round(time.seconds, 7), round(time.seconds_per_request, 10), round(eager, 5))
        for loop, time in times.items()
    }


def _host_time(server: Server, vocabulary_size: int, asynchronous: bool) -> HostTime:
    """Fits a line with nonnegative slope to the host times of decodes, by least squares.

    Measures again if other work on the machine disturbs the line so much that its time for 0 requests is not positive. If all
    attempts fail, returns the shortest time of the last attempt for any number of requests.
    """
    for _ in range(_ATTEMPTS):
        medians = _medians(server, vocabulary_size, asynchronous)
        (constant, slope), _residual = nnls([[1, number] for number in medians], list(medians.values()))
        if constant > 0:
            return HostTime(float(constant), float(slope))
    return HostTime(min(medians.values()))


def eager_seconds(laboratory: Laboratory, captured: int) -> float:
    """Returns the extra host seconds of launching without a graph. captured: most tokens of an iteration with a graph."""
    replayed, eager = (Batch(prompts(size)) for size in (captured, captured + 1))
    if not laboratory.holds(eager):
        return 0.0
    return max(laboratory.launch_seconds(eager) - laboratory.launch_seconds(replayed), 0.0)


def _medians(server: Server, vocabulary_size: int, asynchronous: bool) -> dict[int, float]:
    """Serves one request, a quarter of the batch and the whole batch. Returns the median host seconds of decodes for each."""
    medians = {}
    most = server.limits.max_batch
    for number in sorted({1, max(most // 4, 1), most}):
        requests = equal_requests(number, PROMPT, NEW, vocabulary_size)
        steps = server.serve(PrefillFirst(), requests, asynchronous=asynchronous).steps
        steps = [step for step in steps if step.num_decode_tokens == number and not step.num_prefill_tokens]
        if asynchronous:
            times = [step.launched_at - step.planned_at + step.done_at - step.received_at for step in steps]
        else:
            times = [after.started - before.ended for before, after in pairwise(steps)]
        medians[number] = float(np.median(times))
    return medians
