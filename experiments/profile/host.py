"""Measures the host time of an iteration in both loops, from requests served by the real engine.

In the synchronous loop the host time is the device's pause between two iterations: tokens are downloaded and absorbed, and the
next iteration is planned, packed, uploaded and launched. In the asynchronous loop it is the host's work per iteration, without
waiting; longer iterations of the device hide this work. Both are measured on decodes, replayed from graphs. The extra times of
launching operation by operation, of chunks of prompts, and of prompts that the prefix cache holds, are measured separately.
"""

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, get_args

import numpy as np
from scipy.optimize import nnls

from cbatch import Request, Server
from cbatch.arrivals import Listed
from cbatch.sim import HostTime
from cbatch.sim.measured import HostTimes
from cbatch.sim.provenance import Loop
from experiments.profile.batches import prompts
from experiments.profile.laboratory import Batch, Laboratory
from experiments.setup.servers import equal_requests
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.prefill_first import PrefillFirst
from policies.sarathi_serve import SarathiServe

PROMPT, NEW = 16, 48
LONG, CHUNK = 1024, 512
_ATTEMPTS, _REPEATS = 5, 9
_ONE_BY_ONE = 10**6
"""Iterations between arrivals. A request arrives when its iteration comes, or sooner if nothing is left to compute."""


def host_times(server: Server, laboratory: Laboratory, vocabulary_size: int, captured: int) -> HostTimes:
    """Returns the host times of both loops. captured: most tokens of an iteration with a graph; 0 without graphs."""
    eager = eager_seconds(laboratory, captured) if captured else 0.0
    times = {loop: _host_time(server, vocabulary_size, loop == "async") for loop in get_args(Loop)}
    if captured:
        chunk = chunk_seconds(server, vocabulary_size, times["sync"])
        times["sync"] = replace(times["sync"], seconds_per_chunk=round(chunk, 7))
    prompt, token = found_seconds(server, vocabulary_size)
    extra: dict[str, Any] = {
        "eager_seconds": round(eager, 5),
        "receives_in_launch": eager > 0,
        "seconds_per_found_prompt": round(prompt, 7),
        "seconds_per_found_token": round(token, 12),
    }
    return {loop: replace(time, **extra) for loop, time in times.items()}


def _host_time(server: Server, vocabulary_size: int, asynchronous: bool) -> HostTime:
    """Fits a line with nonnegative slope to the host times of decodes, by least squares.

    Measures again if other work on the machine disturbs the line so much that its time for 0 requests is not positive. If all
    attempts fail, returns the shortest time of the last attempt for any number of requests.
    """
    for _ in range(_ATTEMPTS):
        medians = _medians(server, vocabulary_size, asynchronous)
        (constant, slope), _residual = nnls([[1, number] for number in medians], list(medians.values()))
        if constant > 0:
            return HostTime(round(float(constant), 7), round(float(slope), 10))
    return HostTime(round(min(medians.values()), 7))


def eager_seconds(laboratory: Laboratory, captured: int) -> float:
    """Returns the extra host seconds of launching without a graph. captured: most tokens of an iteration with a graph.

    They are counted beyond the launch of a decode, which the other host times include. Neither includes the work for a prompt's tokens.
    """
    decode, eager = Batch((), (PROMPT,)), Batch(prompts(captured + 1))
    if not laboratory.holds(eager):
        return 0.0
    return max(laboratory.launch_seconds(eager) - laboratory.launch_seconds(decode), 0.0)


def chunk_seconds(server: Server, vocabulary_size: int, decodes: HostTime) -> float:
    """Returns what each chunk of a prompt adds to the pause of the synchronous loop, beyond the decodes of the same run.

    decodes: pauses of iterations without prompts, whose slope counts here: the host may be slower than when they were measured.
    """
    limits = server.limits
    prompt = min(LONG, limits.max_request_tokens - NEW)
    requests = equal_requests(limits.max_batch, prompt, NEW, vocabulary_size)
    steps = server.serve(SarathiServe(Fixed(min(CHUNK, limits.max_tokens))), requests, asynchronous=False).steps
    pauses = [(after.started - before.ended, after) for before, after in pairwise(steps)]
    beyond = [(seconds - decodes.of(step.num_requests), step) for seconds, step in pauses]
    usual = median(seconds for seconds, step in beyond if not step.num_prefill_tokens)
    with_chunks = [(seconds - usual, step) for seconds, step in beyond if step.num_prefill_tokens]
    each = median(seconds / (step.num_requests - step.num_decode_tokens) for seconds, step in with_chunks)
    return max(each, 0.0)


def found_seconds(server: Server, vocabulary_size: int) -> tuple[float, float]:
    """Returns the host seconds of a request that finds its prompt in the prefix cache: beyond a decode's, and per found token.

    The shortest launches of a short and of a long prompt, and of decodes, tell: other work on the machine hides differences of medians.
    """
    server, limits, decodes = replace(server, prefix_cache=LRU()), server.limits, list[float]()
    launches = dict[int, float]()  # by tokens found
    for length in (server.kv.block_size + 1, min(limits.max_request_tokens, server.kv.num_tokens) - 2):
        prompt = np.random.default_rng(0).integers(0, vocabulary_size, length).tolist()
        requests = [Request(number, length, 2, prompt=prompt) for number in range(1 + _REPEATS)]
        arrivals = Listed(requests, {number: number * _ONE_BY_ONE for number in range(1, 1 + _REPEATS)})
        steps = server.serve(SarathiServe(Fixed(limits.max_tokens)), arrivals).steps
        begins = {request.admitted_at for request in requests[1:]}
        admitting = [step for step in steps if step.planned_at in begins]
        launches[requests[-1].num_cached_tokens] = min(step.launched_at - step.planned_at for step in admitting)
        decodes += [step.launched_at - step.planned_at for step in steps if not step.num_prefill_tokens]
    (few, least), (many, most) = launches.items()
    per_token = max(most - least, 0.0) / (many - few)
    return max(least - few * per_token - min(decodes), 0.0), per_token


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
