"""vLLM without a GPU: the real engine, API server and clients run iterations that take predicted time.

    vLLM's engine core ---- execute_model(scheduled) ----> begins a predicted iteration after the preceding iterations
                       ---- sample_tokens() -------------> a future, done when that iteration would have ended

There are no weights and no logits: every sampled token is the same, so requests end by length.
"""

import time
from abc import abstractmethod
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from cbatch.cost import BatchShape, CostModel
from cbatch.errors import ConfigError
from cbatch.sim.cost import ProfileCost

Scheduled = dict[str, tuple[int, int, int]]
"""By vLLM's id: tokens computed before, tokens scheduled, and known tokens, including tokens in flight."""


class EndingFuture(Future[ModelRunnerOutput]):
    """An iteration that ends at a time of `time.perf_counter`."""

    def __init__(self, output: ModelRunnerOutput, at: float) -> None:
        super().__init__()
        self.at, self._output = at, output

    def done(self) -> bool:
        return time.perf_counter() >= self.at

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        time.sleep(max(self.at - time.perf_counter(), 0.0))
        return self._output


class Device:
    """Computes one iteration after another, each for its predicted time. token: the token that is always sampled."""

    def __init__(self, cost: CostModel, token: int) -> None:
        self._cost, self._token = cost, token
        self._prompts: dict[str, int] = {}
        self._free_at = 0.0

    def launch(self, scheduled: Any) -> EndingFuture:
        """Begins vLLM's scheduled iteration when the preceding iteration has ended."""
        parts = self._parts(scheduled)
        ids = list(parts)
        tokens = [[self._token] if before + count >= known else [] for before, count, known in parts.values()]
        self._free_at = max(self._free_at, time.perf_counter()) + self._cost.predict(self._shape(parts))
        for id_ in scheduled.finished_req_ids:
            self._prompts.pop(id_, None)
        places = {id_: place for place, id_ in enumerate(ids)}
        return EndingFuture(ModelRunnerOutput(ids, places, tokens), self._free_at)

    def _parts(self, scheduled: Any) -> Scheduled:
        parts: Scheduled = {}
        counts, cached = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            known = new.prefill_token_ids or ()  # includes outputs after a preemption
            most = max(len(new.prompt_token_ids), len(known))
            parts[new.req_id] = new.num_computed_tokens, counts[new.req_id], most
        running = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        for id_, before, outputs in running:
            parts[id_] = before, counts[id_], self._prompts[id_] + outputs
        return parts

    def _shape(self, parts: Scheduled) -> BatchShape:
        decodes = {id_ for id_, (before, count, _) in parts.items() if count == 1 and before >= self._prompts[id_]}
        chunks = tuple((count, before) for id_, (before, count, _) in parts.items() if id_ not in decodes)
        return BatchShape(chunks, len(decodes), sum(parts[id_][0] + 1 for id_ in decodes))


class SimulatedExecutor(Executor):
    """Replaces vLLM's workers. Subclasses choose the profile that predicts iterations."""

    supported_tasks = ("generate",)

    @abstractmethod
    def cost(self) -> ProfileCost:
        """Returns the cost model for the model that vLLM serves."""

    def _init_executor(self) -> None:
        self._cost, config = self.cost(), self.model_config.hf_text_config
        served, spec = (config.num_hidden_layers, config.hidden_size), self._cost.spec
        if served != (spec.num_layers, spec.hidden_size) or self.parallel_config.world_size > 1:
            problem = f"describes one GPU with {spec.num_layers} layers of {spec.hidden_size}, vLLM serves {served[0]} layers of {served[1]}"
            remedy = f"on {self.parallel_config.world_size} GPUs; give the model that vLLM serves, on one GPU"
            raise ConfigError(f"model={spec.name}: {problem} {remedy}")
        if self.speculative_config is not None:
            raise ConfigError("vllm.simulate: simulated workers propose no drafts; leave out --speculative-config")
        self._device = Device(self._cost, token=self.model_config.get_vocab_size() // 2)
        self._launched: EndingFuture | None = None

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        result: Any = None
        if scheduler_output.total_num_scheduled_tokens:
            self._launched = self._device.launch(scheduler_output)
        else:
            result = EMPTY_MODEL_RUNNER_OUTPUT
        if not non_block:
            return result
        done: Future[Any] = Future()
        done.set_result(result)
        return done

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        assert self._launched is not None, "vLLM samples after it has executed"
        return self._launched if non_block else self._launched.result()

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        spec, size = self._cost.spec, self.cache_config.block_size
        layer = FullAttentionSpec(
            block_size=size, num_kv_heads=spec.num_kv_heads, head_size=spec.head_dim, dtype=self.model_config.dtype
        )
        return [{f"layers.{number}": layer for number in range(spec.num_layers)}]

    def determine_available_memory(self) -> list[int]:
        """Returns the bytes that the weights leave free in vLLM's share of the memory."""
        share = self.cache_config.gpu_memory_utilization * self._cost.profile.memory_bytes
        return [int(share - self._cost.spec.weight_bytes)]

    @property
    def max_concurrent_batches(self) -> int:
        return 2 if self.scheduler_config.async_scheduling else 1

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def initialize_from_config(self, kv_cache_configs: Any) -> None: ...

    def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Ignores calls to workers, such as profiling, image caches and sleep."""
        return []

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...
