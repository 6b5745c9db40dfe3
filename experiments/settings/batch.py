"""`batch=auto`: the largest batch whose KV cache fits at the longest request, SARATHI's formula 1 (arXiv 2308.16369).

    B = floor((M_G - M_S) / (L x m_kv))      M_G, M_S: bytes of the GPU and of the model, m_kv: bytes of a token's keys and values

The numerator over m_kv is the size of the KV cache, `kv_tokens`. Pipeline stages share it, with a batch each.
"""

from collections.abc import Mapping
from typing import Any

from cbatch import ConfigError
from cbatch.facts import facts_of
from cbatch.kv import blocks_for
from experiments.settings.hardware import CPU
from experiments.workloads import Workload

KEY = "batch"

LEAST_ITERATION = 8192
"""Tokens for which max_tokens=auto has room at least; beside longer iterations fewer tokens of KV cache fit."""


def is_auto(keys: Mapping[str, Any]) -> bool:
    """Returns whether these keys, of the root or of a section, have `batch=auto`."""
    return keys.get(KEY) == "auto"


def with_batch(keys: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Returns the keys with a number in place of `auto`, also in a workload that takes the run's batch."""
    workload = keys["workload"]
    if isinstance(workload, Mapping) and is_auto(workload):
        workload = {**workload, KEY: batch}
    return {**keys, KEY: batch, "workload": workload}


def batch_of(settings: Any) -> tuple[int, str]:
    """Returns the batch by formula 1, and the reason. settings: `Settings` of the run, with any batch.

    Raises ConfigError: the cache is not known before the batch, or holds no request.
    """
    backend, kv_tokens = settings.backend, settings.kv_tokens
    if backend.pools:
        raise ConfigError("batch=auto: beside backend.pools; give each pool a batch")
    if kv_tokens is None and backend.name == CPU:
        raise ConfigError("batch=auto: on a CPU the KV cache follows the batch; give batch=N or kv_tokens=N")
    cost = backend.cost(settings.hardware, settings.model, 1)
    max_tokens = settings.max_tokens or LEAST_ITERATION
    kv_tokens = kv_tokens or cost.profile.kv_tokens(settings.model, max_tokens, cost.topology, settings.drafter.model)
    block_size = settings.block_size or backend.default_block_size(cost.profile)
    workload, vocabulary = settings.workload, backend.vocabulary(settings.model)
    known = isinstance(workload, Workload)  # a user's class has `requests` alone
    facts = workload.source(vocabulary).facts if known else facts_of(workload.requests(vocabulary))
    longest = min(facts.longest.max_tokens, settings.model.max_positions)
    batch = kv_tokens // block_size // blocks_for(longest, block_size) // backend.pipeline_stages
    if not batch:
        problem = f"the longest request has {longest} tokens, the KV cache {kv_tokens}"
        raise ConfigError(f"batch=auto: {problem}; give batch=N")
    return batch, f"{batch} (formula 1 of SARATHI: {kv_tokens} tokens of KV cache, {longest} of the longest request)"
