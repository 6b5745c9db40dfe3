"""Prompts that begin alike, with the prefix cache, under several policies: the time for all requests, and the share of hits.

    groups    512 requests queued: 32 groups of 16, a request of each group in turn; 2,048 tokens that the group shares, 256 more, 128 new
    chat      64 conversations in lockstep: a system prompt of 1,024 tokens that all share, then 8 turns of 256 tokens, 128 new each;
              a turn's prompt holds the answers before

`peers` serves the same requests on another engine.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cbatch import Limits, Request, Server
from cbatch.runtime.options import LastLayer, ProductsName
from experiments.settings.backends import Cuda
from experiments.settings.command_line import Count
from experiments.settings.compose import compose_run
from experiments.settings.presets import load_spec
from experiments.settings.servers import equal_requests, real_server
from experiments.store.provenance import spread, write_benchmark
from policies.evictions import LRU
from policies.orca import Orca
from reproduction import BENCH, RESULTS

LONGEST = 8192
NEW = 128


def main(
    policies: str = "policy=sarathi_serve chunk=2048;policy=sarathi_serve chunk=256;policy=prefix_order policy.order=dfs_weight chunk=256",
    works: tuple[str, ...] = ("groups", "chat"),
    model: str = "llama-3.1-8b",
    batch: Count = 64,
    max_tokens: Count = 2048,
    block_size: Count = 16,
    kv_tokens: Count = 449_504,
    products: ProductsName = "cublas",
    last_layer: LastLayer = "all",
    repeats: Count = 2,
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes shared-prefixes.json. policies: as for `trace`. kv_tokens: those of vLLM 0.22 on an H100."""
    spec = load_spec(model)
    limits = Limits(batch, max_tokens, LONGEST)
    built = real_server(
        Cuda(products=products, last_layer=last_layer), spec, limits, kv_tokens=kv_tokens, block_size=block_size
    )
    server = replace(built, prefix_cache=LRU())
    figures: dict[str, Any] = {}
    with closing(server):
        server.serve(Orca(), equal_requests(8, 300, 16, spec.vocab_size))
        for policy in policies.split(";"):
            make = compose_run(*policy.split(), f"max_tokens={max_tokens}", "prefix_cache=true").policy
            for work in works:
                runs = [serve(server, make, WORKS[work](again)) for again in range(repeats)]
                found = {name: spread([run[name] for run in runs]) for name in runs[0]}
                figures[f"{work}, {policy}"] = found
                shown = (f"{name} {values['median']:.4g}" for name, values in found.items())
                print(f"  {work}, {policy}: {', '.join(shown)}", flush=True)
    sizes = {"batch": batch, "max_tokens": max_tokens, "block_size": block_size}
    stamped = {"model": spec.name, **sizes, "products": products, "last_layer": last_layer, "figures": figures}
    print(f"written: {write_benchmark('shared-prefixes', torch.cuda.get_device_name(), stamped, folder, BENCH)}")


def serve(server: Server[Any], policy: Callable[[], Any], turns: Iterator[Sequence[Request]]) -> dict[str, float]:
    """Serves the turns one after the other; returns seconds, from the first plan to the last token, and the share of hits."""
    engine = server.engine(policy())
    for requests in turns:
        engine.submit(requests)
        engine.run()
    steps, requests = engine.record.steps, engine.record.requests
    prompts = sum(request.num_prompt_tokens for request in requests)
    return {
        "seconds": steps[-1].received_at - steps[0].planned_at,
        "hit_share": sum(request.num_cached_tokens for request in requests) / prompts,
        "iterations": len(steps),
    }


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
