"""Any workload, policy, chunk, depth, KV cache and order of the streams' work: the same tokens, bit for bit.

    python -m pytest tests/test_random_schedules.py --schedules=10000

draws that many. A failing schedule is shrunk to a small one and printed; drawn numbers repeat, so the command finds it again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rig import Ask, Rig, build
from test_tokens import POLICIES, Workload, workloads
from tiny_models import greedy_references

from cbatch.runtime.any_order import any_order
from cbatch.runtime.races import checked


@dataclass(frozen=True)
class Schedule:
    """small: whether the KV cache makes requests wait or preempt each other. order, every: see `any_order`."""

    workload: Workload
    asynchronous: bool
    small: bool
    order: random.Random
    every: int

    def build(self, policy: str) -> Rig:
        """Everything is looked for at once: wrong tokens, races, and poison that was read."""
        workload, references = self.workload, greedy_references(self.workload.spec)
        asks = [
            Ask(references[ask.reference], ask.max_new_tokens, ask.stop_at, ask.arrival_iteration)
            for ask in workload.asks
        ]
        needed = [-(-(len(ask.reference.prompt) + ask.max_new_tokens) // workload.block_size) for ask in asks]
        num_blocks = max(needed) + workload.spare_blocks if self.small else sum(needed)
        streams = checked(any_order(self.order, self.every))
        return build(streams, POLICIES[policy](workload.chunk), asks, spec=workload.spec, asynchronous=self.asynchronous,
                     batch=workload.batch, num_blocks=num_blocks, block_size=workload.block_size, poison=True)  # fmt: skip


schedules = st.builds(
    Schedule,
    workload=workloads,
    asynchronous=st.booleans(),
    small=st.booleans(),
    order=st.randoms(use_true_random=False),
    every=st.sampled_from((8, 2, 40)),
)


@pytest.mark.parametrize("name", POLICIES)
def test_any_schedule_makes_the_tokens_of_generate(name: str, num_schedules: int) -> None:
    @settings(max_examples=num_schedules // len(POLICIES), suppress_health_check=list(HealthCheck))
    @given(schedule=schedules)
    def check(schedule: Schedule) -> None:
        schedule.build(name).run()

    check()
