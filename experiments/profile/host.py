"""Host time of an iteration in both loops, from requests served by the real engine.

In the synchronous loop this is the device's pause between two iterations: tokens downloaded and absorbed, the next
iteration planned, packed, uploaded and launched. In the asynchronous loop it is the host's work per iteration without
its waiting, which the iterations of the device hide if they take longer. Both are measured on decodes, replayed from graphs;
the extra time of launching operation by operation is measured separately.
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
    """Returns the host times of both loops. captured: most tokens of an iteration that a graph takes; 0 without graphs."""
    eager = eager_seconds(laboratory, captured) if captured else 0.0
    times = {loop: _host_time(server, vocabulary_size, loop == "async") for loop in get_args(Loop)}
    return {
        loop: HostTime(round(time.seconds, 7), round(time.seconds_per_request, 10), round(eager, 5))
        for loop, time in times.items()
    }


def _host_time(server: Server, vocabulary_size: int, asynchronous: bool) -> HostTime:
    """Fits a line of non-negative slope to the host times of decodes, by least squares.

    Measures again if other work on the machine hides the line, so that its time for 0 requests is not above 0. If it always
    does, returns the shortest of the times last measured, the same for any number of requests.
    """
    for _ in range(_ATTEMPTS):
        medians = _medians(server, vocabulary_size, asynchronous)
        (constant, slope), _residual = nnls([[1, number] for number in medians], list(medians.values()))
        if constant > 0:
            return HostTime(float(constant), float(slope))
    return HostTime(min(medians.values()))


def eager_seconds(laboratory: Laboratory, captured: int) -> float:
    """Returns the host seconds by which launching without a graph takes longer. captured: most tokens that a graph takes."""
    replayed, eager = (Batch(prompts(size)) for size in (captured, captured + 1))
    if not laboratory.holds(eager):
        return 0.0
    return max(laboratory.launch_seconds(eager) - laboratory.launch_seconds(replayed), 0.0)


def _medians(server: Server, vocabulary_size: int, asynchronous: bool) -> dict[int, float]:
    """Serves one request, a quarter of the batch and the whole batch; returns the median host seconds of decodes for all of them."""
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
