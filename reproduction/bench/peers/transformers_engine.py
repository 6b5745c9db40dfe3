"""Continuous batching of `transformers` (5.17), as it is by default: captured graphs and asynchronous batching where it finds them useful.

Only what the work asks for is set. Attention is paged, by flash-attention 3 or 2 if it is installed, else PyTorch's, which its rows name:
with it, every query is masked against the keys of all requests, without captured graphs and without asynchronous batching.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cbatch import CbatchError, Request
from reproduction.bench.peers.cases import Case

ENVIRONMENT: Mapping[str, str] = {"HF_HUB_OFFLINE": "1"}


class TransformersEngine:
    """A manager of `transformers` with random weights, whose thread serves from the first request to the last result."""

    label, environment = "transformers", ENVIRONMENT

    def __init__(self, checkpoint: Path, case: Case, longest: int) -> None:
        import transformers  # not earlier: it reads its environment then
        from transformers.generation.continuous_batching.utils import WorkloadHints

        config: Any = transformers.AutoConfig.from_pretrained(checkpoint)
        attention = f"paged|{_attention(transformers.utils)}"
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            factory: Any = transformers.AutoModelForCausalLM
            model = factory.from_config(config, dtype=config.dtype, attn_implementation=attention).eval()
        self._arguments: dict[str, Any] = {
            "max_batch_tokens": case.budget,
            "max_requests_per_batch": case.batch,
            "allow_block_sharing": False,
        }
        self._manager: Any = model.init_continuous_batching(
            transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
            transformers.ContinuousBatchingConfig(**self._arguments),
            WorkloadHints(max_generated_length=longest, num_requests=case.batch),
        )
        self._attention = attention
        self._manager.warmup()
        self._manager.start()

    @property
    def settings(self) -> dict[str, Any]:
        found = self._manager.continuous_batching_config
        chosen = {"async_scheduling": found.use_async_batching, "cuda_graphs": found.use_cuda_graph}
        variant = {"variant": ", SDPA"} if self._attention.endswith("sdpa") else {}
        return {"arguments": self._arguments, "attention": self._attention, **variant, **chosen}

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[int]]:
        began = time.perf_counter()
        names = [
            self._manager.add_request(list(request.prompt or ()), max_new_tokens=request.max_new_tokens)
            for request in requests
        ]
        generated: dict[str, int] = {}
        while len(generated) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                generated[result.request_id] = len(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise CbatchError("peers: the manager of transformers has stopped; its log above says why")
        return time.perf_counter() - began, [generated[name] for name in names]

    def close(self) -> None:
        self._manager.stop(block=True)


def _attention(utils: Any) -> str:
    """Not flash-attn-4: 5.17 gives it an int as lengths of keys, which 4.0.0b36 does not take (H200, 2026-11-22)."""
    for version in (3, 2):
        if getattr(utils, f"is_flash_attn_{version}_available")():
            return f"flash_attention_{version}"
    return "sdpa"
