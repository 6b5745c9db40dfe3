"""Decodes with and without drafts (`drafter=ngram`), on text that repeats: tokens per second, and the host's share of an iteration.

The weights of the last layer make the next token a fixed function of the last: a permutation whose cycles have 32 tokens. A prompt is a
cycle, repeated, so its output continues the cycle, and nearly all drafts are accepted. The weights that write to the residual stream are scaled
by 1/1000, so that all products are computed with random numbers and change no token. With `engine=vllm`, vLLM serves the same prompts with the
same tokens, in its own environment, by its own `ngram` drafter.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np

from cbatch import CbatchError, Limits, Plan, Request, RunRecord, View
from experiments.settings.command_line import Count
from experiments.settings.presets import load_spec
from experiments.store.provenance import spread, write_benchmark
from reproduction import BENCH, RESULTS
from reproduction.bench.peers.cases import Case
from reproduction.bench.peers.measure import graphics_card, write_checkpoint

CYCLE = 32
SCALE = 1e-3


class Work(NamedTuple):
    """`batch` requests at once, of `prompt` and `new` tokens."""

    batch: int
    prompt: int
    new: int

    def requests(self, vocabulary: int) -> list[Request]:
        whole = vocabulary // CYCLE
        firsts = np.random.default_rng(0).choice(whole, self.batch, replace=False) * CYCLE
        prompts = [(first + np.arange(self.prompt) % CYCLE).tolist() for first in firsts.tolist()]
        return [Request(id_, self.prompt, self.new, prompt=prompt) for id_, prompt in enumerate(prompts)]


WORKS = (Work(1, 128, 512), Work(8, 128, 512), Work(64, 128, 512), Work(64, 2048, 256))


class FixedDrafts:
    """Computes whole prompts in arrival order, and decodes with `k` drafts."""

    def __init__(self, k: int) -> None:
        self.k = k

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(drafts=self.k)
        for request in (*view.prefilling, *view.waiting):
            if not plan.add(request):
                break
        return plan.build()


def next_tokens(tokens: Any) -> Any:
    """Returns the token after each: the next of its cycle."""
    return tokens // CYCLE * CYCLE + (tokens + 1) % CYCLE


def make_repeating(model: Any) -> None:
    """Changes a model of the Llama family, of `transformers` or vLLM, in place."""
    import torch

    for name, weights in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights.data.mul_(SCALE if weights.std() > SCALE else 1.0)
        if "norm" in name:  # vLLM's dummy weights are small random numbers
            weights.data.fill_(1)
    embedding = next(weights for name, weights in model.named_parameters() if "embed_tokens" in name).data
    head = next(weights for name, weights in model.named_parameters() if "lm_head" in name).data
    embedding.normal_(generator=torch.Generator(embedding.device).manual_seed(0))
    whole = embedding.shape[0] // CYCLE * CYCLE
    tokens = torch.arange(whole, device=embedding.device)
    head.zero_()
    head[next_tokens(tokens)] = embedding[tokens] / embedding.shape[1] ** 0.5


def main(
    engine: Literal["cbatch", "vllm"] = "cbatch",
    model: str = "llama-3.1-8b",
    works: str = "",
    drafts: Count = 3,
    repeats: Count = 2,
    vocabulary: Count = 128_000,
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes drafts.json; for vLLM peers/vllm-drafts.json. works: places in `WORKS`, such as 0,2; all by default."""
    chosen = [WORKS[int(place)] for place in works.split(",")] if works else [*WORKS]
    hardware, _ = graphics_card()
    figures: dict[str, Any] = {}
    about = {"model": model, "drafts": drafts, "cycle": CYCLE, "figures": figures}
    for number in (0, drafts) if engine == "vllm" else (drafts,):
        runs = (
            _vllm(model, chosen, number, vocabulary, repeats)
            if engine == "vllm"
            else _ours(model, chosen, number, vocabulary, repeats)
        )
        for name, found in runs:
            figures[name] = found
            print(f"{engine} {name}: " + ", ".join(f"{key} {_text(value)}" for key, value in found.items()), flush=True)
            written = write_benchmark(
                "peers/vllm-drafts" if engine == "vllm" else "drafts", hardware, about, folder, BENCH
            )
    print(f"written: {written}")


def _text(value: Any) -> str:
    return f"{value['median'] if isinstance(value, dict) else value:.5g}"


def _name(work: Work, drafts: int) -> str:
    return f"batch {work.batch}, {work.prompt} prompt and {work.new} new tokens, {drafts} drafts"


def _wrong(requests: Sequence[Request]) -> float:
    """Returns the share of output tokens that do not continue the cycle."""
    tokens = np.array([[request.prompt[-1], *request.output] for request in requests if request.prompt])
    return float((tokens[:, 1:] != next_tokens(tokens[:, :-1])).mean())


def _ours(model: str, works: Sequence[Work], drafts: int, vocabulary: int, repeats: int) -> Any:
    from dataclasses import replace

    from cbatch.drafts import NgramDrafter
    from cbatch.runtime import weights
    from cbatch.runtime.gpu import build
    from experiments.settings.backends import Cuda
    from experiments.settings.servers import real_server

    def load(*arguments: Any) -> Any:
        loaded = weights.load_model(*arguments)
        make_repeating(loaded)
        return loaded

    batch, longest = max(work.batch for work in works), max(work.prompt + work.new for work in works)
    limits = Limits(batch, 8192, longest, max_drafts=drafts)
    with patch.object(build, "load_model", load):
        server = real_server(Cuda(), load_spec(model), limits)
    server = replace(server, drafter=NgramDrafter(drafts))
    with closing(server):
        server.serve(FixedDrafts(drafts), Work(batch, 64, 16).requests(vocabulary))
        for work in works:
            for number, asynchronous in ((0, True), (0, False), (drafts, True)):
                runs = []
                for _ in range(repeats):
                    requests = work.requests(vocabulary)
                    record = server.serve(FixedDrafts(number), requests, asynchronous=asynchronous)
                    runs.append(_figures(record, work))
                found: dict[str, Any] = {key: spread([run[key] for run in runs]) for key in runs[0]}
                name = _name(work, number) + ("" if asynchronous else ", synchronous")
                yield name, found | {"wrong_share": _wrong(requests)}


def _figures(record: RunRecord, work: Work) -> dict[str, float]:
    """Returns figures of a run; those of iterations are means over the later half of those without prompts."""
    seconds = record.steps[-1].done_at - record.steps[0].planned_at
    places = [
        place
        for place, step in enumerate(record.steps)
        if not step.num_prefill_tokens and step.num_requests == work.batch
    ]
    places = places[len(places) // 2 : -1]
    steps = [record.steps[place] for place in places]
    period = float(np.mean([record.steps[place + 1].started - record.steps[place].started for place in places]))
    device = float(np.mean([step.ended - step.started for step in steps]))
    counts = {
        name: sum(getattr(step, f"num_{name}") for step in record.steps) for name in ("drafts", "accepted", "drafted")
    }
    parts = {
        "plan_and_launch_ms": [step.launched_at - step.planned_at for step in steps],
        "start_ms": [step.started - step.launched_at for step in steps],
        "receive_ms": [step.received_at - step.ended for step in steps],
        "absorb_ms": [step.done_at - step.received_at for step in steps],
    }
    return {
        "tokens_per_second": work.batch * work.new / seconds,
        "ms_per_iteration": period * 1e3,
        "device_ms": device * 1e3,
        "host_share": max(1 - device / period, 0.0),
        "acceptance": counts["accepted"] / max(counts["drafts"], 1),
        "acceptance_length": 1 + counts["accepted"] / max(counts["drafted"], 1),
        **{name: float(np.mean(seconds)) * 1e3 for name, seconds in parts.items()},
    }


def _vllm(model: str, works: Sequence[Work], drafts: int, vocabulary: int, repeats: int) -> Any:
    import os

    from reproduction.bench.peers.vllm_engine import ENVIRONMENT, VllmEngine

    os.environ.update(ENVIRONMENT, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    batch, longest = max(work.batch for work in works), max(work.prompt + work.new for work in works)
    rule: dict[str, Any] = {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_min": 5,
        "prompt_lookup_max": 5,
    }
    arguments: dict[str, Any] = {"speculative_config": rule} if drafts else {}
    with TemporaryDirectory() as checkpoint:
        write_checkpoint(load_spec(model), Path(checkpoint))
        engine = VllmEngine(
            Path(checkpoint),
            Case("drafts", model, batch, 8192),
            longest + drafts + 1,
            disable_log_stats=False,
            **arguments,
        )
        try:
            engine._llm.apply_model(make_repeating)
            engine.serve(Work(batch, 64, 16).requests(vocabulary))
            for work in works:
                runs, before = [], _counters(engine)
                for _ in range(repeats):
                    requests = work.requests(vocabulary)
                    began = perf_counter()
                    engine.serve(requests)
                    runs.append(work.batch * work.new / (perf_counter() - began))
                num_drafted, accepted, verified = (
                    now - then for now, then in zip(_counters(engine), before, strict=True)
                )
                found: dict[str, Any] = {"tokens_per_second": spread(runs)}
                found["acceptance"] = accepted / num_drafted if num_drafted else 0.0
                found["acceptance_length"] = 1 + accepted / verified if verified else 1.0
                if wrong := _wrong(requests):
                    raise CbatchError(f"{wrong:.0%} of vLLM's tokens do not continue the cycle: it has other weights")
                yield _name(work, drafts), found
        finally:
            engine.close()


def _counters(engine: Any) -> list[float]:
    """Returns vLLM's counts of drafted tokens, of those accepted, and of verified drafts."""
    names = ("num_draft_tokens", "num_accepted_tokens", "num_drafts")
    values = {metric.name: getattr(metric, "value", 0) for metric in engine._llm.get_metrics()}
    return [float(values.get(f"vllm:spec_decode_{name}", 0)) for name in names]
