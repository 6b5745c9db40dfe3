"""Serves requests on a GPU executor for a benchmark, and reads the figures off the record."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from cbatch import CostModel, Engine, Limits, Policy, Request, RunRecord
from cbatch.kv import KVSize, blocks_for
from cbatch.model import ModelSpec
from cbatch.runtime.options import Options
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile

if TYPE_CHECKING:
    from cbatch.runtime.gpu import GpuExecutor

PROFILE = "h200"
"""What policies that predict predict with."""


class Served(NamedTuple):
    """What serving some requests took.

    seconds: from the first plan to the last token on the host.
    iterations: number of them.
    active_share: of that time, the share in which the device computed an iteration.
    host_milliseconds: median time that the host spends on an iteration besides waiting.
    tokens_per_second: prompt and output tokens.
    """

    seconds: float
    iterations: int
    active_share: float
    host_milliseconds: float
    tokens_per_second: float

    @property
    def milliseconds(self) -> float:
        """Of one iteration, on average."""
        return self.seconds / self.iterations * 1e3


class Server(NamedTuple):
    """An executor and what it was built for; serves one set of requests after another."""

    executor: GpuExecutor
    limits: Limits
    cost: CostModel
    num_blocks: int
    block_size: int

    def serve(self, policy: Policy, requests: Iterable[Request], *, asynchronous: bool = True) -> Served:
        return summarize(self.record(policy, requests, asynchronous=asynchronous))

    def record(
        self,
        policy: Policy,
        requests: Iterable[Request],
        *,
        asynchronous: bool = True,
        on_step: Callable[[Engine], None] = lambda engine: None,
    ) -> RunRecord:
        if check := getattr(policy, "check", None):
            check(self.limits)
        engine = Engine(
            policy,
            self.executor,
            self.limits,
            self.cost,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            asynchronous=asynchronous,
        )
        engine.submit(requests)
        return engine.run(on_step)


def start(
    spec: ModelSpec,
    limits: Limits,
    *,
    graphs: str = "all",
    fused: bool = True,
    compiled: bool = False,
    kv_tokens: int | None = None,
) -> Server:
    """Build an executor with as much KV cache as its largest batch can use, if there is room."""
    from cbatch.runtime import gpu  # its kernels are written in Triton, which machines without a GPU lack

    needed = limits.max_running * blocks_for(limits.max_request_tokens, gpu.BLOCK_SIZE)
    fitting = (kv_tokens or gpu.kv_tokens_beside(spec, limits)) // gpu.BLOCK_SIZE
    num_blocks = min(needed, fitting)
    options = Options(graphs=graphs, fused=fused, compiled=compiled)  # type: ignore[arg-type]
    executor = gpu.build(spec, limits, KVSize(num_blocks, gpu.BLOCK_SIZE), options)
    return Server(
        executor,
        limits,
        ProfileCost(load_profile(PROFILE), spec, max_batch=limits.max_batch),
        num_blocks,
        gpu.BLOCK_SIZE,
    )


def release() -> None:
    """Give the memory of servers that nobody refers to any more back to the GPU; compiled modules refer to themselves."""
    gc.collect()
    torch.cuda.empty_cache()


def summarize(record: RunRecord) -> Served:
    steps = record.steps
    seconds = steps[-1].received_at - steps[0].planned_at
    started = np.array([step.started for step in steps])
    ended = np.array([step.ended for step in steps])
    begun = np.maximum(
        started, np.concatenate([[-np.inf], ended[:-1]])
    )  # a step enqueued behind another starts at its end
    busy = float(np.sum(ended - begun))
    host = [step.launched_at - step.planned_at + step.done_at - step.received_at for step in steps]
    num_tokens = sum(request.num_prompt_tokens + len(request.output) for request in record.requests)
    return Served(seconds, len(steps), busy / seconds, float(np.median(host)) * 1e3, num_tokens / seconds)


def same_requests(number: int, prompt: int, new: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """`number` requests of one shape with random prompts, all waiting at the start."""
    prompts = np.random.default_rng(seed).integers(0, vocabulary, (number, prompt))
    return [Request(index, prompt, new, prompt=tokens.tolist()) for index, tokens in enumerate(prompts)]
