"""Speed of policies with real tokens on this machine's GPU: prompt and output tokens per second, on the same requests.

    python -m experiments.bench serve policies='policy=sarathi chunk=256;policy=mine.Mine'
    python -m experiments.bench serve settings='model=llama-13b workload=azure_conv workload.path=FILE workload.queued=true batch=128'

One server is built and serves the requests under each policy in turn, `repeats` times. backend.pipeline_stages=2 and
backend.tensor_parallel=2 take several GPUs; backend=sim predicts the same.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from tabulate import tabulate

from cbatch import ConfigError, Request, RunRecord, Server
from cbatch.results.stages import account_stages
from experiments.bench.serving import compare
from experiments.settings.assemble import assemble
from experiments.settings.command_line import Count
from experiments.settings.compose import compose_run
from experiments.store.benchmark_file import BENCH, write
from policies.orca import Orca

WARM_UP_TOKENS = 16
CAUSES = ("compute", "pb1", "pb2", "pb3", "communication", "host", "no_work")
"""Of a stage's time, see `cbatch.sim.stages.StageAccount`."""
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
    vocabulary, gpus = run.backend.vocabulary(run.spec), run.limits.num_stages * run.backend.tensor_parallel
    hardware = run.backend.hardware(run.cost.profile)
    if gpus > 1 and run.backend.name != "cpu":
        hardware = f"{hardware.partition(',')[0]} x{gpus}"
    stamped: dict[str, Any] = {"model": run.spec.name, "batch": run.limits.max_batch, "requests": len(run.requests)}
    stamped |= {"workload": repr(chosen.workload), "chosen": run.chosen, "figures": {}}
    print(f"{run.spec.name}, batch {run.limits.max_batch}, {len(run.requests)} requests on {hardware}", flush=True)
    with closing(run.server):
        run.server.serve(Orca(), shortened(chosen.workload.requests(vocabulary), run.limits.max_running))
        for policy, runs in compare(run.server, makers, lambda: chosen.workload.requests(vocabulary), repeats):
            figures = {**runs.figures(), "seconds": runs.spread("seconds"), "iterations": runs.served[0].iterations}
            stamped["figures"][policy] = {**figures, "eager": runs.eager, **stages_of(run.server, runs.record)}
            print(f"  {policy}: {runs.spread('tokens_per_second')['median']:.0f} tokens/s", flush=True)
            written = write(name, hardware, stamped, folder, command)
    print(f"\n{_table(stamped['figures'])}\nwritten: {written}")


def shortened(requests: Sequence[Request], number: int) -> list[Request]:
    """Returns the first of the requests with few tokens to generate, whose iterations allocate and compile what longer ones do."""
    return [
        Request(each.id, each.num_prompt_tokens, min(each.max_new_tokens, WARM_UP_TOKENS), prompt=each.prompt)
        for each in islice(requests, number)
    ]


def stages_of(server: Server[Any], record: RunRecord) -> dict[str, Any]:
    """Returns the share of the stages' time in bubbles, and the shares of each stage's time by cause; nothing of one stage."""
    if server.limits.num_stages == 1:
        return {}
    accounts = account_stages(record) if server.executor.needs_tokens else server.executor.accounts()
    bubbles = sum(account.bubbles for account in accounts) / sum(account.span for account in accounts)
    shares = [{cause: getattr(account, cause) / account.span for cause in CAUSES} for account in accounts]
    return {"bubble_share": bubbles, "stages": shares}


def _table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [(policy, *(found[name]["median"] for name in COLUMNS), found["eager"]) for policy, found in figures.items()]
    head = ("policy", "tokens/s", "ms per iteration", "device active", "host ms", "iterations without a graph")
    return tabulate(rows, head, floatfmt=("", ".0f", ".3f", ".2%", ".3f", ".0f"))
