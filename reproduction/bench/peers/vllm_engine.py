"""vLLM (0.22 and 0.33) as it is by default: its engine in a process of its own, asynchronous scheduling, captured graphs.

Only what the work asks for is set, and what keeps vLLM off the network and off libraries that may not be installed:
FlashInfer's sampler (greedy decoding uses none) and automatic choice of the attention kernel, which would silently fall
back from flash-attention 3, the fastest on Hopper.
"""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cbatch import Request
from reproduction.bench.peers.cases import Case

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # counting GPUs has loaded the driver
}
MEMORY_SHARE = 0.9
ATTENTION = {"backend": "FLASH_ATTN", "flash_attn_version": 3}


def cache_of(num_bytes: int) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM` for a KV cache of so many bytes beside other engines; none for 0."""
    return {"kv_cache_memory_bytes": num_bytes, "gpu_memory_utilization": 0.01} if num_bytes else {}


def ngrams_of(method: str, drafts: int, shortest: int) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM` for counted drafts of n-grams of up to 5 tokens, by the weights of a checkpoint."""
    lengths = {"prompt_lookup_min": shortest, "prompt_lookup_max": 5}
    speculation = {"method": method, "num_speculative_tokens": drafts, **lengths}
    return {"speculative_config": speculation, "load_format": "auto", "disable_log_stats": False}


class VllmEngine:
    """`vllm.LLM` with random weights.

    Serves from the call of `generate` to its return, so that handing requests to the engine's process counts; ours are
    timed from the first plan.
    """

    sampling: Mapping[str, Any] = MappingProxyType({})  # further settings of every request

    def __init__(self, checkpoint: Path, case: Case, longest: int, **arguments: Any) -> None:
        """arguments: further ones of `vllm.LLM`."""
        self._vllm: Any = import_module("vllm")
        self._arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_num_seqs": case.batch,
            "max_num_batched_tokens": case.budget,
            "max_model_len": longest,
            "gpu_memory_utilization": MEMORY_SHARE,
            "enable_prefix_caching": False,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "attention_config": ATTENTION,
            **arguments,
        }
        # vLLM writes to those of speculation
        self._llm = self._vllm.LLM(model=str(checkpoint), **deepcopy(self._arguments))

    @property
    def settings(self) -> dict[str, Any]:
        """What vLLM was built with, for the results file."""
        scheduler = self._llm.llm_engine.vllm_config.scheduler_config
        return {"arguments": self._arguments, "async_scheduling": bool(scheduler.async_scheduling)}

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[int]]:
        """Submits all requests at once, greedy; they end at their stop tokens only, not at an end-of-sequence token.

        Returns:
            Seconds from the first submission to the last token, and the output tokens of each request.
        """
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **self.sampling}
        sampling = [
            self._vllm.SamplingParams(max_tokens=each.max_new_tokens, stop_token_ids=[*each.stop_tokens], **settings)
            for each in requests
        ]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        for request, output in zip(requests, outputs, strict=True):
            request.output, request.num_cached_tokens = [*output.outputs[0].token_ids], output.num_cached_tokens or 0
        return seconds, [len(output.outputs[0].token_ids) for output in outputs]

    def is_empty(self) -> bool:
        """Returns whether no request holds a KV block."""
        return bool(self._llm.reset_prefix_cache())

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
