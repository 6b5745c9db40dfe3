"""Whatever the policy, the chunk, the KV cache and the loop: each request gets the tokens that it gets alone.

The tokens are those of `transformers`' own `generate`, in float32 on tiny models. Every run is poisoned (NaN in the KV
cache, -1 in the token buffers), so that reading what was never written shows.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import pytest
import torch
from fuzz_policy import FuzzPolicy
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from landscape import LANDSCAPE
from schedules import UnitCost
from tiny_models import (
    CPU,
    LLAMA,
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    NUM_REFERENCES,
    QWEN3,
    TIE,
    Reference,
    greedy_references,
    make_executor,
    plain_model,
    sampled_references,
)

from cbatch import Engine, FinishReason, Limits, Policy, Request, Status
from cbatch.model import ModelSpec
from policies.chunking import Fixed, PDAware, TileAligned
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

LONGEST = LONGEST_PROMPT + LONGEST_OUTPUT

POLICIES: dict[str, Callable[[int], Policy]] = {
    "request_level": lambda chunk: RequestLevel(),
    "orca": lambda chunk: Orca(),
    "prefill_first": lambda chunk: PrefillFirst(),
    "sarathi": lambda chunk: Sarathi(Fixed(chunk)),
    "sarathi_tile_aligned": lambda chunk: Sarathi(TileAligned(8 + chunk)),
    "sarathi_pd_aware": lambda chunk: Sarathi(PDAware()),
    "sarathi_serve": lambda chunk: SarathiServe(Fixed(chunk)),
    "fuzz": lambda chunk: FuzzPolicy(seed=chunk),
    **LANDSCAPE,
}
CHUNKS = (1, 3, 8, 16, 32)


@dataclass(frozen=True)
class Ask:
    """One request of a workload. `stop_at`: the place in the reference whose token is the stop token, if any."""

    reference: int
    max_new_tokens: int
    arrival_iteration: int
    stop_at: int | None

    def stop_tokens(self, reference: Reference) -> tuple[int, ...]:
        return () if self.stop_at is None else (reference.output[self.stop_at],)


@dataclass(frozen=True)
class Workload:
    spec: ModelSpec
    asks: tuple[Ask, ...]
    batch: int
    chunk: int
    block_size: int
    spare_blocks: int  # of a small KV cache, beyond what the longest request needs


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
    chunk=st.sampled_from(CHUNKS),
    block_size=st.sampled_from((1, 3, 4, 8, 16)),
    spare_blocks=st.integers(0, 3),
)


def serve(
    policy: Policy,
    requests: list[Request],
    spec: ModelSpec,
    *,
    batch: int = 4,
    num_blocks: int = 100,
    block_size: int = 4,
    asynchronous: bool,
) -> Engine:
    limits = Limits(batch, max_tokens=LONGEST + batch, max_request_tokens=LONGEST, tile=1)
    executor = make_executor(spec, limits, num_blocks, block_size)
    try:
        engine = Engine(
            policy,
            executor,
            limits,
            UnitCost(),
            num_blocks=num_blocks,
            block_size=block_size,
            asynchronous=asynchronous,
        )
        engine.submit(requests)
        engine.run()
    finally:
        executor.close()
    return engine


def check_served_once(requests: list[Request], engine: Engine) -> None:
    """No request is lost or served twice, and everything that it held is given back."""
    record = engine.record
    assert sorted(request.id for request in record.requests) == [request.id for request in requests]
    assert all(request.status is Status.FINISHED for request in requests)
    ids, times = record.tokens()
    assert Counter(ids.tolist()) == {request.id: len(request.output) for request in requests if request.output}
    assert all(earlier <= later for earlier, later in pairwise(times))
    pool, table = engine.state.pool, engine.state.table
    assert pool.num_used == pool.num_retiring == 0
    assert len(table._free_rows) == table.num_rows


def serve_workload(
    name: str, workload: Workload, references: list[Reference], *, small: bool, asynchronous: bool
) -> Engine:
    chosen = [references[ask.reference] for ask in workload.asks]
    pairs = list(zip(workload.asks, chosen, strict=True))
    requests = [
        reference.request(id_, ask.max_new_tokens, ask.stop_tokens(reference), ask.arrival_iteration)
        for id_, (ask, reference) in enumerate(pairs)
    ]
    needed = [-(-request.max_tokens // workload.block_size) for request in requests]
    num_blocks = max(needed) + workload.spare_blocks if small else sum(needed)
    engine = serve(
        POLICIES[name](workload.chunk),
        requests,
        workload.spec,
        batch=workload.batch,
        num_blocks=num_blocks,
        block_size=workload.block_size,
        asynchronous=asynchronous,
    )
    check_served_once(requests, engine)
    for request, (ask, reference) in zip(requests, pairs, strict=True):
        expected = reference.expected(ask.max_new_tokens, request.stop_tokens)
        assert request.output == expected
        stopped = bool(request.stop_tokens) and expected[-1] in request.stop_tokens
        assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    return engine


def for_each_workload(case: str, num_examples: int) -> Callable[[Callable[[Workload], None]], Callable[[], None]]:
    """Call a check with workloads that hypothesis draws; each case draws its own, in every run the same."""

    def decorate(check: Callable[[Workload], None]) -> Callable[[], None]:
        def run(workload: Workload) -> None:
            check(workload)

        return seed(crc32(case.encode()))(settings(max_examples=num_examples)(given(workload=workloads)(run)))

    return decorate


def share_of(num_workloads: int, name: str) -> int:
    """Fewer for each of the many published policies: together they have most."""
    return max(num_workloads // 8, 1) if name in LANDSCAPE else num_workloads


@pytest.mark.parametrize("small", [False, True], ids=["ample", "small"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_those_of_generate(name: str, asynchronous: bool, small: bool, num_workloads: int) -> None:
    @for_each_workload(f"{name} {asynchronous} {small}", share_of(num_workloads, name))
    def check(workload: Workload) -> None:
        serve_workload(name, workload, greedy_references(workload.spec), small=small, asynchronous=asynchronous)

    check()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", POLICIES)
def test_sampled_tokens_are_those_of_the_seed(name: str, asynchronous: bool, num_workloads: int) -> None:
    @for_each_workload(f"sampled {name} {asynchronous}", share_of(num_workloads // 2, name))
    def check(workload: Workload) -> None:
        serve_workload(name, workload, sampled_references(workload.spec), small=True, asynchronous=asynchronous)

    check()


@pytest.mark.parametrize("spec", [LLAMA, QWEN3], ids=lambda spec: spec.family)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["prefill_first", "sarathi_serve", "vllm_v1", "vllm_v1_lcf", "priority", "fuzz"])
def test_preempted_requests_are_recomputed_to_the_same_tokens(name: str, asynchronous: bool, spec: ModelSpec) -> None:
    """Four prompts of at most 3 blocks are admitted to 9 blocks and grow to 7 each, so they cannot all stay."""
    chosen = [reference for reference in greedy_references(spec) if 9 <= len(reference.prompt) <= 12][:2] * 2
    requests = [reference.request(id_, LONGEST_OUTPUT) for id_, reference in enumerate(chosen)]
    engine = serve(POLICIES[name](8), requests, spec, num_blocks=9, asynchronous=asynchronous)
    check_served_once(requests, engine)
    assert [request.output for request in requests] == [reference.output for reference in chosen]
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.num_recomputed_tokens for request in requests) > 0
    assert sum(step.num_preempted for step in engine.record.steps) == sum(r.num_preemptions for r in requests)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_tokens_past_a_stop_token_are_discarded(asynchronous: bool) -> None:
    """The asynchronous loop has computed one token more for each stopped request; no one gets to see it."""
    chosen = greedy_references(LLAMA)[:6]
    stops = [(reference.output[3 + id_],) for id_, reference in enumerate(chosen)]
    requests = [reference.request(id_, LONGEST_OUTPUT, stops[id_]) for id_, reference in enumerate(chosen)]
    engine = serve(Orca(), requests, LLAMA, asynchronous=asynchronous)
    check_served_once(requests, engine)
    for request, reference, stop in zip(requests, chosen, stops, strict=True):
        assert request.output == reference.expected(LONGEST_OUTPUT, stop)
        assert request.output[-1] in stop
        assert request.finish_reason is FinishReason.STOP
    assert engine.state.num_overshoot_tokens == (len(requests) if asynchronous else 0)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_rejected_request_leaves_nothing_behind(asynchronous: bool) -> None:
    """Some are rejected untouched, some after a preemption, with the tokens that they have, and some while in flight."""
    references = greedy_references(QWEN3)
    rejected, begun = 0, 0
    for number in range(6):
        requests = [reference.request(id_, LONGEST_OUTPUT) for id_, reference in enumerate(references[:8])]
        policy = FuzzPolicy(number, preempts=0.1, rejects=0.05)
        engine = serve(policy, requests, QWEN3, num_blocks=20, asynchronous=asynchronous)
        check_served_once(requests, engine)
        for request, reference in zip(requests, references, strict=False):
            assert request.output == reference.output[: len(request.output)]
            if request.finish_reason is FinishReason.REJECTED:
                rejected += 1
                begun += bool(request.output)
            else:
                assert len(request.output) == LONGEST_OUTPUT
    assert rejected > begun > 0


@pytest.mark.parametrize("spec", [LLAMA, QWEN3], ids=lambda spec: spec.family)
def test_every_reference_depends_on_its_whole_prompt(spec: ModelSpec) -> None:
    """If logits did not depend on every key and value, far beyond rounding, the tests above would prove little."""
    model = plain_model(spec, CPU)
    for reference in greedy_references(spec):
        prompt = torch.tensor(reference.prompt)
        places = torch.arange(len(prompt))
        altered = prompt.repeat(len(prompt), 1)  # [places, tokens]: one token altered in each row
        altered[places, places] = (altered[places, places] + 1) % spec.vocab_size
        with torch.inference_mode():
            change = model(altered).logits[:, -1] - model(prompt[None]).logits[:, -1]
        assert float(change.abs().amax(dim=-1).min()) > 100 * TIE
    assert len({tuple(reference.output) for reference in greedy_references(spec)}) == NUM_REFERENCES
