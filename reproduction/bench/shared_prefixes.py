"""Prompts that begin alike, with the prefix cache, under several policies: the time for all requests, and the share of hits.

    groups    512 requests queued: 32 groups of 16, a request of each group in turn; 2,048 tokens that the group shares, 256 more, 128 new
    chat      64 conversations in lockstep: a system prompt of 1,024 tokens that all share, then 8 turns of 256 tokens, 128 new each;
              a turn's prompt holds the answers before

With `engine=vllm`, vLLM serves the same requests, in its own environment.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
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
from reproduction.bench.peers.measure import graphics_card, write_checkpoint
from reproduction.bench.peers.turns import in_turn
from reproduction.bench.peers.vllm_engine import ENVIRONMENT, VllmEngine, cache_of

LONGEST = 8192
NEW = 128

Turns = Iterator[Sequence[Request]]


def main(
    engine: Literal["cbatch", "vllm"] = "cbatch",
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
    """Measures, prints and writes shared-prefixes.json; for vLLM peers/vllm-shared-prefixes.json.

    policies: as for `trace`. kv_tokens: those of vLLM 0.22 on an H100. turns: as for `peers`; vLLM without takes what the GPU has.
    """
    spec, figures = load_spec(model), dict[str, Any]()
    about = {"model": spec.name, "batch": batch, "max_tokens": max_tokens, "figures": figures}
    hardware, _ = graphics_card()
    with ExitStack() as in_use:
        if engine == "vllm":
            os.environ.update(ENVIRONMENT)
            write_checkpoint(spec, folder_of := Path(in_use.enter_context(TemporaryDirectory())))
            case = Case("groups", model, batch, max_tokens)
            wait = in_use.enter_context(in_turn(turns))
            caching = {"enable_prefix_caching": True, **cache_of(kv_tokens * spec.kv_bytes_per_token if turns else 0)}
            peer = in_use.enter_context(closing(VllmEngine(folder_of, case, LONGEST, **caching)))
            peer.serve(equal_requests(8, 300, 16, spec.vocab_size))
            about["engine"] = {"name": "vLLM", "version": metadata.version("vllm"), **peer.settings}
            wait()
            sides: dict[str, Callable[[Turns], dict[str, float]]] = {"vllm": partial(serve_vllm, peer)}
        else:
            about |= {"block_size": block_size}
            backend, limits = Cuda(), Limits(batch, max_tokens, LONGEST)
            built = real_server(backend, spec, limits, kv_tokens=kv_tokens, block_size=block_size)
            server = replace(in_use.enter_context(closing(built)), prefix_cache=LRU())
            server.serve(Orca(), equal_requests(8, 300, 16, spec.vocab_size))
            keys = f"max_tokens={max_tokens}", "prefix_cache=true"
            sides = {
                policy: partial(serve, server, compose_run(*policy.split(), *keys).policy)
                for policy in policies.split(";")
            }
        for (side, serve_turns), work in product(sides.items(), works):
            runs = [serve_turns(WORKS[work](again)) for again in range(repeats)]
            found = figures[f"{work}, {side}"] = {name: spread([run[name] for run in runs]) for name in runs[0]}
            shown = (f"{name} {values['median']:.4g}" for name, values in found.items())
            print(f"  {work}, {side}: {', '.join(shown)}", flush=True)
    name = "peers/vllm-shared-prefixes" if engine == "vllm" else "shared-prefixes"
    print(f"written: {write_benchmark(name, hardware, about, folder, BENCH)}")


def serve(server: Server, policy: Callable[[], Any], turns: Turns) -> dict[str, float]:
    """Serves the turns one after the other; returns seconds, from the first plan to the last token, and the share of hits."""
    engine = server.engine(policy())
    for requests in turns:
        engine.submit(requests)
        engine.run()
    steps = engine.record.steps
    return {"seconds": steps[-1].received_at - steps[0].planned_at, "hit_share": _hit_share(engine.record.requests)}


def serve_vllm(engine: VllmEngine, turns: Turns) -> dict[str, float]:
    served, began = list[Request](), time.perf_counter()
    for requests in turns:
        engine.serve(requests)
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
