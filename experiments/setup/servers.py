"""Servers of real tokens for commands that read no settings, with KV cache for their largest batch."""

import gc

import numpy as np

from cbatch import KVSize, Limits, ModelSpec, Request, Server
from cbatch.kv import blocks_for
from cbatch.runtime.options import Options
from experiments.settings.backend import ExecutorParts
from experiments.settings.backends import Cpu, Cuda


def real_server(
    backend: Cpu | Cuda,
    spec: ModelSpec,
    limits: Limits,
    options: Options = Options(),
    *,
    kv_tokens: int | None = None,
    block_size: int | None = None,
) -> Server:
    """Builds a server of real tokens.

    kv_tokens: size of the KV cache; None: the most that the largest batch can use, as far as memory allows.
    block_size: None: the backend's block size.
    """
    cost, size = backend.cost(backend.predicts_with, spec, limits.max_batch), block_size or backend.block_size
    parts = ExecutorParts(spec, cost, limits, options)
    if kv_tokens is None:
        longest = blocks_for(limits.max_request_tokens, size) * size
        fits, _ = backend.kv_tokens(parts, size)
        kv_tokens = min(limits.max_running * longest, fits)
    kv = KVSize(kv_tokens // size, size)
    return Server(backend.executor(parts, kv), limits, cost, kv)


def equal_requests(number: int, prompt: int, new: int, vocabulary: int) -> list[Request]:
    """Returns `number` requests of equal lengths that arrive at once, with prompts drawn from `vocabulary` token ids."""
    prompts = np.random.default_rng(0).integers(0, vocabulary, (number, prompt))
    return [Request(index, prompt, new, prompt=tokens.tolist()) for index, tokens in enumerate(prompts)]


def release_memory() -> None:
    """Frees the GPU memory of servers that are no longer referenced."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
