"""Real tokens on threads: whatever the policy, the model, its stages and ranks, each request gets the tokens that it gets alone.

The tokens are those of `transformers`' own `generate`, on tiny models.
"""

from dataclasses import replace

import pytest
import torch
from poison import poisoned
from races import check_races
from rig import Ask, build, check_accounts, threads
from schedules import UnitCost
from test_random_schedules import POLICIES
from tiny_models import (
    CPU,
    DEEP,
    LLAMA,
    LONGEST_OUTPUT,
    NUM_REFERENCES,
    QWEN3,
    TIE,
    greedy_references,
    plain_model,
    sampled_references,
)

from cbatch import Limits, Server
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.runtime import cpu
from cbatch.runtime.options import Options
from policies.chunking import Fixed
from policies.sarathi_serve import SarathiServe

NANOGPT = replace(LLAMA, name="tiny-nanogpt", family="nanogpt", num_kv_heads=4, intermediate_size=128)
QWEN2 = replace(LLAMA, name="tiny-qwen2", family="qwen2", vocab_size=97, tied_embeddings=True)
ODD = replace(LLAMA, name="tiny-odd", family="mistral", num_kv_heads=1, head_dim=12, tied_embeddings=True)


PREEMPTING = ("prefill_first", "sarathi_serve", "vllm_v1", "fuzz")
NAMES = ("request_level", "orca", "sarathi", "fuzz_rejects", *PREEMPTING)


@pytest.mark.long
@pytest.mark.parametrize(("name", "asynchronous"), [("orca", False), *((name, True) for name in NAMES)])
def test_policies_make_the_tokens_of_generate(name: str, asynchronous: bool) -> None:
    """Greedy and drawn tokens. The KV cache is little larger than a request: policies preempt, or wait for blocks."""
    references = [*greedy_references(LLAMA)[8:12], *sampled_references(LLAMA)[:4]]
    asks = [
        Ask(place, stop_at=9 if place % 3 == 0 else None, arrival_iteration=place // 4)
        for place in range(len(references))
    ]
    rig = build(
        threads(),
        POLICIES[name](8),
        asks,
        references,
        asynchronous=asynchronous,
        num_blocks=15,
        poison=True,
        check=True,
    )
    rig.run()
    if name in PREEMPTING:
        assert sum(request.num_preemptions for request in rig.requests) > 0
        assert sum(request.num_recomputed_tokens for request in rig.requests) > 0


BACKENDS: list[tuple[ModelSpec, Options, int]] = [
    (replace(LLAMA, family="mistral"), Options(), 1),
    (ODD, Options(), 2),
    (QWEN2, Options(), 1),
    (QWEN3, Options(layers=(1, 1)), 2),
    (NANOGPT, Options(), 2),
    (DEEP, Options(layers=(1, 3)), 2),
    (DEEP, Options(), 4),
    (replace(NANOGPT, dtype="float64"), Options(tensor_parallel=2), 1),
    (replace(QWEN2, dtype="float64"), Options(tensor_parallel=4), 2),
]
"""Ranks add up in another order than the whole model: in float64 that changes no token."""


@pytest.mark.parametrize(("spec", "options", "num_stages"), BACKENDS, ids=lambda part: getattr(part, "name", ""))
def test_every_family_makes_the_tokens_of_generate(spec: ModelSpec, options: Options, num_stages: int) -> None:
    limits, kv = Limits(max_batch=3, max_tokens=64, max_request_tokens=64, num_stages=num_stages), KVSize(80, 8)
    executor = check_races(poisoned(cpu.build, spec, limits, kv, options))
    references = greedy_references(spec, 4)
    requests = [reference.request(id_, LONGEST_OUTPUT) for id_, reference in enumerate(references)]
    engine = Server(executor, limits, UnitCost(), kv).engine(SarathiServe(Fixed(9)), requests)
    record = engine.run()
    executor.close()
    assert [request.output for request in requests] == [reference.output for reference in references]
    check_accounts(engine, requests)
    assert any(later.launched_at < step.ended for step, later in zip(record.steps, record.steps[1:], strict=False))


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
