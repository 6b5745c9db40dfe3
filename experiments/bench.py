"""Measures the speed of policies with real tokens on this machine's GPU: prompt and output tokens per second, on the same requests.

    python -m experiments.bench policies='policy=sarathi chunk=256;policy=mine.Mine'
    python -m experiments.bench settings='model=llama-13b workload=azure_conv workload.path=FILE workload.queued=true batch=128'

policies     keys of `experiments.run` that describe a policy; several policies are separated by ";"
settings     keys of `experiments.run` for all policies: model, workload, batch, runtime
repeats      how often each policy serves the requests        name, folder   of the results file, FOLDER/<hardware>/NAME.json

One server is built and serves the requests under each policy in turn, `repeats` times. backend.pipeline_stages=2 and
backend.tensor_parallel=2 take several GPUs; backend=sim predicts the same, and backend=cpu model=tiny needs no GPU either.
"""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

from cbatch import ConfigError, Policy, Request, RunRecord, Server
from cbatch.results.metrics import Window, busy_seconds, step_columns
from experiments.settings.command_line import Count, keyword_arguments, run
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.store.claim import check_writable
from experiments.store.provenance import BENCH, spread, write_benchmark
from policies.orca import Orca

WARM_UP_TOKENS = 16
COLUMNS = ("tokens_per_second", "ms_per_iteration", "active_share", "host_ms_per_iteration")


def main(arguments: Sequence[str]) -> int:
    """Runs the command line. Returns its exit status."""
    kept = "files already written are complete"
    return run(
        lambda *options: serve(**keyword_arguments(serve, options, "bench")),
        arguments,
        lambda: str(__doc__),
        resume_hint=kept,
    )


def serve(
    policies: str = "policy=orca;policy=sarathi chunk=256",
    settings: str = "",
    path: str = "",
    repeats: Count = 3,
    name: str = "serve",
    folder: str = "results",
    command: str = BENCH,
) -> None:
    """Measures policies, prints their speed, and writes NAME.json after each. Raises ConfigError without a GPU, or for several replicas.

    path: the trace, `workload.path`. command: stored as the origin of the figures.
    """
    check_writable(Path(folder), "give another folder=")
    shared = ["backend=cuda", "timeline=false", *shlex.split(settings), *([f"workload.path={path}"] if path else [])]
    makers = {policy: compose_run(*shared, *shlex.split(policy)).policy for policy in policies.split(";")}
    chosen = compose_run(*shared)
    made = assemble(chosen, print)
    server = made.server
    if not isinstance(server, Server) or chosen.backend.pools:
        remedy = "leave out backend.replicas= and backend.pools=, or measure replicas with experiments.run"
        raise ConfigError(f"bench: times the iterations of one engine; {remedy}")
    vocabulary, gpus = (
        chosen.backend.vocabulary(chosen.model),
        made.first.limits.num_stages * chosen.backend.tensor_parallel,
    )
    hardware = chosen.backend.hardware(made.first.cost.profile)
    if gpus > 1 and chosen.backend.name != "cpu":
        hardware = f"{hardware.partition(',')[0]} x{gpus}"
    figures: dict[str, dict[str, Any]] = {}
    sizes = {"batch": made.first.limits.max_batch, "requests": made.num_requests}
    about = {"model": chosen.model.name, **sizes, "workload": repr(chosen.workload), "chosen": made.chosen}
    print(
        f"{chosen.model.name}, batch {made.first.limits.max_batch}, {made.num_requests} requests on {hardware}",
        flush=True,
    )
    with closing(server):
        server.serve(Orca(), shortened(chosen.workload.requests(vocabulary), made.first.limits.max_running))
        for policy, maker in makers.items():
            runs = repeat(server, maker, lambda: chosen.workload.requests(vocabulary), repeats)
            figures[policy] = {**runs.figures, "iterations": len(runs.record.steps), "eager": runs.eager}
            print(f"  {policy}: {runs.figures['tokens_per_second']['median']:.0f} tokens/s", flush=True)
            written = write_benchmark(name, hardware, {**about, "figures": figures}, folder, command)
    print(f"\n{_table(figures)}\nwritten: {written}")


class Runs(NamedTuple):
    """Repeated runs of the same requests.

    figures: median and extremes of each figure from `figures_of`, as in results files. record: the record of the last run.
    eager: iterations without a graph, per run; None without graphs, in simulation and on a CPU.
    """

    figures: dict[str, dict[str, float]]
    record: RunRecord
    eager: int | None


def repeat(
    server: Server,
    policy: Callable[[], Policy],
    requests: Callable[[], Sequence[Request]],
    repeats: int,
    *,
    asynchronous: bool | None = None,
) -> Runs:
    """Serves the requests several times, each time with a new policy. asynchronous: None: the server's default."""
    runs, before = [], _num_eager(server)
    for _ in range(repeats):
        record = server.serve(policy(), requests(), asynchronous=asynchronous)
        runs.append(figures_of(record))
    after = _num_eager(server)
    eager = None if before is None or after is None else (after - before) // repeats
    return Runs({name: spread([run[name] for run in runs]) for name in runs[0]}, record, eager)


def figures_of(record: RunRecord) -> dict[str, float]:
    """Returns the figures of one run.

    seconds: from the first plan to the last token on the host. tokens_per_second: prompt and output tokens.
    active_share: share of `seconds` in which the device computes an iteration.
    host_ms_per_iteration: median time per iteration in which the host does not wait, without the rest of a launch without a graph.
    """
    steps = step_columns(record.steps)
    seconds = float(steps["received_at"][-1] - steps["planned_at"][0])
    host = steps["launched_at"] - steps["planned_at"] + steps["done_at"] - steps["received_at"]
    num_tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request in record.requests)
    return {
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "ms_per_iteration": seconds / len(record.steps) * 1e3,
        "active_share": busy_seconds(steps["started"], steps["ended"], Window(-inf, inf)) / seconds,
        "host_ms_per_iteration": float(np.median(host)) * 1e3,
    }


def _num_eager(server: Server) -> int | None:
    """Returns the number of iterations without a graph so far; None if the executor has no graphs."""
    iteration = getattr(server.executor, "iteration", None)
    return None if iteration is None else int(iteration.num_eager)


def shortened(requests: Sequence[Request], number: int) -> list[Request]:
    """Returns the first requests, cut to a few output tokens, which cause all allocations and compilations."""
    short = []
    for request in islice(requests, number):
        output = min(request.max_new_tokens, WARM_UP_TOKENS)
        short.append(Request(request.id, request.num_prompt_tokens, output, prompt=request.prompt))
    return short


def _table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [(policy, *(row[name]["median"] for name in COLUMNS), row["eager"]) for policy, row in figures.items()]
    head = ("policy", "tokens/s", "ms per iteration", "device active", "host ms", "iterations without a graph")
    return tabulate(rows, head, floatfmt=("", ".0f", ".3f", ".2%", ".3f", ".0f"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
