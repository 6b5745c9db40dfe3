"""Any workload, policy, chunk, depth, KV cache and order of the streams' work: each request gets the tokens that it gets alone.

The tokens are those of `transformers`' own `generate`, or drawn one request at a time.

    python -m pytest tests/runtime/test_random_schedules.py --schedules=10000

draws that many. The policies take turns of about 30 schedules, so that a run that is cut has drawn of all alike (with -n, give
--maxschedchunk=1 too). Drawn numbers repeat; --draw=N draws others. A failing schedule is shrunk to a small one, printed, and made again by the --replay=... that
stands below it. --junitxml=FILE has the number of schedules of each test, and of those in which drafts were verified.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from zlib import crc32

import pytest
from any_order import any_order
from every_policy import EVERY_POLICY
from fuzz_policy import FuzzPolicy
from guesses import Speculating
from hypothesis import HealthCheck, given, reproduce_failure, seed, settings
from hypothesis import __version__ as hypothesis_version
from hypothesis import strategies as st
from rig import Ask, Rig, build
from tiny_models import (
    DEEP,
    LLAMA,
    LONGEST_OUTPUT,
    NUM_REFERENCES,
    QWEN3,
    Reference,
    greedy_references,
    sampled_references,
)

from cbatch import Policy
from cbatch.drafts import Drafter, ModelDrafter, NgramDrafter
from cbatch.model import ModelSpec

MOST_IN_A_TURN = 32
POLICIES = {
    **EVERY_POLICY,
    "fuzz": lambda chunk: FuzzPolicy(seed=chunk),
    "fuzz_rejects": lambda chunk: FuzzPolicy(seed=chunk, preempts=0.1, rejects=0.03),
}
"""By the number of tokens of a chunk."""


class Fading(random.Random):
    """Random numbers of a seed, and zeros after the first `num_draws`, so that an order shrinks to few changes."""

    def __init__(self, seed: int, num_draws: int) -> None:
        super().__init__(seed)
        self._left = num_draws

    def getrandbits(self, k: int) -> int:
        self._left -= 1
        return super().getrandbits(k) if self._left >= 0 else 0


@dataclass(frozen=True)
class Workload:
    """asks: their references are those of the schedule. spare_blocks: of a small KV cache, beyond what the longest request needs."""

    spec: ModelSpec
    asks: tuple[Ask, ...]
    batch: int
    chunk: int
    block_size: int
    spare_blocks: int


@dataclass(frozen=True)
class Schedule:
    """One run of a policy, but for the policy.

    max_drafts: 0: none; else drafts, which change no token, whether tokens are drawn or not. drafter: "guesses", of which one in four is wrong;
    "ngram", looked up, and mostly wrong or not found; "other", of another model; "same", of the model itself, which are right unless tokens are drawn.
    sizes: number of layers of each pipeline stage; four layers in all are those of `DEEP`. num_ranks: of each stage. small: whether the KV cache makes requests
    wait or preempt each other. sampled: whether tokens are drawn. every: see `any_order`, whose random numbers are those of the
    seed `order`, zeros after the first `num_draws`.
    """

    workload: Workload
    sizes: tuple[int, ...]
    num_ranks: int
    asynchronous: bool
    small: bool
    sampled: bool
    max_drafts: int
    drafter: str
    every: int
    num_draws: int
    order: int

    def build(self, policy: str) -> Rig:
        """Everything is looked for at once: wrong tokens, races, and poison that was read."""
        workload = self.workload
        return build(
            any_order(Fading(self.order, self.num_draws), len(self.sizes), self.every),
            self.speculating(POLICIES[policy](workload.chunk)),
            workload.asks,
            self.references,
            spec=self.spec,
            num_stages=len(self.sizes),
            sizes=self.sizes,
            num_ranks=self.num_ranks,
            asynchronous=self.asynchronous,
            batch=workload.batch,
            num_blocks=self.num_blocks,
            block_size=workload.block_size,
            poison=True,
            check=True,
            max_drafts=self.max_drafts,
            drafter=self.drafters[self.drafter] if self.max_drafts else None,
        )

    @property
    def drafters(self) -> dict[str, Drafter | None]:
        other = replace(self.spec, num_layers=1, num_kv_heads=1, seed=3)
        models = {name: ModelDrafter(spec, self.max_drafts) for name, spec in (("other", other), ("same", self.spec))}
        return {"guesses": None, "ngram": NgramDrafter(self.max_drafts, 1, 2), **models}

    def speculating(self, policy: Policy) -> Policy:
        """Returns the policy, which drafts if the schedule has drafts."""
        return Speculating(policy, self.order) if self.max_drafts and not isinstance(policy, FuzzPolicy) else policy

    @property
    def references(self) -> list[Reference]:
        return sampled_references(self.spec) if self.sampled else greedy_references(self.spec)

    @property
    def spec(self) -> ModelSpec:
        """In float64: ranks add up in another order than the whole model, which then changes no token."""
        spec = self.workload.spec if sum(self.sizes) == self.workload.spec.num_layers else DEEP
        return replace(spec, dtype="float64")

    @cached_property
    def num_blocks(self) -> int:
        """Enough for the longest request, and a few to spare; or for all."""
        workload, references = self.workload, self.references
        needed = [
            -(-(len(references[ask.reference].prompt) + ask.max_new_tokens) // workload.block_size)
            for ask in workload.asks
        ]
        return max(needed) + workload.spare_blocks if self.small else sum(needed)


asks = st.builds(
    Ask,
    reference=st.integers(0, NUM_REFERENCES - 1),
    max_new_tokens=st.integers(1, LONGEST_OUTPUT),
    arrival_iteration=st.integers(0, 12),
    stop_at=st.none() | st.integers(0, LONGEST_OUTPUT - 1),
)
workloads = st.builds(
    Workload,
    spec=st.sampled_from((LLAMA, QWEN3)),
    asks=st.lists(asks, min_size=1, max_size=8).map(tuple),
    batch=st.integers(1, 6),
    chunk=st.sampled_from((1, 3, 8, 16, 32)),
    block_size=st.sampled_from((1, 3, 4, 8, 16)),
    spare_blocks=st.integers(0, 3),
)
schedules = st.builds(
    Schedule,
    workload=workloads,
    sizes=st.sampled_from(((2,), (1, 1), (3, 1), (1, 2, 1), (1, 1, 1, 1))),
    num_ranks=st.sampled_from((1, 1, 2, 4)),
    asynchronous=st.booleans(),
    small=st.booleans(),
    sampled=st.booleans(),
    max_drafts=st.sampled_from((0, 0, 1, 3, 6)),
    drafter=st.sampled_from(("guesses", "ngram", "other", "same")),
    every=st.sampled_from((8, 2, 40)),
    num_draws=st.integers(0, 2**14),  # about 30 an iteration
    order=st.integers(0, 2**32 - 1),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All policies in each turn, and as many schedules as are asked for in all; of few, two for each of some policies: the first is trivial."""
    number = metafunc.config.getoption("--schedules")
    turns, every = -(-number // (MOST_IN_A_TURN * len(POLICIES))), -(-2 * len(POLICIES) // number)
    cells = list(product(range(turns), [*POLICIES][::every]))
    drawn = [number // len(cells) + (place < number % len(cells)) for place in range(len(cells))]
    cases = [(name, turn, num_drawn) for (turn, name), num_drawn in zip(cells, drawn, strict=True) if num_drawn]
    metafunc.parametrize(("name", "turn", "num_drawn"), cases, ids=[f"{name}-{turn}" for name, turn, _ in cases])


@pytest.mark.long
def test_any_schedule_makes_the_tokens_of_generate(
    name: str, turn: int, num_drawn: int, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    """Each policy draws schedules of its own, others in each turn."""
    counts: Counter[str] = Counter()

    def check(schedule: Schedule) -> None:
        rig = schedule.build(name)
        rig.run()
        counts.update(schedules=1, with_drafts=any(step.num_drafts for step in rig.engine.record.steps))
        if schedule.drafter == "same" and not schedule.sampled:
            accepted, compared = rig.engine.state.drafts.counts
            assert accepted.tolist() == compared.tolist()

    run = settings(
        max_examples=num_drawn, suppress_health_check=list(HealthCheck), print_blob=True, report_multiple_bugs=False
    )(given(schedule=schedules)(check))
    run = seed(crc32(f"{name} {pytestconfig.getoption('--draw')} {turn}".encode()))(run)
    if blob := pytestconfig.getoption("--replay"):
        run = reproduce_failure(hypothesis_version, blob.encode())(run)
    run()
    for key, number in counts.items():
        record_property(key, number)
