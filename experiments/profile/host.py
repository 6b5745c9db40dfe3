"""Host time of an iteration in both loops, from requests served by the real engine.

In the synchronous loop it is what the device waits between two iterations: tokens downloaded and taken in, the next
iteration planned, packed, uploaded and launched. In the asynchronous one it is what the host works on an iteration, the
waiting left out; the device sees nothing of it while its iterations take longer.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from cbatch import BatchShape, Engine, Executor, Limits, Request, RunRecord
from cbatch.sim.profile import HostTime
from policies.prefill_first import PrefillFirst

PROMPT, NEW = 16, 48


class Unknown:
    """A cost model for policies that do not predict."""

    def predict(self, shape: BatchShape) -> float:
        return 0.0


def host_time(
    executor: Executor, limits: Limits, num_blocks: int, block_size: int, vocabulary_size: int, *, asynchronous: bool
) -> HostTime:
    """A straight line through the host times of decode iterations of one request, of a quarter batch and of a whole one."""
    medians = {}
    for number in sorted({1, max(limits.max_batch // 4, 1), limits.max_batch}):
        engine = Engine(
            PrefillFirst(),
            executor,
            limits,
            Unknown(),
            num_blocks=num_blocks,
            block_size=block_size,
            asynchronous=asynchronous,
        )
        engine.submit(_requests(number, vocabulary_size))
        medians[number] = _median(engine.run(), number, asynchronous)
    if len(medians) == 1:
        return HostTime(*medians.values())
    slope, constant = np.polyfit(list(medians), list(medians.values()), 1)
    return HostTime(max(float(constant), 0.0), max(float(slope), 0.0))


def _requests(number: int, vocabulary_size: int) -> list[Request]:
    prompts = np.random.default_rng(0).integers(0, vocabulary_size, (number, PROMPT))
    return [Request(index, PROMPT, NEW, prompt=tokens.tolist()) for index, tokens in enumerate(prompts)]


def _median(record: RunRecord, number: int, asynchronous: bool) -> float:
    """Seconds of host time, of the iterations that decode for all requests."""
    steps = [step for step in record.steps if step.num_decode_tokens == number and not step.num_prefill_tokens]
    if asynchronous:
        times = [step.launched_at - step.planned_at + step.done_at - step.received_at for step in steps]
    else:
        times = [after.started - before.ended for before, after in pairwise(steps)]
    return float(np.median(times))
