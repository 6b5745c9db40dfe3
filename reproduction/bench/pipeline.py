"""Pipeline stages on GPUs: throughput and bubbles of whole prompts and of chunks, and one GPU with as many per iteration."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from cbatch import ConfigError, KVSize, Limits, ModelSpec, Policy, Request, Server
from cbatch.kv import blocks_for
from cbatch.results.stages import account_stages
from cbatch.runtime.gpu.devices import choose_devices
from cbatch.runtime.options import Options
from cbatch.sim import load_profile
from cbatch.sim.stages import StageAccount
from experiments.bench.serving import Runs, chunked, compare
from experiments.settings.backends import Cuda, Simulated
from experiments.settings.command_line import Count, beginning_with
from experiments.settings.presets import load_spec
from experiments.settings.servers import real_server, release_memory
from policies.orca import Orca
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe
from reproduction import RESULTS
from reproduction.stored import write

Policies = Mapping[str, Callable[[], Policy]]
Lengths = list[tuple[int, int]]

POLICIES: Policies = {
    "orca": Orca,
    **chunked(Sarathi, "sarathi", 256, 512),
    **chunked(SarathiServe, "sarathi_serve", 256, 512),
}
SHORTEST, LONGEST, THETA, PD_RATIO = 1024, 4096, 0.4, 10
WARM_UP_TOKENS, NUM_LATER = 16, 16


def main(
    model: str = "llama-13b",
    stages: tuple[int, ...] = (2, 1),
    layers: tuple[int, ...] = (),
    batch: Count = 16,
    requests: Count = 192,
    policies: str = "orca;sarathi, ",
    repeats: Count = 1,
    hardware: str = "",
    name: str = "pipeline",
    folder: str = RESULTS,
) -> None:
    """Measures and prints; writes NAME.json after each policy.

    `stages` are numbers of GPUs, each in turn; `layers` those of each stage, for the first of them; `batch` is of an
    iteration, of which as many are in flight as stages; `policies` beginnings of names separated by ";". `hardware` is
    a profile, on which the same is simulated instead.

    Raises:
        ConfigError: fewer GPUs than stages, or `layers` in simulation, which splits them equally.
    """
    if hardware and layers:
        raise ConfigError("pipeline: layers= is for real stages, simulated ones are equal; leave hardware= out")
    chosen = {each: POLICIES[each] for each in beginning_with("policies", policies, POLICIES)}
    spec = load_spec(model)
    gpus, figures = name_gpus(hardware, stages=max(stages)), dict[str, Any]()
    stamped = {"model": spec.name, "batch": batch, "requests": requests, "layers": list(layers), "figures": figures}
    for number in stages:
        limits = Limits(batch, 32768, LONGEST, num_stages=number)
        print(
            f"{spec.name}, {number} GPU{'s' * (number > 1)}, {limits.max_running} requests in flight, {requests} in all: tokens/s"
        )
        given = list(layers) if number == stages[0] else []
        backend = (
            Simulated(pipeline_stages=number) if hardware else Cuda(pipeline_stages=number, layers=given or "auto")
        )
        for policy, runs, accounts in serve(backend, spec, limits, chosen, requests, repeats, hardware):
            run = _figures(runs, accounts)
            figures.setdefault(f"{number}", {})[policy] = run
            rate, share = run["tokens_per_second"]["median"], run["bubble_share"]
            print(f"  {policy:24} {rate:8.0f}  {runs.counted}, bubbles {share:.1%}")
            for stage, causes in enumerate(run["stages"]):
                parts = ", ".join(f"{cause} {part:.1%}" for cause, part in causes.items())
                print(f"    stage {stage}: {parts}", flush=True)
            written = write(name, gpus, stamped, folder)
    print(f"written: {written}")


def serve(
    backend: Cuda | Simulated,
    spec: ModelSpec,
    limits: Limits,
    chosen: Policies,
    number: int,
    repeats: int,
    hardware: str,
) -> Iterator[tuple[str, Runs, list[StageAccount]]]:
    """Serves `number` requests under each policy in turn; yields its name, runs and the accounts of the stages in the last one."""
    server, lengths = server_on(backend, spec, limits, Options(), hardware), zipf_lengths(number)
    if not hardware:
        warm_up(server, spec)
    for name, runs in compare(server, chosen, lambda: make_requests(lengths, spec.vocab_size), repeats):
        is_simulated = bool(hardware) and limits.num_stages > 1
        yield name, runs, server.executor.accounts() if is_simulated else account_stages(runs.record)
    server.close()
    del server
    release_memory()


def server_on(
    backend: Cuda | Simulated, spec: ModelSpec, limits: Limits, options: Options, hardware: str
) -> Server[Any]:
    """A server on GPUs; on simulated ones, of the profile `hardware`."""
    if not isinstance(backend, Simulated):
        return real_server(backend, spec, limits, options)
    kv = KVSize(limits.max_running * blocks_for(limits.max_request_tokens, Cuda.block_size), Cuda.block_size)
    cost = backend.cost(hardware, spec, limits.max_batch)
    return Server(backend.executor(spec, cost, limits, kv, options, True), limits, cost, kv)


def warm_up(server: Server[Any], spec: ModelSpec) -> None:
    """Serves requests like those that are measured, with few new tokens.

    So memory is taken and kernels are compiled before: the first iterations are as large as any, and later ones have long prompts
    beside decodes.
    """
    lengths = zipf_lengths(server.limits.max_running + NUM_LATER)
    short = [(prompt, min(new, 1 + index % WARM_UP_TOKENS)) for index, (prompt, new) in enumerate(lengths)]
    server.serve(Orca(), make_requests(short, spec.vocab_size))


def _figures(runs: Runs, accounts: list[StageAccount]) -> dict[str, Any]:
    return {
        "tokens_per_second": runs.spread("tokens_per_second"),
        "iterations": runs.served[0].iterations,
        "eager": runs.eager,
        "bubble_share": bubble_share(accounts),
        "stages": [shares_of(account) for account in accounts],
    }


def name_gpus(hardware: str, stages: int = 1, ranks: int = 1) -> str:
    """Name and number of the GPUs, which must be there unless `hardware`, a profile, stands for them."""
    if hardware:
        name = re.sub(r" \d+ GB$", "", load_profile(hardware).hardware)
    else:
        choose_devices(stages, ranks)
        name = torch.cuda.get_device_name()
    return f"{name} x{stages * ranks}"


def zipf_lengths(number: int) -> Lengths:
    """Prompt and output tokens of requests whose lengths follow SARATHI's Zipf distribution (arXiv 2308.16369, 5.3)."""
    places = np.arange(LONGEST - SHORTEST)
    weights = (places + 1.0) ** -THETA
    lengths = SHORTEST + np.random.default_rng(0).choice(places, number, p=weights / weights.sum())
    prompts = lengths * PD_RATIO // (PD_RATIO + 1)
    return list(zip(prompts.tolist(), (lengths - prompts).tolist(), strict=True))


def make_requests(lengths: Lengths, vocabulary: int) -> list[Request]:
    """Requests of these prompt and output tokens that arrive at once, with random prompts."""
    random = np.random.default_rng(1)
    return [
        Request(id_, prompt, new, prompt=random.integers(0, vocabulary, prompt).tolist())
        for id_, (prompt, new) in enumerate(lengths)
    ]


def bubble_share(accounts: list[StageAccount]) -> float:
    """Share of the time of all stages; 0 for a single one."""
    return sum(account.bubbles for account in accounts) / max(sum(account.span for account in accounts), 1e-9)


def shares_of(account: StageAccount) -> dict[str, float]:
    """Shares of a stage's time by cause."""
    causes = ("compute", "pb1", "pb2", "pb3", "communication", "host", "no_work")
    return {cause: getattr(account, cause) / account.span for cause in causes}
