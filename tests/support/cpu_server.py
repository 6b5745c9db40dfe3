"""A benchmark's server on the CPU: the tiny model, with the capture report of a GPU's executor."""

from types import SimpleNamespace
from typing import Any

from tiny_models import make_executor

from cbatch import Limits, Server
from cbatch.kv import KVSize, blocks_for
from cbatch.model import ModelSpec
from cbatch.runtime.graphs import CaptureReport
from cbatch.runtime.options import Options
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile

BLOCK_SIZE = 16


def cpu_server(spec: ModelSpec, limits: Limits, options: Options = Options()) -> Server:
    """Stands in for `real_server` on a GPU; every iteration runs without a graph."""
    kv = KVSize(limits.max_batch * blocks_for(limits.max_request_tokens, BLOCK_SIZE), BLOCK_SIZE)
    executor: Any = make_executor(spec, limits, *kv)
    report = CaptureReport(0.5, {"off": 0, "decode": 6, "all": 8}[options.graphs], 1, 2)
    executor.iteration = SimpleNamespace(report=report, num_eager=0)
    return Server(executor, limits, ProfileCost(load_profile("h200"), spec), kv)
