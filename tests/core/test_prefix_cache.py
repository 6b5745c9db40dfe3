"""With a prefix cache and without, under any policy, every request gets the tokens that it gets alone.

The cache of `Hashing` holds in each place a hash of all tokens up to it, and a token depends on all places that it attends to: a wrong
block anywhere changes the output.

    python -m pytest tests/core/test_prefix_cache.py --cancellations=1000
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from contended import LinearCost
from every_policy import EVERY_POLICY
from fuzz_policy import FuzzPolicy
from pool_check import check_pool
from small_cluster import make_cost

from cbatch import (
    Engine,
    Eviction,
    FinishReason,
    Limits,
    Plan,
    PlanError,
    Policy,
    Request,
    Server,
    Step,
    StepResult,
    View,
)
from cbatch.kv import KVSize, PrefixPool, blocks_for
from cbatch.model.topology import Topology
from cbatch.plan_check import check_plan, check_rules
from cbatch.sim.executor import SimExecutor
from cbatch.stall import Patience
from policies.evictions import FIFO, LFU, LRU, SLRU, TLRU, Belady, Marconi, SoftTTL

LONGEST, STOPS = 60, (5, 6, 7, 8)
MODES = {"sync": (1, False), "async": (1, True), "pipeline": (4, True), "pipeline_sync": (2, False)}
EVICTIONS: list[Callable[[], Eviction]] = [
    LRU,
    LFU,
    FIFO,
    SLRU,
    lambda: TLRU(4, 2),
    Marconi,
    Belady,
    lambda: SoftTTL(0.01),
]


def after(state: int, token: int) -> int:
    return hash((state, token))


def sampled(states: Sequence[int]) -> int:
    return hash(tuple(states)) % 7 + 3


def text_of(request: Request) -> list[int]:
    """Prompt and output of a request alone."""
    assert request.prompt is not None
    tokens, end, states = list(request.prompt), request.max_tokens, list[int]()
    for token in tokens:
        states.append(after(states[-1] if states else 0, token))
    while len(tokens) < end:
        tokens.append(sampled(states))
        states.append(after(states[-1], tokens[-1]))
        end = len(tokens) if tokens[-1] in request.stop_tokens else end
    return tokens


class Hashing(SimExecutor):
    """Simulated time. By request: tokens computed, tokens computed again, and tokens found that it had not computed before."""

    needs_tokens = True

    def launch(self, step: Step) -> Any:
        table, size = step.table, step.pool.block_size
        assert table.tokens is not None
        if not step.index:
            self.cache = [0] * step.pool.num_tokens
            self.num_computed, self.num_again, self.num_found, self.most = (Counter[int]() for _ in range(4))
            self.sampled: deque[Any] = deque(maxlen=self.num_stages)
        output = np.zeros(len(step.rows), np.int32)
        for place, (row, start, count) in enumerate(zip(step.rows, step.start, step.num_tokens, strict=True)):
            inputs = table.tokens[row, start : start + count].tolist()
            if step.carry[place] >= 0:
                inputs[-1] = int(self.sampled[0][step.carry[place]])
            at = np.arange(start + count)
            slots = (step.pool.tables[row, at // size] * size + at % size).tolist()
            state = self.cache[slots[start - 1]] if start else 0
            for slot, token in zip(slots[start:], inputs, strict=True):
                self.cache[slot] = state = after(state, token)
            output[place] = sampled([self.cache[slot] for slot in slots])
            id_ = step.requests[place].id
            self.num_computed[id_] += int(count)
            self.num_again[id_] += max(min(int(start + count), self.most[id_]) - int(start), 0)
            self.num_found[id_] += max(int(start) - self.most[id_], 0)
            self.most[id_] = max(self.most[id_], int(start + count))
        self.sampled.append(output)
        return super().launch(step), output

    def ends_at(self, in_flight: Any) -> float:
        return super().ends_at(in_flight[0])

    def wait(self, in_flight: Any) -> StepResult:
        span, output = in_flight
        return super().wait(span)._replace(tokens=output)


class AnyOrder(FuzzPolicy):
    """Preempts and rejects before and after it adds."""

    def plan(self, view: View) -> Plan:
        plan, numbers = view.plan(), self._random
        if numbers.random() < 0.4:
            return super().plan(view)
        for _ in range(numbers.randint(1, 6)):
            free = [request for request in (*view.running, *view.waiting) if request not in plan.plan.preempt]
            request, how = numbers.choice(free or [None]), numbers.random()
            if request is None or how < 0.2:
                plan.add_decodes(preempt_newest=numbers.random() < 0.5)
            elif how < 0.8:
                self._add(plan, view, request)
            elif how < 0.95 and request in view.running:
                plan.preempt(request)
            elif request in view.waiting and request not in (gone for gone, _ in plan.plan.reject):
                plan.reject(request, "why")
                if numbers.random() < 0.5:
                    plan = view.plan()
        return plan.build() if plan.num_requests or plan.plan.preempt or plan.plan.reject else super().plan(view)


class ByHand:
    """Writes some plans by hand, many of them illegal; the rules and the engine agree about each. Else plans as `policy`."""

    def __init__(self, policy: Policy, numbers: random.Random) -> None:
        self.policy, self.numbers, self.num_legal = policy, numbers, 0

    def plan(self, view: Any) -> Plan:
        plan, numbers = Plan(), self.numbers
        plan.preempt = [request for request in view.running if numbers.random() < 0.2]
        for request in (*view.running, *view.waiting):
            if request.num_ready and request not in plan.preempt and numbers.random() < 0.6:
                plan.requests.append(request)
                plan.num_tokens.append(numbers.randint(1, request.num_ready))
        legal = set()
        for check in (lambda: check_rules(plan, view, "ByHand"), lambda: check_plan(plan, view._state, view, "ByHand")):
            try:
                check()
                legal.add(True)
            except PlanError as error:
                legal.add(str(error))
        assert len(legal) == 1, legal
        self.num_legal += True in legal
        return plan if True in legal and plan.requests and numbers.random() < 0.7 else self.policy.plan(view)


def draw(numbers: random.Random) -> list[Request]:
    """Prompts that continue what earlier requests were asked and have answered, or repeat them."""
    now, requests, texts = 0.0, list[Request](), [[3, 4, 5, 6, 7, 8, 9, 3]]
    for id_ in range(numbers.randint(4, 10)):
        now += numbers.choice((0.0, 0.0, 2e-3, 0.02))
        text = numbers.choice(texts)
        prompt = text[: numbers.choice((numbers.randint(0, len(text)), len(text)))]
        prompt = (prompt + numbers.choices(range(3, 10), k=numbers.choice((0, 0, 1, 5))))[: LONGEST - 12] or [3]
        stops = STOPS if numbers.random() < 0.3 else ()
        slots = {
            "arrival_time": now,
            "session": numbers.choice(("a", "b", None)),
            "last": numbers.choice((False, False, True, None)),
            "extra": {"tool": "ls"},
            "priority": numbers.randint(0, 2),
        }
        request = Request(id_, len(prompt), numbers.randint(1, 12), prompt=prompt, stop_tokens=stops, **slots)  # type: ignore[arg-type]
        requests.append(request)
        texts.append(text_of(request))
    return requests


class Lost:
    """Counts the tokens that preemptions lose, by request."""

    def __init__(self, engine: Engine) -> None:
        self.of, self._state, self._preempt = Counter[int](), engine.state, engine.state.preempt
        engine.state.preempt = self.preempt  # type: ignore[method-assign]

    def preempt(self, request: Request) -> None:
        self.of[request.id] += int(self._state.table.computed[request._row])
        self._preempt(request)


def serve(make: Callable[[random.Random], Any], seed: int, mode: str) -> tuple[int, int]:
    """Serves random requests; returns the tokens found at first admissions, and at later ones."""
    numbers, (num_stages, asynchronous) = random.Random(seed), MODES[mode]
    requests, batch, size = draw(numbers), numbers.randint(1, 4), numbers.choice((1, 2, 4))
    limits = Limits(batch, LONGEST + batch, LONGEST, tile=8, num_stages=num_stages, max_running=batch * num_stages)
    longest = max(blocks_for(request.max_tokens, size) for request in requests)
    kv = KVSize(longest + numbers.choice((0, 2, 20, 400)), size)
    executor = Hashing(make_cost(Topology(1, num_stages)) if num_stages > 1 else LinearCost(), 1e-4)
    server = Server(executor, limits, LinearCost(), kv, asynchronous, Patience(50.0, 2000), numbers.choice(EVICTIONS)())
    engine, often = server.engine(make(numbers), requests), numbers.choice((0.0, 0.0, 0.05))
    lost, pool = Lost(engine), engine.state.pool
    assert isinstance(pool, PrefixPool)

    def look(engine: Engine) -> None:
        if numbers.random() < often:
            engine.cancel(numbers.choice(requests))
        check_pool(pool)
        for request in engine.view.waiting:
            assert request.num_computed == request.num_computed <= (request.num_known - 1) // size * size
            assert request.num_ready >= 1 and engine.view.kv.num_shared(request) * size <= request.num_computed

    engine.run(look)
    assert pool.num_used == 0
    for request in requests:
        text = text_of(request)[request.num_prompt_tokens :]
        whole = request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert request.output == (text if whole else text[: request.num_output_tokens]), (
            f"seed {seed}, request {request.id}"
        )
        assert request.num_recomputed_tokens == executor.num_again[request.id]
        left = lost.of[request.id] - request.num_recomputed_tokens - request.num_cached_again
        assert request.num_lost_tokens == lost.of[request.id] and left >= 0
        if request.finish_reason is FinishReason.LENGTH:
            found = executor.num_found[request.id] + request.num_cached_again
            computed = request.num_prompt_tokens + request.num_output_tokens - 1 + lost.of[request.id]
            assert executor.num_computed[request.id] + found == computed, "what is not computed was found"
            assert not left, "what was lost was computed again or found"
    return sum(request.num_cached_tokens for request in requests), sum(request.num_cached_again for request in requests)


def fuzz(numbers: random.Random) -> FuzzPolicy:
    return AnyOrder(numbers.randint(0, 1_000_000), preempts=numbers.choice((0.0, 0.05, 0.2)), rejects=0.02)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_any_plan_gives_the_tokens_of_each_request_alone(mode: str, num_cancellations: int, draw: int) -> None:
    """By plans within the builder, and by plans written by hand."""
    counts = [serve(fuzz, seed, mode) for seed in range(draw, draw + num_cancellations)]
    counts += [
        serve(lambda numbers: ByHand(fuzz(numbers), numbers), seed, mode)
        for seed in range(draw, draw + num_cancellations)
    ]
    assert all(map(sum, zip(*counts, strict=True))), "some tokens are found, at first and later"


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY_POLICY)
def test_the_policies_serve_with_a_cache(name: str, num_cancellations: int, draw: int) -> None:
    for seed in range(draw, draw + max(num_cancellations // 4, 1)):
        for mode in MODES:
            serve(lambda numbers: EVERY_POLICY[name](8 * numbers.randint(1, 3)), seed, mode)
