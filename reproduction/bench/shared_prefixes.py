"""Prompts that begin alike, with the prefix cache, under several policies: the time for all requests, and the share of hits.

    groups    512 requests queued: 32 groups of 16, a request of each group in turn; 2,048 tokens that the group shares, 256 more, 128 new
    chat      64 conversations in lockstep: a system prompt of 1,024 tokens that all share, then 8 turns of 256 tokens, 128 new each;
              a turn's prompt holds the answers before

With `engine=vllm` or `engine=sglang`, that engine serves the same requests, in its own environment.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np

from cbatch import Limits, Request, Server
from experiments.settings.backends import Cuda
from experiments.settings.command_line import Count
from experiments.settings.compose import compose_run
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests, real_server
from experiments.store.provenance import spread, write_benchmark
from policies.evictions import LRU
from policies.orca import Orca
from reproduction import BENCH, RESULTS
from reproduction.bench.peers.cases import Case
from reproduction.bench.peers.measure import Engine, add_row, graphics_card, started
from reproduction.bench.peers.measure import serve as serve_checked
from reproduction.bench.peers.vllm_engine import ENVIRONMENT

LONGEST = 8192
NEW = 128

Turns = Iterator[Sequence[Request]]


def main(
    engine: Literal["cbatch", "vllm", "sglang"] = "cbatch",
    policies: str = "policy=sarathi_serve chunk=2048;policy=prefix_order policy.order=dfs_weight chunk=256",
    works: tuple[str, ...] = ("groups", "chat"),
    model: str = "llama-3.1-8b",
    batch: Count = 64,
    max_tokens: Count = 2048,
    block_size: Count = 16,
    kv_tokens: Count = 449_504,
    repeats: Count = 2,
    turns: str = "",
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes shared-prefixes.json; for another engine adds to peers.json.

    policies: as for `trace`. kv_tokens: those of vLLM 0.22 on an H100. turns: as for `peers`; other engines without take what the GPU has.
    """
    spec = load_spec(model)
    if engine != "cbatch":
        _measure_peer(engine, Case("prefixes", model, batch, max_tokens), works, kv_tokens, repeats, turns, folder)
        return
    hardware, _ = graphics_card()
    figures = dict[str, Any]()
    about = {"model": spec.name, "batch": batch, "max_tokens": max_tokens, "block_size": block_size, "figures": figures}
    built = real_server(Cuda(), spec, Limits(batch, max_tokens, LONGEST), kv_tokens=kv_tokens, block_size=block_size)
    with closing(built):
        server = replace(built, prefix_cache=LRU())
        server.serve(Orca(), equal_requests(8, 300, 16, spec.vocab_size))
        for policy, work in product(policies.split(";"), works):
            composed = compose_run(*policy.split(), f"max_tokens={max_tokens}", "prefix_cache=true").policy
            figures[f"{work}, {policy}"] = _repeated(
                f"{work}, {policy}", work, partial(serve, server, composed), repeats
            )
    print(f"written: {write_benchmark('shared-prefixes', hardware, about, folder, BENCH)}")


def _measure_peer(
    engine: Literal["vllm", "sglang"],
    case: Case,
    works: Sequence[str],
    kv_tokens: int,
    repeats: int,
    turns: str,
    folder: str,
) -> None:
    """Serves the work on another engine; adds each piece to peers.json when it has been measured."""
    os.environ.update(ENVIRONMENT)
    spec = load_spec(case.model)
    warm_up, cache = equal_requests(8, 300, 16, spec.vocab_size), kv_tokens if turns else 0
    with started(engine, case, spec, LONGEST, warm_up, kv_tokens=cache, turns=turns, prefix_cache=True) as (peer, _):
        for work in works:
            figures = _repeated(f"{work}, {engine}", work, partial(serve_peer, peer), repeats)
            add_row(engine, work, case, peer.settings, {"value": figures["seconds"], **figures}, folder)


def _repeated(
    label: str, work: str, serve_turns: Callable[[Turns], dict[str, float]], repeats: int
) -> dict[str, dict[str, float]]:
    """Serves a work several times, each time with other prompts; prints and returns the spread of its figures."""
    runs = [serve_turns(WORKS[work](again)) for again in range(repeats)]
    found = {name: spread([run[name] for run in runs]) for name in runs[0]}
    shown = (f"{name} {values['median']:.4g}" for name, values in found.items())
    print(f"  {label}: {', '.join(shown)}", flush=True)
    return found


def serve(server: Server, policy: Callable[[], Any], turns: Turns) -> dict[str, float]:
    """Serves the turns one after the other; returns seconds, from the first plan to the last token, and the share of hits."""
    engine = server.engine(policy())
    for requests in turns:
        engine.submit(requests)
        engine.run()
    steps = engine.record.steps
    return {"seconds": steps[-1].received_at - steps[0].planned_at, "hit_share": _hit_share(engine.record.requests)}


def serve_peer(engine: Engine, turns: Turns) -> dict[str, float]:
    served, began = list[Request](), time.perf_counter()
    for requests in turns:
        serve_checked(engine, requests)
        served += requests
    return {"seconds": time.perf_counter() - began, "hit_share": _hit_share(served)}


def _hit_share(requests: Sequence[Request]) -> float:
    prompts = sum(request.num_prompt_tokens for request in requests)
    return sum(request.num_cached_tokens for request in requests) / prompts


def groups(again: int) -> Iterator[list[Request]]:
    """Yields all requests at once. again: requests of another number share nothing with these."""
    prompts = [
        np.concatenate([_tokens(again, 0, group, 2048), _tokens(again, 1 + number, group, 256)])
        for number in range(16)
        for group in range(32)
    ]
    yield [Request(index, len(prompt), NEW, prompt=prompt.tolist()) for index, prompt in enumerate(prompts)]


def chat(again: int) -> Iterator[list[Request]]:
    """Yields the requests of one turn after the other; the turn before must have been served."""
    prompts = [_tokens(again, 0, 0, 1024).tolist() for _ in range(64)]
    for turn in range(8):
        prompts = [prompt + _tokens(again, 1 + turn, chat, 256).tolist() for chat, prompt in enumerate(prompts)]
        requests = [Request(64 * turn + chat, len(prompt), NEW, prompt=prompt) for chat, prompt in enumerate(prompts)]
        yield requests
        prompts = [prompt + request.output for prompt, request in zip(prompts, requests, strict=True)]


WORKS = {"groups": groups, "chat": chat}


def _tokens(*place: int) -> Any:
    """Draws token ids: the last number of `place` is how many."""
    return np.random.default_rng(place[:-1]).integers(10, 30_000, place[-1])
