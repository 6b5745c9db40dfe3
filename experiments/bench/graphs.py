"""What CUDA graphs and `torch.compile` bring where the device has least to do: one request, one token an iteration.

Six ways to compute the same iterations: `transformers`' modules as they are, the same compiled by `torch.compile`, and the
fused model; each launched operation by operation, and as captured graphs. The setting is the Fireworks AI post's on CUDA
graphs: LLaMA-2-7B, batch 1. A way has its price before the first request that runs at full speed: building (weights, and
captures if any) and a first request, in which all that is compiled on first use is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cbatch import ConfigError, Limits
from cbatch.model import ModelSpec
from cbatch.runtime import gpu
from experiments.bench.presets import load_spec
from experiments.bench.report import spread, write
from experiments.bench.serving import release, same_requests, start
from experiments.settings import nearest
from policies.orca import Orca

WARM_UP_TOKENS = 16


class Way(NamedTuple):
    """How iterations are computed: arguments of `gpu.build`."""

    graphs: str
    fused: bool = False
    compiled: bool = False


WAYS = {
    "transformers, eager": Way("off"),
    "transformers, graphs": Way("all"),
    "torch.compile": Way("off", compiled=True),
    "torch.compile, graphs": Way("all", compiled=True),
    "fused, eager": Way("off", fused=True),
    "fused, graphs": Way("all", fused=True),
}


def main(
    model: str = "llama-2-7b",
    prompt: str = "32",
    new: str = "512",
    repeats: str = "3",
    ways: str = "",
    folder: str = "results",
) -> None:
    """Measure, print and write graphs.json. `ways` is a list of names, separated by ";"."""
    spec, num_prompt, num_new = load_spec(model), int(prompt), int(new)
    names = ways.split(";") if ways else list(WAYS)
    for name in names:
        if name not in WAYS:
            raise ConfigError(f"graphs: way {name!r} is unknown; {nearest(name, WAYS)}")
    figures: dict[str, Any] = {}
    print(f"{spec.name}, one request, {num_prompt} prompt and {num_new} new tokens")
    for name in names:
        figures[name] = measure(spec, WAYS[name], num_prompt, num_new, int(repeats))
        release()
        show(name, figures[name])
    stamped = {
        "model": spec.name,
        "prompt": num_prompt,
        "new": num_new,
        "block_size": gpu.BLOCK_SIZE,
        "figures": figures,
    }
    print(f"written: {write('graphs', torch.cuda.get_device_name(), stamped, Path(folder))}")


def measure(spec: ModelSpec, way: Way, num_prompt: int, num_new: int, repeats: int) -> dict[str, Any]:
    """Output tokens a second, and seconds until they come at that rate. Leaves nothing compiled for the next way."""
    torch.compiler.reset()
    begin = time.perf_counter()
    server = start(spec, Limits(1, 2048, num_prompt + num_new), **way._asdict())
    built = time.perf_counter()
    server.serve(Orca(), same_requests(1, num_prompt, WARM_UP_TOKENS, spec.vocab_size))
    warm = time.perf_counter()
    seconds = [
        server.serve(Orca(), same_requests(1, num_prompt, num_new, spec.vocab_size)).seconds for _ in range(repeats)
    ]
    server.executor.close()
    report = server.executor.iteration.report
    return {
        "output_tokens_per_second": spread([num_new / taken for taken in seconds]),
        "build_seconds": built - begin,
        "capture_seconds": report.seconds,
        "warm_up_seconds": warm - built,
        "graphs": report.num_graphs,
        "graph_bytes": report.bytes,
    }


def show(name: str, figures: dict[str, Any]) -> None:
    rate = figures["output_tokens_per_second"]
    print(f"  {name:22} {rate['median']:7.1f} tokens/s   ({rate['min']:.1f} to {rate['max']:.1f}), built in "
          f"{figures['build_seconds']:.1f} s, {figures['capture_seconds']:.1f} of it for {figures['graphs']} graphs; first "
          f"request {figures['warm_up_seconds']:.1f} s", flush=True)  # fmt: skip
