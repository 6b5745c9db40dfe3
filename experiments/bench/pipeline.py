"""Pipeline stages on GPUs: throughput and bubbles of whole prompts and of chunks, and one GPU with as many per iteration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cbatch import Limits, Policy, Request
from cbatch.results.stages import account_stages
from cbatch.sim.stages import StageAccount
from experiments.bench.serving import chunked, compare
from experiments.config.backends import Cuda
from experiments.config.command_line import Count, beginning_with
from experiments.config.presets import load_spec
from experiments.config.servers import equal_requests, real_server, release_memory
from experiments.store.benchmark_file import write
from policies.orca import Orca
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

POLICIES: dict[str, Callable[[], Policy]] = {
    "orca": Orca,
    **chunked(Sarathi, "sarathi", 256, 512),
    **chunked(SarathiServe, "sarathi_serve", 256, 512),
}
SHORTEST, LONGEST, THETA, PD_RATIO = 1024, 4096, 0.4, 10


def main(
    model: str = "llama-13b",
    stages: tuple[int, ...] = (2, 1),
    layers: tuple[int, ...] = (),
    batch: Count = 16,
    requests: Count = 192,
    policies: str = "orca;sarathi, ",
    repeats: Count = 1,
    folder: str = "results",
) -> None:
    """Measures and prints; writes pipeline.json after each policy.

    `stages` are numbers of GPUs, each in turn; `layers` those of each stage, for the first of them; `batch` is of an
    iteration, of which as many are in flight as stages; `policies` beginnings of names separated by ";".
    """
    chosen = {name: POLICIES[name] for name in beginning_with("policies", policies, POLICIES)}
    spec, lengths = load_spec(model), zipf_lengths(requests)
    hardware = f"{torch.cuda.get_device_name()} x{max(stages)}"
    figures: dict[str, Any] = {}
    stamped = {"model": spec.name, "batch": batch, "requests": requests, "layers": list(layers), "figures": figures}
    for number in stages:
        backend = Cuda(pipeline_stages=number, layers=list(layers) if layers and number == stages[0] else "auto")
        limits = Limits(batch, 32768, LONGEST, num_stages=number)
        server = real_server(backend, spec, limits)
        server.serve(Orca(), equal_requests(limits.max_running, 64, 16, spec.vocab_size))
        print(
            f"{spec.name}, {number} GPU{'s' * (number > 1)}, {limits.max_running} requests in flight, {requests} in all: tokens/s"
        )
        found = figures[f"{number}"] = {}
        for name, runs in compare(server, chosen, lambda: make_requests(lengths, spec.vocab_size), repeats):
            run, rates, accounts = runs.served[0], runs.spread("tokens_per_second"), account_stages(runs.record)
            shares = [shares_of(account) for account in accounts]
            counts = {"iterations": run.iterations, "eager": runs.eager}
            found[name] = {
                "tokens_per_second": rates,
                **counts,
                "bubble_share": bubble_share(accounts),
                "stages": shares,
            }
            iterations = f"{run.iterations} iterations, {runs.eager} eager, bubbles {bubble_share(accounts):.1%}"
            print(f"  {name:24} {rates['median']:8.0f}  {iterations}", flush=True)
            for stage, causes in enumerate(shares):
                print(f"    stage {stage}: " + ", ".join(f"{cause} {share:.1%}" for cause, share in causes.items()))
            written = write("pipeline", hardware, stamped, Path(folder))
        server.close()
        del server
        release_memory()
    print(f"written: {written}")


def zipf_lengths(number: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of requests whose lengths follow SARATHI's Zipf distribution (arXiv 2308.16369, 5.3)."""
    places = np.arange(LONGEST - SHORTEST)
    weights = (places + 1.0) ** -THETA
    lengths = SHORTEST + np.random.default_rng(0).choice(places, number, p=weights / weights.sum())
    prompts = lengths * PD_RATIO // (PD_RATIO + 1)
    return list(zip(prompts.tolist(), (lengths - prompts).tolist(), strict=True))


def make_requests(lengths: list[tuple[int, int]], vocabulary: int) -> list[Request]:
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
