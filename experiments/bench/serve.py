"""Speed of policies with real tokens on this machine's GPU: prompt and output tokens per second, on the same requests.

    python -m experiments.bench serve policies='policy=sarathi chunk=256;policy=mine.Mine'
    python -m experiments.bench serve settings='model=llama-13b workload=azure_conv workload.path=FILE workload.queued=true batch=128'

One server is built and serves the requests under each policy in turn, `repeats` times.
"""

import shlex
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from tabulate import tabulate

from cbatch import ConfigError, Server
from experiments.bench.serving import compare
from experiments.settings.assemble import assemble
from experiments.settings.command_line import Count
from experiments.settings.compose import compose_run
from experiments.settings.servers import equal_requests
from experiments.store.benchmark_file import BENCH, write
from policies.orca import Orca

WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 16
COLUMNS = ("tokens_per_second", "ms_per_iteration", "active_share", "host_ms_per_iteration")


def main(
    policies: str = "policy=orca;policy=sarathi chunk=256",
    settings: str = "",
    path: str = "",
    repeats: Count = 3,
    name: str = "serve",
    folder: str = "results",
    command: str = BENCH,
) -> None:
    """Measures and prints; writes NAME.json after each policy.

    Args:
        policies: keys of `experiments.run` that describe a policy, several policies separated by ";".
        settings: keys of `experiments.run` for all policies: model, workload, batch, runtime. path: of a trace, `workload.path`.
        command: to be stored as the origin of the figures.

    Raises:
        ConfigError: no GPU, or several replicas.
    """
    shared = ["backend=cuda", "timeline=false", *shlex.split(settings), *([f"workload.path={path}"] if path else [])]
    makers = {policy: compose_run(*shared, *shlex.split(policy)).policy for policy in policies.split(";")}
    chosen = compose_run(*shared)
    run = assemble(chosen, print)
    if not isinstance(run.server, Server):
        raise ConfigError("serve: measures one server; leave out backend.replicas=")
    vocabulary, hardware = run.backend.vocabulary(run.spec), run.backend.hardware(run.cost.profile)
    stamped: dict[str, Any] = {"model": run.spec.name, "batch": run.limits.max_batch, "requests": len(run.requests)}
    stamped |= {"workload": repr(chosen.workload), "chosen": run.chosen, "figures": {}}
    print(f"{run.spec.name}, batch {run.limits.max_batch}, {len(run.requests)} requests on {hardware}", flush=True)
    with closing(run.server):
        prompt = min(WARM_UP_PROMPT, run.limits.max_request_tokens - WARM_UP_TOKENS)
        warm_up = equal_requests(run.limits.max_batch, prompt, WARM_UP_TOKENS, run.spec.vocab_size)
        run.server.serve(Orca(), warm_up)
        for policy, runs in compare(run.server, makers, lambda: chosen.workload.requests(vocabulary), repeats):
            figures = {**runs.figures(), "seconds": runs.spread("seconds"), "iterations": runs.served[0].iterations}
            stamped["figures"][policy] = {**figures, "eager": runs.eager}
            print(f"  {policy}: {runs.spread('tokens_per_second')['median']:.0f} tokens/s", flush=True)
            written = write(name, hardware, stamped, folder, command)
    print(f"\n{_table(stamped['figures'])}\nwritten: {written}")


def _table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [(policy, *(found[name]["median"] for name in COLUMNS), found["eager"]) for policy, found in figures.items()]
    head = ("policy", "tokens/s", "ms per iteration", "device active", "host ms", "iterations without a graph")
    return tabulate(rows, head, floatfmt=("", ".0f", ".3f", ".2%", ".3f", ".0f"))
