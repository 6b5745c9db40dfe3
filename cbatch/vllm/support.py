"""Checks at start that the adapter can steer the installed version of vLLM and its features."""

import inspect
from typing import Any, NamedTuple

from cbatch.errors import ConfigError

TESTED = ("0.22.1", "0.33.0")

_SEAMS = {
    "_mamba_block_aligned_split": ("request", "num_new_tokens"),
    "_try_schedule_encoder_inputs": ("request", "num_new_tokens"),
    "_preempt_request": ("request", "timestamp"),
    "_update_after_schedule": ("scheduler_output",),
    "_free_request": ("request",),
    "_is_blocked_waiting_status": ("status",),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
}
"""Methods of vLLM's scheduler that the adapter calls or overrides, with the parameters that the adapter passes."""

_STATE = (
    *("running", "waiting", "requests", "connector", "need_mamba_block_aligned_split"),
    *("kv_cache_manager", "num_spec_tokens", "num_lookahead_tokens"),
)
"""Attributes of vLLM's scheduler that the adapter reads or replaces."""


class Names(NamedTuple):
    """Names that differ between the tested versions.

    side: the queue that vLLM reads before `waiting`. blocked: queue of requests that wait, or waited, for something other than
    computation. promote: method that returns whether a blocked request can now be computed, and marks it if so.
    """

    side: str
    blocked: str
    promote: str


_OLD = Names("skipped_waiting", "skipped_waiting", "_try_promote_blocked_waiting_request")  # 0.22
_NEW = Names("kv_holding_waiting", "deferred_waiting", "_handle_blocked_waiting_request")  # 0.33


def names_of(scheduler: Any) -> Names:
    """Returns the names of this version of vLLM."""
    return _OLD if hasattr(scheduler, _OLD.side) else _NEW


def check_seams(base: type, version: str) -> None:
    """Raises ConfigError if vLLM's scheduler lacks a method, or a method's parameter, that the adapter requires."""
    for name, needed in _SEAMS.items():
        method = getattr(base, name, None)
        has = inspect.signature(method).parameters if method is not None else {}
        if method is None or any(parameter not in has for parameter in needed):
            raise _missing(version, f"{name}({', '.join(needed)})")


def check_state(scheduler: Any, version: str) -> None:
    """Raises ConfigError if the new scheduler lacks an attribute that the adapter requires."""
    for name in (*_STATE, *names_of(scheduler)):
        if not hasattr(scheduler, name):
            raise _missing(version, name)


def check_features(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError for a feature of vLLM that plans cannot describe."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, kv_cache_config
    groups = cache.kv_cache_groups
    context = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    kinds = [kind.__name__ for kind in type(groups[0].kv_cache_spec).__mro__] if len(groups) == 1 else []
    adaptive = getattr(vllm_config.speculative_config, "enable_adaptive_verification", False)
    refused = {
        f"{len(groups)} KV cache groups (a model that mixes kinds of attention)": len(groups) != 1,
        f"a KV cache of {kinds[0] if kinds else 'no layers'}": len(groups) == 1 and "FullAttentionSpec" not in kinds,
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        "context parallelism": context > 1,
        "enable_adaptive_verification, which moves drafts to other requests than planned (drafting=adaptive plans them)": adaptive,
        "a diffusion model": getattr(model, "is_diffusion", False),
        "an encoder-decoder model": model.is_encoder_decoder,
        "a pooling model": model.runner_type == "pooling",
    }
    for feature, present in refused.items():
        if present:
            raise ConfigError(f"cbatch cannot schedule vLLM with {feature}; leave out --scheduler-cls, or this feature")


def _missing(version: str, name: str) -> ConfigError:
    known = ", ".join(TESTED)
    return ConfigError(f"vLLM {version}: its scheduler has no {name}, by which cbatch steers it; tested are {known}")
