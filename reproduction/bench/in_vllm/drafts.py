"""Tokens of vLLM with speculation, by its own rule and under policies, on one engine in turns: are they the model's?

    python -m reproduction.bench vllm_drafts method=ngram_gpu    # in vLLM's environment

A small random model in float32, greedy. It has 128 tokens, and its layers change the embedding of the last token little, so that outputs repeat now and then
and n-grams are found. A third of the requests have a stop token, and the KV cache holds less than the batch needs, so that requests are preempted.
`transformers` computes each output again in float64: a token that is not the likeliest by more than rounding is wrong.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from cbatch import ModelSpec, Request
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from reproduction import RESULTS
from reproduction.bench.drafts import counters
from reproduction.bench.in_vllm.model import VLLM
from reproduction.bench.peers.cases import Case
from reproduction.bench.peers.measure import graphics_card, store
from reproduction.bench.peers.vllm_engine import ENVIRONMENT, VllmEngine, ngrams_of

BATCH, BUDGET, LONGEST, STOP, DRAFTS = 24, 512, 480, 7, 3
BLOCKS = 320
"""KV blocks of 16 tokens: `BATCH` requests need up to 720."""
SCALE = 0.1
"""Factor of the weights that write to the residual stream."""
PREDICTED = "model=llama-3.1-8b hardware=h200-vllm"
SIDES = (
    VLLM,
    "policy=vllm_v1 chunk=256",
    "policy=vllm_v1 chunk=256 drafting=fixed",
    "policy=sarathi_serve chunking=fixed chunk=64 drafting=fixed drafting.k=1",
    "policy=sarathi_serve chunking=fixed chunk=64 drafting=ema",
    f"policy=vllm_v1 chunk=128 drafting=adaptive {PREDICTED}",
    f"policy=sarathi_serve chunking=fixed chunk=128 drafting=goodput {PREDICTED}",
    f"policy=joint {PREDICTED} policy.most=128",
)
ROUNDING = 1e-3
"""The largest difference of logits, whose standard deviation is about 1, that float32 explains."""


def main(
    method: Literal["ngram", "ngram_gpu"] = "ngram",
    sides: str = ";".join(SIDES),
    requests: Count = 48,
    memory_share: float = 0.2,
    folder: str = RESULTS,
) -> None:
    """Serves, prints and adds the counts to peers.json. sides: `vllm` for vLLM's own rule, or overrides as in the CBATCH variable, separated by ";"."""
    os.environ |= {**ENVIRONMENT, "TRITON_F32_DEFAULT": "ieee"}  # vLLM's attention would multiply in TF32
    hardware, _ = graphics_card()
    spec = replace(load_spec("tiny"), hidden_size=256, head_dim=64, intermediate_size=640, vocab_size=128)
    figures: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as temporary:
        model = write_model(spec, Path(temporary))
        engine = VllmEngine(
            Path(temporary),
            Case("drafts", spec.name, BATCH, BUDGET),
            LONGEST,
            dtype=spec.dtype,
            gpu_memory_utilization=memory_share,
            num_gpu_blocks_override=BLOCKS,
            block_size=16,
            enforce_eager=True,
            attention_config={"backend": "TRITON_ATTN"},
            scheduler_cls="reproduction.bench.in_vllm.turns.TurnsScheduler",
            **ngrams_of(method, DRAFTS, shortest=1),
        )
        with closing(engine):
            first: list[list[int]] = []
            short = cache(partial(shortfalls, model))
            for side in sides.split(";"):
                engine.sampling = {"extra_args": {"cbatch": side}}
                before, served = counters(engine, "num_preemptions"), draw(requests, spec)
                seconds, _ = engine.serve(served)
                counted = counters(engine, "num_preemptions")
                drafts, accepted, verified, preempted = (now - then for now, then in zip(counted, before, strict=True))
                outputs = [request.output for request in served]
                missed = [short(tuple(each.prompt or ()), tuple(each.output)) for each in served]
                first = first or outputs
                figures[side] = {
                    "seconds": seconds,
                    "tokens": sum(map(len, outputs)),
                    "drafts": drafts,
                    "accepted": accepted,
                    "verifications": verified,
                    "preemptions": preempted,
                    "requests_unlike_the_first": sum(a != b for a, b in zip(outputs, first, strict=True)),
                    "requests_not_ended": sum(not ended(request) for request in served),
                    "wrong_tokens": sum(count_wrong(each) for each in missed),
                    "largest_shortfall": max(map(max, missed)),
                    "all_blocks_returned": float(engine.is_empty()),
                }
                shown = ", ".join(f"{key} {value:.6g}" for key, value in figures[side].items())
                print(f"{method} {side}: {shown}", flush=True)
                about = {"section": ["drafts"], "requests": requests, "figures": figures, "engine": engine.settings}
                written = store(f"vllm-tokens-{method}", hardware, about, folder)
    print(f"written: {written}")


def write_model(spec: ModelSpec, folder: Path) -> Any:
    """Writes a checkpoint of random weights; returns the model of `transformers`, in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    from cbatch.runtime.weights import load_model

    model: Any = load_model(spec, torch.device("cpu"))
    for name, weights in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights.mul_(SCALE)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def draw(number: int, spec: ModelSpec) -> list[Request]:
    """Returns requests of 16 to 160 prompt tokens, and of 40 to 300 output tokens, unless a third of them stop before."""
    generator = np.random.default_rng(0)
    prompts, outputs = generator.integers(16, 160, number).tolist(), generator.integers(40, 300, number).tolist()
    ids = [generator.integers(0, spec.vocab_size, prompt).tolist() for prompt in prompts]
    return [
        Request(id_, prompt, new, prompt=ids[id_], stop_tokens=() if id_ % 3 else (STOP,))
        for id_, (prompt, new) in enumerate(zip(prompts, outputs, strict=True))
    ]


def ended(request: Request) -> bool:
    """Returns whether an output ends at its first stop token, or has all tokens and no stop token before the last."""
    *before, last = request.output
    stops = {*request.stop_tokens}
    return stops.isdisjoint(before) and (last in stops or len(request.output) == request.max_new_tokens)


def shortfalls(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Returns by how much the logit of each output token is below that of the likeliest after the tokens before it."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        missed: list[float] = (logits.amax(1) - chosen).tolist()
        return missed


def count_wrong(missed: Sequence[float]) -> int:
    """Returns how many tokens of `shortfalls` are not the likeliest."""
    return sum(shortfall > ROUNDING for shortfall in missed)
