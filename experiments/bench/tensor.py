"""Tensor parallelism, on GPUs or simulated: the requests of `bench pipeline` and a batch of decodes, by number of GPUs."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cbatch import ConfigError, KVSize, Limits, ModelSpec, Request, Server
from cbatch.kv import blocks_for
from cbatch.runtime.devices import choose_devices
from cbatch.runtime.options import Options
from experiments.bench.async_loop import window
from experiments.bench.pipeline import LONGEST, POLICIES, Policies, device_of, make_requests, warm_up, zipf_lengths
from experiments.bench.serving import MakeServer, Runs, chunked, compare, repeat
from experiments.config.backends import Cuda, Simulated
from experiments.config.command_line import Count, beginning_with
from experiments.config.presets import load_spec
from experiments.config.servers import equal_requests, real_server, release_memory
from experiments.profile.kernel_trace import KernelTrace, covered_share
from experiments.store.benchmark_file import write
from policies.prefill_first import PrefillFirst
from policies.sarathi_serve import SarathiServe

WARM_UP_TOKENS = 64
TRACED = (16, 46)
"""Iterations of another run of `WARM_UP_TOKENS` whose kernels are traced."""

CHOICES = {**POLICIES, **chunked(SarathiServe, "sarathi_serve", 384)}


def main(
    ranks: tuple[Count, ...] = (2,),
    work: tuple[str, ...] = ("requests", "decode"),
    model: str = "llama-13b",
    batch: Count = 32,
    requests: Count = 192,
    policies: str = "sarathi_serve, 384",
    decode_model: str = "llama-3.1-8b",
    prompt: Count = 256,
    new: Count = 2048,
    repeats: Count = 1,
    hardware: str = "",
    name: str = "tensor",
    folder: str = "results",
) -> None:
    """Measures and prints; writes NAME.json after each figure.

    `ranks` are numbers of GPUs, each in turn. `work`: "requests" serves those of `bench pipeline` on `model` under `policies`,
    beginnings of names separated by ";"; "decode" serves one batch of equal requests on `decode_model`. `hardware` is a
    profile, on which the same is simulated instead.

    Raises:
        ConfigError: fewer GPUs than ranks, heads that they do not divide, or unknown work.
    """
    if unknown := set(work) - {"requests", "decode"}:
        raise ConfigError(f"tensor: work={min(unknown)} is unknown; known: requests, decode")
    chosen = {each: CHOICES[each] for each in beginning_with("policies", policies, CHOICES)}
    if hardware:
        device = device_of(hardware)
    else:
        choose_devices(1, max(ranks))
        device = torch.cuda.get_device_name()
    gpus, figures = f"{device} x{max(ranks)}", dict[str, Any]()
    of_requests = {"model": model, "requests": requests} if "requests" in work else {}
    of_decodes = {"decode_model": decode_model} if "decode" in work else {}
    stamped = {**of_requests, **of_decodes, "batch": batch, "figures": figures}

    def note(number: int, kind: str, found: dict[str, Any]) -> None:
        figures.setdefault(f"{number}", {})[kind] = found
        rate, step = found["tokens_per_second"]["median"], found["ms_per_iteration"]["median"]
        shares = f"device active {found['active_share']['median']:.2%}, {found['eager']} of {found['iterations']} eager"
        print(f"  {number} GPUs, {kind:40} {rate:8.0f} tokens/s  {step:6.3f} ms/iteration  {shares}", flush=True)
        print(f"written: {write(name, gpus, stamped, Path(folder))}", flush=True)

    for number in ranks:
        make = partial(make_server_on, hardware, number)
        if "requests" in work:
            for policy, runs in serve_requests(make, load_spec(model), batch, requests, chosen, repeats):
                note(number, f"{model}, {policy}", figures_of(runs))
        if "decode" in work:
            found = decode(make, load_spec(decode_model), batch, prompt, new, repeats)
            note(number, f"{decode_model}, {prompt} + {new}", found)
            kernels = ", ".join(f"{share:.2%}" for share in found["kernel_shares"])
            print(
                f"    decodes alone {found['ms_per_decode']:.3f} ms; GPUs with a kernel: {kernels or 'simulated'}",
                flush=True,
            )


def make_server_on(hardware: str, ranks: int, spec: ModelSpec, limits: Limits, options: Options) -> Server[Any]:
    """A server on GPUs; on simulated ones if `hardware` is the name of a profile."""
    if not hardware:
        return real_server(Cuda(tensor_parallel=ranks), spec, limits, options)
    backend = Simulated(tensor_parallel=ranks)
    kv = KVSize(limits.max_batch * blocks_for(limits.max_request_tokens, Cuda.block_size), Cuda.block_size)
    cost = backend.cost(hardware, spec, limits.max_batch)
    return Server(backend.executor(spec, cost, limits, kv, options, True), limits, cost, kv)


def serve_requests(
    make: MakeServer, spec: ModelSpec, batch: int, number: int, chosen: Policies, repeats: int
) -> Iterator[tuple[str, Runs]]:
    lengths = zipf_lengths(number)
    server = make(spec, Limits(batch, 32768, LONGEST), Options())
    warm_up(server, spec)
    yield from compare(server, chosen, lambda: make_requests(lengths, spec.vocab_size), repeats)
    server.close()
    del server
    release_memory()


def decode(make: MakeServer, spec: ModelSpec, batch: int, prompt: int, new: int, repeats: int) -> dict[str, Any]:
    """Serve one batch; its prompts are one iteration, larger than any graph.

    Returns `figures_of` the runs, the median milliseconds of decodes alone, and on GPUs `kernel_shares` of another run.
    """
    limits = Limits(batch, max(batch * prompt, 2048), prompt + new)
    server = make(spec, limits, Options(graphs="decode"))
    server.serve(PrefillFirst(), equal_requests(batch, prompt, WARM_UP_TOKENS, spec.vocab_size))
    runs = repeat(server, PrefillFirst, lambda: equal_requests(batch, prompt, new, spec.vocab_size), repeats)
    again = equal_requests(batch, min(prompt, WARM_UP_TOKENS), WARM_UP_TOKENS, spec.vocab_size)
    shares = kernel_shares(server, again) if server.executor.needs_tokens else []
    server.close()
    del server
    release_memory()
    ended = [step.ended for step in runs.record.steps if not step.num_prefill_tokens]
    return {**figures_of(runs), "ms_per_decode": float(np.median(np.diff(ended))) * 1e3, "kernel_shares": shares}


def kernel_shares(server: Server[Any], requests: Sequence[Request]) -> list[float]:
    """Share of `TRACED` in which each GPU runs at least one kernel or copy."""
    trace = KernelTrace()
    server.serve(PrefillFirst(), requests, on_step=window(trace, TRACED))
    return [covered_share(kernels) for _, kernels in sorted(trace.on_gpu.items())]


def figures_of(runs: Runs) -> dict[str, Any]:
    return {
        "tokens_per_second": runs.spread("tokens_per_second"),
        "ms_per_iteration": runs.spread("milliseconds"),
        "active_share": runs.spread("active_share"),
        "host_ms_per_iteration": runs.spread("host_milliseconds"),
        "iterations": runs.served[0].iterations,
        "eager": runs.eager,
    }
