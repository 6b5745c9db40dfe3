"""Drives vLLM's real scheduler as its engine core does, with made-up model outputs. Import after `vllm_sources.load`."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest

from cbatch import Limits, Request
from cbatch.vllm import Adapter, make_scheduler


def digest(value: Any) -> bytes:
    return sha256(repr(value).encode()).digest()


init_none_hash(digest)


class Options(SimpleNamespace):
    """A section of vLLM's configuration. Options that are not given are off."""

    def __getattr__(self, name: str) -> bool:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


def vllm_config(
    limits: Limits, num_blocks: int, block_size: int, *, asynchronous: bool, prefix_cache: bool, num_ahead: int = 0
) -> Any:
    """num_ahead: tokens that a drafter with layers of its own, such as EAGLE's, writes to the KV cache."""
    most = limits.max_drafts
    drafter = Options(
        num_speculative_tokens=most,
        max_num_new_slots_for_drafting=0,
        use_eagle=lambda: num_ahead > 0,
        uses_draft_model=lambda: False,
        use_eagle_block_drop=lambda: False,
        needs_eagle_block_drop=lambda: False,
    )
    return Options(
        scheduler_config=Options(
            max_num_seqs=2 * limits.max_running,  # a request whose last token is in flight has a row, too
            max_num_scheduled_tokens=limits.max_tokens,
            max_num_batched_tokens=limits.max_tokens,
            enable_chunked_prefill=True,
            scheduler_reserve_full_isl=True,
            async_scheduling=asynchronous,
            policy="fcfs",
            max_num_active_seqs=None,
            prefill_schedule_interval=1,
        ),
        parallel_config=Options(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            data_parallel_size=1,
        ),
        cache_config=Options(
            num_gpu_blocks=num_blocks + 1,  # one is vLLM's null block
            block_size=block_size,
            enable_prefix_caching=prefix_cache,
            mamba_cache_mode="none",
        ),
        model_config=Options(max_model_len=limits.max_request_tokens, runner_type="generate"),
        observability_config=Options(per_request_spec_decode_metrics="none"),
        aux_output_config=Options(),
        ec_manager_config=Options(get_encoder_cache_manager_obj=lambda: None),
        max_concurrent_batches=2,
        max_in_flight_tokens=2 * limits.max_tokens,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=drafter if most else None,
        num_speculative_tokens=most,
        num_lookahead_tokens=num_ahead,
        num_prefill_lookahead_tokens=min(num_ahead, 1),
    )


class NoGrammar:
    def should_advance(self, request: Any) -> bool:
        return False

    def accept_tokens(self, *given: Any) -> bool:
        return True

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        return tokens


class NoImages:
    def supports_multimodal_inputs(self, config: Any) -> bool:
        return False


@dataclass
class Rig:
    """vLLM's scheduler with a policy. now: what its clock shows. change: of its configuration. sample: the token of a request."""

    adapter: Adapter | None
    limits: Limits
    num_blocks: int
    block_size: int
    asynchronous: bool = False
    prefix_cache: bool = False
    num_ahead: int = 0
    change: Callable[[Any], None] = lambda config: None
    sample: Callable[[str], int] = lambda id_: 7
    now: float = 0.0
    in_flight: deque[Any] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.scheduler: Any = self.adapter and self.make(
            lambda **arguments: make_scheduler(self.adapter, clock=lambda: self.now, **arguments)
        )

    def make(self, kind: Callable[..., Any]) -> Any:
        """A scheduler of a kind: vLLM's own class, or one with a policy."""
        config = vllm_config(
            self.limits,
            self.num_blocks,
            self.block_size,
            asynchronous=self.asynchronous,
            prefix_cache=self.prefix_cache,
            num_ahead=self.num_ahead,
        )
        self.change(config)
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=8, dtype=torch.float16)
        )
        cache = KVCacheConfig(self.num_blocks + 1, [], [group])
        return kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=NoGrammar(),
            block_size=self.block_size,
            mm_registry=NoImages(),
            log_stats=True,
        )

    def request(self, request: Request, stop_token: int | None = None, **extra: Any) -> Any:
        """vLLM's request for one of ours."""
        given = {"client": request.client, "tier": request.tier, "predicted_new_tokens": request.predicted_new_tokens}
        given |= {f"slo_{name}": getattr(request.slo, name) for name in ("ttft", "tbt", "total")}
        params = SamplingParams(
            max_tokens=request.max_new_tokens,
            ignore_eos=True,
            temperature=0.0,
            stop_token_ids=[] if stop_token is None else [stop_token],
            extra_args={name: value for name, value in {**given, **extra}.items() if value is not None},
        )
        return VllmRequest(
            str(request.id),
            list(request.prompt or range(1000 * request.id, 1000 * request.id + request.num_prompt_tokens)),
            params,
            None,
            arrival_time=request.arrival_time,
            priority=-request.priority,
            block_hasher=get_request_block_hasher(self.block_size, digest) if self.prefix_cache else None,
        )

    def step(self) -> dict[int, Any]:
        """A turn of vLLM's engine core: schedules, then takes in the oldest iteration unless it may go on without."""
        executed = False
        if self.scheduler.has_requests():
            executed = self.schedule().total_num_scheduled_tokens > 0
        if not self.in_flight or (executed and self.asynchronous and len(self.in_flight) < 2):
            return {}
        return self.update()

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        sampled = {id_ for id_ in output.num_scheduled_tokens if not requests[id_].is_prefill_chunk}
        self.in_flight.append((output, sampled))
        return output

    def update(self) -> dict[int, Any]:
        """The oldest iteration in flight has ended: requests that computed their last known token receive one."""
        output, sampled = self.in_flight.popleft()
        return self.scheduler.update_from_output(output, self.result(output, sampled))  # type: ignore[no-any-return]

    def result(self, output: Any, sampled: set[str]) -> ModelRunnerOutput:
        """What a model would return for an iteration."""
        ids = list(output.num_scheduled_tokens)
        tokens = [[self.sample(id_)] if id_ in sampled else [] for id_ in ids]
        return ModelRunnerOutput(ids, {id_: place for place, id_ in enumerate(ids)}, tokens)
