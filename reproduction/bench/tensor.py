"""Tensor parallelism, on GPUs or simulated: the requests of `bench pipeline` and a batch of decodes, by number of GPUs."""

from typing import Any, Literal

import numpy as np

from cbatch import Limits, ModelSpec
from cbatch.runtime.options import Options
from experiments.bench.serving import Runs, chunked, repeat
from experiments.settings.backends import Cuda, Simulated
from experiments.settings.command_line import Count, beginning_with
from experiments.settings.presets import load_spec
from experiments.settings.servers import equal_requests, release_memory
from policies.prefill_first import PrefillFirst
from policies.sarathi_serve import SarathiServe
from reproduction import RESULTS
from reproduction.bench.async_loop import kernel_shares
from reproduction.bench.pipeline import LONGEST, POLICIES, name_gpus, serve, server_on
from reproduction.stored import write

WARM_UP_TOKENS = 64
TRACED = (16, 46)
"""Iterations of another run of `WARM_UP_TOKENS` whose kernels are traced."""

CHOICES = {**POLICIES, **chunked(SarathiServe, "sarathi_serve", 384)}


def main(
    ranks: tuple[Count, ...] = (2,),
    work: tuple[Literal["requests", "decode"], ...] = ("requests", "decode"),
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
    folder: str = RESULTS,
) -> None:
    """Measures and prints; writes NAME.json after each figure.

    `ranks` are numbers of GPUs, each in turn. `work`: "requests" serves those of `bench pipeline` on `model` under `policies`,
    beginnings of names separated by ";"; "decode" serves one batch of equal requests on `decode_model`. `hardware` is a
    profile, on which the same is simulated instead.

    Raises:
        ConfigError: fewer GPUs than ranks, or heads that they do not divide.
    """
    chosen = {each: CHOICES[each] for each in beginning_with("policies", policies, CHOICES)}
    gpus, figures = name_gpus(hardware, ranks=max(ranks)), dict[str, Any]()
    of_requests = {"model": model, "requests": requests} if "requests" in work else {}
    of_decodes = {"decode_model": decode_model} if "decode" in work else {}
    stamped = {**of_requests, **of_decodes, "batch": batch, "figures": figures}

    def note(number: int, kind: str, found: dict[str, Any]) -> None:
        figures.setdefault(f"{number}", {})[kind] = found
        rate, step = found["tokens_per_second"]["median"], found["ms_per_iteration"]["median"]
        shares = f"device active {found['active_share']['median']:.2%}, {found['iterations']} iterations"
        shares += "" if found["eager"] is None else f", {found['eager']} eager"
        print(f"  {number} GPUs, {kind:40} {rate:8.0f} tokens/s  {step:6.3f} ms/iteration  {shares}", flush=True)
        print(f"written: {write(name, gpus, stamped, folder)}", flush=True)

    for number in ranks:
        backend = Simulated(tensor_parallel=number) if hardware else Cuda(tensor_parallel=number)
        if "requests" in work:
            limits = Limits(batch, 32768, LONGEST)
            for policy, runs, _ in serve(backend, load_spec(model), limits, chosen, requests, repeats, hardware):
                note(number, f"{model}, {policy}", figures_of(runs))
        if "decode" in work:
            found = decode(backend, load_spec(decode_model), batch, prompt, new, repeats, hardware)
            note(number, f"{decode_model}, {prompt} + {new}", found)
            kernels = ", ".join(f"{share:.2%}" for share in found["kernel_shares"])
            decodes = f"decodes alone {found['ms_per_decode']:.3f} ms"
            print(f"    {decodes}; GPUs with a kernel: {kernels or 'simulated'}", flush=True)


def decode(
    backend: Cuda | Simulated, spec: ModelSpec, batch: int, prompt: int, new: int, repeats: int, hardware: str
) -> dict[str, Any]:
    """Serve one batch; its prompts are one iteration, larger than any graph.

    Returns `figures_of` the runs, the median milliseconds of decodes alone, and on GPUs the `kernel_shares` of another run.
    """
    limits = Limits(batch, max(batch * prompt, 2048), prompt + new)
    server = server_on(backend, spec, limits, Options(graphs="decode"), hardware)
    server.serve(PrefillFirst(), equal_requests(batch, prompt, WARM_UP_TOKENS, spec.vocab_size))
    runs = repeat(server, PrefillFirst, lambda: equal_requests(batch, prompt, new, spec.vocab_size), repeats)
    again = equal_requests(batch, min(prompt, WARM_UP_TOKENS), WARM_UP_TOKENS, spec.vocab_size)
    shares = kernel_shares(server, again, TRACED) if server.executor.needs_tokens else []
    server.close()
    del server
    release_memory()
    ended = [step.ended for step in runs.record.steps if not step.num_prefill_tokens]
    return {**figures_of(runs), "ms_per_decode": float(np.median(np.diff(ended))) * 1e3, "kernel_shares": shares}


def figures_of(runs: Runs) -> dict[str, Any]:
    return {**runs.figures(), "iterations": runs.served[0].iterations, "eager": runs.eager}
