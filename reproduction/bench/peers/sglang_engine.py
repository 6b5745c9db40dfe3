"""SGLang (0.5.23): `sglang.Engine` in processes of its own, its asynchronous loop and captured graphs as by default.

Set are what the work asks for, flash-attention 3, and PyTorch's sampler (greedy decoding uses none).
"""

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from cbatch import Request
from reproduction.bench.peers.cases import Case


class SglangEngine:
    """An engine with random weights."""

    def __init__(
        self, checkpoint: Path, case: Case, longest: int, kv_tokens: int = 0, *, prefix_cache: bool = False
    ) -> None:
        """kv_tokens: of the cache; 0 for what the GPU has. prefix_cache: whether requests share it."""
        self._arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_running_requests": case.batch,
            "chunked_prefill_size": case.budget,
            "context_length": longest + 2,  # SGLang ends requests two tokens before it
            "disable_radix_cache": not prefix_cache,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "attention_backend": "fa3",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_overlap_schedule": False,
            "log_level": "info",
            **({"max_total_tokens": kv_tokens, "mem_fraction_static": 0.97} if kv_tokens else {}),
        }
        self._engine: Any = import_module("sglang").Engine(model_path=str(checkpoint), **self._arguments)

    @property
    def settings(self) -> dict[str, Any]:
        """What SGLang was built with, for the results file."""
        return {"arguments": self._arguments, "async_scheduling": not self._arguments["disable_overlap_schedule"]}

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[int]]:
        """Submits all requests at once, greedy and without an end-of-sequence token.

        Returns:
            Seconds from the first submission to the last token, and the output tokens of each request.
        """
        prompts = [list(request.prompt or ()) for request in requests]
        sampling = [
            {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": request.max_new_tokens} for request in requests
        ]
        began = time.perf_counter()
        outputs = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - began
        for request, output in zip(requests, outputs, strict=True):
            request.output, request.num_cached_tokens = [*output["output_ids"]], output["meta_info"]["cached_tokens"]
        return seconds, [len(request.output) for request in requests]

    def close(self) -> None:
        self._engine.shutdown()
