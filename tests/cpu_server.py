"""A benchmark's server on the CPU: the tiny model, with what a GPU's executor says of its graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tiny_models import make_executor

from cbatch import Limits
from cbatch.kv import blocks_for
from cbatch.model import ModelSpec
from cbatch.runtime.graphs import CaptureReport
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile
from experiments.bench.serving import PROFILE, Server

BLOCK_SIZE = 16


def cpu_server(spec: ModelSpec, limits: Limits, *, graphs: str = "all", **_: Any) -> Server:
    """In place of `experiments.bench.serving.start`: real tokens, every iteration operation by operation."""
    num_blocks = limits.max_batch * blocks_for(limits.max_request_tokens, BLOCK_SIZE)
    executor: Any = make_executor(spec, limits, num_blocks, BLOCK_SIZE)
    executor.iteration = SimpleNamespace(
        report=CaptureReport(0.5, {"off": 0, "decode": 6, "all": 8}[graphs], 1, 2), num_eager=0
    )
    return Server(executor, limits, ProfileCost(load_profile(PROFILE), spec), num_blocks, BLOCK_SIZE)
