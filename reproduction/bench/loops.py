"""Both loops with no graphs, graphs of decodes only, and graphs of all iterations, on mixed traffic.

Sarathi-Serve's budget makes most iterations mixed: while requests wait, each holds the decodes and as many prompt
tokens as fill it. Graphs of decodes serve only the tail of the run; graphs of all iterations need the budget to be a
captured size, as a tile-aligned one is. The asynchronous loop hides the host's planning, graphs hide launches.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from cbatch import Policy, Server
from experiments.bench.serving import repeat
from experiments.settings.assemble import assemble
from experiments.settings.command_line import Count
from experiments.settings.compose import compose_run
from experiments.settings.servers import equal_requests, release_memory
from experiments.workloads import Workload
from reproduction import RESULTS
from reproduction.experiment_files import swept
from reproduction.stored import write

LOOPS = {"sync": False, "async": True}


def main(repeats: Count = 3, folder: str = RESULTS) -> None:
    """Measures and prints; writes loops.json after each server. Settings are those of conf/experiment/loops.yaml."""
    stamped: dict[str, Any] = {"figures": {}}
    for graphs in swept("loops", "runtime.graphs"):
        run = assemble(compose_run("experiment=loops", f"runtime.graphs={graphs}", "timeline=false"), print)
        settings, lengths = run.settings, run.settings.composed["workload"]["lengths"]
        stamped |= {
            "model": run.spec.name,
            "batch": settings.batch,
            "chunk": settings.chunk,
            "requests": len(run.requests),
        }
        stamped |= {"lengths": [lengths["min_length"], lengths["max_length"]], "ratio": lengths["pd_ratio"]}
        assert isinstance(run.server, Server), "of one replica"
        warm_up = equal_requests(settings.batch, run.limits.max_request_tokens // 2, 4, run.spec.vocab_size)
        run.server.serve(settings.policy(), warm_up)
        stamped["figures"] |= measure(run.server, settings.policy, settings.workload, graphs, repeats)
        run.server.close()
        hardware = run.backend.hardware(run.cost.profile)
        del run
        release_memory()
        path = write("loops", hardware, stamped, folder)
    print(f"written: {path}")


def measure(
    server: Server[Any], policy: Callable[[], Policy], workload: Workload, graphs: str, repeats: int
) -> dict[str, Any]:
    """Returns the figures of both loops on one server, by "LOOP, graphs GRAPHS"."""
    report, vocabulary, found = server.executor.iteration.report, server.executor.vocabulary, {}
    for loop, asynchronous in LOOPS.items():
        runs = repeat(server, policy, lambda: workload.requests(vocabulary), repeats, asynchronous=asynchronous)
        steps = runs.record.steps
        mixed = np.array([step.num_prefill_tokens > 0 for step in steps])
        milliseconds = np.diff([step.received_at for step in steps], prepend=steps[0].planned_at) * 1e3
        kinds = {"mixed": milliseconds[mixed], "decodes alone": milliseconds[~mixed]}
        name = f"{loop}, graphs {graphs}"
        found[name] = {
            **runs.figures(),
            "median_ms": {kind: float(np.median(times)) if len(times) else None for kind, times in kinds.items()},
            "iterations": runs.served[-1].iterations,
            "mixed_iterations": int(mixed.sum()),
            "eager_iterations": runs.eager,
            "graphs": report.num_graphs,
            "capture_seconds": report.seconds,
        }
        print(f"  {name:22} {found[name]['tokens_per_second']['median']:8.0f} tokens/s, {runs.counted}", flush=True)
    return found
