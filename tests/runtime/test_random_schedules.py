"""Any workload, policy, chunk, depth, KV cache and order of the streams' work: the same tokens, bit for bit.

    python -m pytest tests/runtime/test_random_schedules.py --schedules=10000 --record=reproduction/results

draws that many, shows how far it is, and writes results/cpu/random_schedules.json. The policies take turns of
about 30 schedules, so that a run that is cut has drawn of all alike (with -n, give --maxschedchunk=1 too). Depth is the number of
iterations in flight while the next is planned: the number of pipeline stages, in the synchronous loop one fewer. Drawn numbers
repeat; --draw=N draws others. A failing schedule is shrunk to a small one, printed, and made again by the --replay=... that
stands below it.
"""

import random
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from zlib import crc32

import pytest
from any_order import any_order
from hypothesis import HealthCheck, given, reproduce_failure, seed, settings
from hypothesis import __version__ as hypothesis_version
from hypothesis import strategies as st
from races import checked
from rig import Ask, Rig, build
from tally import Tally
from test_tokens import POLICIES, Workload, workloads
from tiny_models import DEEP, greedy_references

from cbatch.model import ModelSpec

MOST_IN_A_TURN = 32


class Fading(random.Random):
    """Random numbers of a seed, and zeros after the first `num_draws`, so that an order shrinks to few changes."""

    def __init__(self, seed: int, num_draws: int) -> None:
        super().__init__(seed)
        self._left = num_draws

    def getrandbits(self, k: int) -> int:
        self._left -= 1
        return super().getrandbits(k) if self._left >= 0 else 0


@dataclass(frozen=True)
class Schedule:
    """One run of a policy, but for the policy.

    sizes: number of layers of each pipeline stage; four layers in all are those of `DEEP`. num_ranks: of each stage; where
    there are several, in float64, against the tokens of the whole model in float64. small: whether the KV cache makes requests wait or preempt each other. every: see `any_order`, whose random numbers
    are those of the seed `order`, zeros after the first `num_draws`.
    """

    workload: Workload
    sizes: tuple[int, ...]
    num_ranks: int
    asynchronous: bool
    small: bool
    every: int
    num_draws: int
    order: int

    def build(self, policy: str) -> Rig:
        """Everything is looked for at once: wrong tokens, races, and poison that was read."""
        workload, references = self.workload, greedy_references(self.spec)
        asks = [
            Ask(references[ask.reference], ask.max_new_tokens, ask.stop_at, ask.arrival_iteration)
            for ask in workload.asks
        ]
        streams = checked(any_order(Fading(self.order, self.num_draws), self.every, len(self.sizes)))
        return build(
            streams,
            POLICIES[policy](workload.chunk),
            asks,
            spec=self.spec,
            num_stages=len(self.sizes),
            sizes=self.sizes,
            num_ranks=self.num_ranks,
            asynchronous=self.asynchronous,
            batch=workload.batch,
            num_blocks=self.num_blocks,
            block_size=workload.block_size,
            poison=True,
        )

    @property
    def spec(self) -> ModelSpec:
        spec = self.workload.spec if sum(self.sizes) == self.workload.spec.num_layers else DEEP
        return replace(spec, dtype="float64") if self.num_ranks > 1 else spec

    @cached_property
    def num_blocks(self) -> int:
        """Enough for the longest request, and a few to spare; or for all."""
        workload, references = self.workload, greedy_references(self.spec)
        needed = [
            -(-(len(references[ask.reference].prompt) + ask.max_new_tokens) // workload.block_size)
            for ask in workload.asks
        ]
        return max(needed) + workload.spare_blocks if self.small else sum(needed)


schedules = st.builds(
    Schedule,
    workload=workloads,
    sizes=st.sampled_from(((2,), (1, 1), (3, 1), (1, 1, 1, 1))),
    num_ranks=st.sampled_from((1, 1, 2, 4)),
    asynchronous=st.booleans(),
    small=st.booleans(),
    every=st.sampled_from((8, 2, 40)),
    num_draws=st.integers(0, 2**14),  # about 30 an iteration
    order=st.integers(0, 2**32 - 1),
)


@pytest.fixture(scope="module")
def tally(pytestconfig: pytest.Config) -> Tally:
    number, folder = pytestconfig.getoption("--schedules"), pytestconfig.getoption("--record")
    return Tally("schedules", number, "random_schedules", folder, hypothesis=hypothesis_version)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All policies in each turn, and as many schedules as are asked for in all."""
    number = metafunc.config.getoption("--schedules")
    cells = list(product(range(-(-number // (MOST_IN_A_TURN * len(POLICIES)))), POLICIES))
    drawn = [number // len(cells) + (place < number % len(cells)) for place in range(len(cells))]
    cases = [(name, turn, num_drawn) for (turn, name), num_drawn in zip(cells, drawn, strict=True) if num_drawn]
    metafunc.parametrize(("name", "turn", "num_drawn"), cases, ids=[f"{name}-{turn}" for name, turn, _ in cases])


def test_any_schedule_makes_the_tokens_of_generate(
    name: str, turn: int, num_drawn: int, tally: Tally, pytestconfig: pytest.Config, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each policy draws schedules of its own, others in each turn."""

    def check(schedule: Schedule) -> None:
        with tally.failing(f"{name} {schedule}"):
            rig = schedule.build(name)
            rig.run()
        steps, workload = rig.engine.record.steps, schedule.workload
        tally.count(
            sums={
                "iterations": len(steps),
                "tokens": sum(step.num_sampled for step in steps),
                "preemptions": sum(step.num_preempted for step in steps),
            },
            kinds={
                "policy": name,
                "model": schedule.spec.name,
                "chunk": workload.chunk,
                "stages": len(schedule.sizes),
                "ranks": schedule.num_ranks,
                "depth": rig.engine._depth,
                "kv": "small" if schedule.small else "ample",
                "every": schedule.every,
                "requests": len(workload.asks),
            },
        )

    run = given(schedule=schedules)(check)
    run = settings(
        max_examples=num_drawn, suppress_health_check=list(HealthCheck), print_blob=True, report_multiple_bugs=False
    )(run)
    run = seed(crc32(f"{name} {pytestconfig.getoption('--draw')} {turn}".encode()))(run)
    if blob := pytestconfig.getoption("--replay"):
        run = reproduce_failure(hypothesis_version, blob.encode())(run)
    with capfd.disabled(), tally.found(f"{name}-0"):
        run()
