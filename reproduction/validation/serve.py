"""Serves the real runs by which simulation is validated."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbatch import ModelSpec
from cbatch.model.checkpoint import Vocabulary
from cbatch.model.topology import Topology
from experiments.profile.laboratory import Batch, Laboratory
from experiments.profile.machine import Machine, build
from experiments.settings.hardware import card_name, cost_model
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests
from experiments.store.provenance import commit, today, versions
from experiments.workloads import Workload
from reproduction.validation.cases import SERVE, Case, make_policy, workload
from reproduction.validation.runs import ServedRun, Watched, run_of

WARM_UP = (64, 16)
"""Prompt and output tokens of the warm-up requests."""


def serve_cases(
    cases: Iterable[Case],
    path: str,
    runs: Iterable[ServedRun],
    backend: str = "cuda",
    longest: int = 0,
    hardware: str = "",
) -> Iterator[tuple[dict[str, Any], list[ServedRun]]]:
    """Serves the cases; yields what all runs so far have in common, and the runs. A run replaces an earlier one of its name.

    path: of a trace. runs: earlier ones. backend: "cuda", or "cpu" for small models.
    longest: tokens of requests for which servers are built, at least; a longer request needs another server.
    hardware: profile for the predictions of policies, as in simulation; by default the backend's.

    Raises:
        ConfigError: no GPU, or a capacity that was never measured.
    """
    by_name = {run.name: run for run in runs}
    machine: Machine | None = None
    before: Case | None = None
    with ExitStack() as in_use:
        for case in cases:
            requests = workload(case, path, capacity(case, by_name))
            lengths = requests.requests(None)
            needed = max(longest, *(request.max_tokens for request in lengths))
            spec = load_spec(case.model)
            fits = before is not None and case.fits(before)
            if machine is None or not fits or needed > machine.server.limits.max_request_tokens:
                machine = None  # frees its memory for the next one
                in_use.close()
                limits = {"batch": case.batch, "max_tokens": case.max_tokens, "longest": needed}
                machine = build(backend, spec, **limits, tensor_parallel=case.tensor_parallel)
                if hardware:
                    cost = cost_model(hardware, spec, Topology(case.tensor_parallel), case.batch)
                    machine = machine._replace(server=replace(machine.server, cost=cost))
                in_use.enter_context(closing(machine.server))
                _compile(machine.laboratory(spec))
            before = case
            print(f"{case.name}: {spec.name}, batch {case.batch}, {len(lengths)} requests", flush=True)
            for policy in case.policies:
                run = serve(machine, spec, case, policy, requests)
                by_name[run.name] = run
                seconds, rate = run.figures["total time"], run.figures["throughput"]
                print(f"  {policy:28} {seconds:7.2f} s, {rate:8.0f} tokens/s", flush=True)
            card = {"card": card_name()} if backend == "cuda" else {}
            about = {"hardware": machine.name, **card, "attention": machine.attention, "trace": Path(path).name}
            yield {**about, "versions": versions(), "date": today(), "commit": commit()}, list(by_name.values())


def capacity(case: Case, runs: Mapping[tuple[str, str], ServedRun]) -> float | None:
    """Returns the requests per second of the run that defines the capacity of this case; None without it."""
    run = runs.get((case.capacity_of, SERVE))
    return None if run is None else len(run.columns["request.prompt"]) / run.figures["total time"]


def serve(machine: Machine, spec: ModelSpec, case: Case, policy: str, requests: Workload) -> ServedRun:
    """Serves one real run, after a few requests to warm up."""
    server, vocabulary = machine.server, Vocabulary(spec)
    if case.kv_blocks is not None:
        server = replace(server, kv=server.kv._replace(num_blocks=min(case.kv_blocks, server.kv.num_blocks)))
    limits = server.limits
    tokens = {"tile": limits.tile, "max_tokens": limits.max_tokens, "longest": limits.max_request_tokens}
    blocks = {key: getattr(server.kv, key) for key in ("num_blocks", "block_size")}
    sizes = {"batch": limits.max_batch, **tokens, **blocks}
    settings = {"case": case.name, "policy": policy, "model": spec.name, **sizes, "load": case.load, "rate": case.rate}
    settings |= {"loop": case.loop, "tensor_parallel": case.tensor_parallel, "receives_in_launch": True}
    prompt, output = min(WARM_UP[0], limits.max_request_tokens - WARM_UP[1]), WARM_UP[1]
    server.serve(make_policy(policy), equal_requests(limits.max_batch, prompt, output, vocabulary.size))
    asked = requests.requests(vocabulary)
    watched = Watched(server.executor)
    record = replace(server, executor=watched).serve(make_policy(policy), asked, asynchronous=case.loop == "async")
    return run_of(settings, record, asked, watched.shapes)


def _compile(laboratory: Laboratory) -> None:
    """Computes batches that fit no graph: their kernels are compiled at first use."""
    longest = laboratory.limits.max_request_tokens
    for number in (1, 2, 3, 4, 8, 16):
        for tokens in (longest // 4, longest - 1):
            batch = Batch(((tokens, 0),) * number)
            if laboratory.holds(batch):
                laboratory.compute(batch)
