"""Continuous batching of transformers (5.17): its synchronous loop, or `ContinuousBatchingAsyncIOs`, which the asynchronous post describes.

What is left open is chosen by transformers: captured graphs with flash attention, padding, blocks. flash-attn-4 has no call that reads
blocks of the cache, so that transformers gathers keys and values first; with flash-attn 2 or 3 decodes take a faster path.
"""

import time
from collections.abc import Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from cbatch import Request
from cbatch.kv import blocks_for
from reproduction.bench.peers.cases import Case

BLOCK_SIZE = ContinuousBatchingConfig.block_size


def name_lengths() -> None:
    """Lets flash-attn-4 take lengths by position, as transformers 5.17 passes them; in its present release another argument is there."""
    cute: Any = import_module("flash_attn.cute")
    attend = cute.flash_attn_varlen_func

    @wraps(attend)
    def attend_by_position(
        q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, most_q: int, most_k: int, **options: Any
    ) -> Any:
        lengths = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": most_q, "max_seqlen_k": most_k}
        return attend(q, k, v, **lengths, **options)

    cute.flash_attn_varlen_func = attend_by_position


class TransformersEngine:
    """A model with random weights, and one manager of all runs."""

    def __init__(self, checkpoint: Path, case: Case, longest: int, *, asynchronous: bool, attention: str) -> None:
        """longest: tokens of a request. attention: name of the implementation in transformers."""
        if attention == "flash_attention_4":
            name_lengths()
        factory: Any = AutoModelForCausalLM
        config = AutoConfig.from_pretrained(checkpoint)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            self._model = factory.from_config(config, dtype=config.dtype, attn_implementation=attention).eval()
        self._asked: dict[str, Any] = {
            "use_async_batching": asynchronous,
            "max_requests_per_batch": case.batch,
            "max_batch_tokens": case.budget,
            "allow_block_sharing": False,
            "num_blocks": 2 * case.batch * blocks_for(longest, BLOCK_SIZE),
        }
        self._generation = GenerationConfig(do_sample=False, eos_token_id=-1)
        self._config, self._attention = ContinuousBatchingConfig(**self._asked), attention

    @property
    def settings(self) -> dict[str, Any]:
        """What the manager was built with, for the results file."""
        chosen = self._model._cached_continuous_batching_manager.continuous_batching_config
        kept = {name: getattr(chosen, name) for name in ("block_size", "use_cuda_graph", "max_blocks_per_request")}
        arguments = {**self._asked, "attn_implementation": self._attention}
        return {"arguments": arguments, "chosen": kept, "async_scheduling": bool(chosen.use_async_batching)}

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[int]]:
        """Submits all requests, which must have equal numbers of output tokens, at once; greedy and without an end-of-sequence token.

        Returns:
            Seconds from the first submission to the last token, and the output tokens of each request.
        """
        [new] = {request.max_new_tokens for request in requests}
        prompts = [list(request.prompt or ()) for request in requests]
        shared = {"generation_config": self._generation, "continuous_batching_config": self._config}
        began = time.perf_counter()
        outputs = self._model.generate_batch(prompts, **shared, max_new_tokens=new, persistent_manager=True)
        last = max(output.lifespan[1] for output in outputs.values())  # the manager's thread is stopped later
        for request, output in zip(requests, outputs.values(), strict=True):
            request.output = [*output.generated_tokens]
        return last - began, [len(output.generated_tokens) for output in outputs.values()]

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()
