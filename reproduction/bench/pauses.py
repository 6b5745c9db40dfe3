"""Divides the device's pause between two iterations of the synchronous loop into the host's steps, for several runs on one card.

    ended N | receive | absorb | engine | plan | apply | pack | launch | start | started N+1

`signals` are `receive` and `start` together: the clocks of host and device drift apart, by opposite amounts in the two. The asynchronous loop
hides all of these steps; the time of its iterations tells whether the card or the loop makes those of the synchronous one longer.
"""

import gc
import resource
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch import Request, Server
from cbatch.model.checkpoint import Vocabulary
from cbatch.sim import load_profile
from experiments.profile.host import CHUNK, LONG, NEW, PROMPT
from experiments.profile.machine import build
from experiments.settings.hardware import card_name
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests
from experiments.store.provenance import write_benchmark
from reproduction import BENCH, RESULTS
from reproduction.validation.cases import CASES, make_policy, workload
from reproduction.validation.compare import cost_of, device_seconds
from reproduction.validation.runs import Watched, run_of

PARTS = ("signals", "absorb", "engine", "plan", "apply", "pack", "launch")
CASE = next(case for case in CASES if case.name == "held out, synchronous loop")
CHUNKS, WHOLE, ALONE = f"sarathi_serve, {CHUNK} tokens", "orca", "prefill_first"
WARM_UP = 24
"""Requests of the trace that are served first, as kernels are compiled."""


class Timed(Watched):
    """Also records the time of each plan, and when its launch begins, has packed, and hands over the computation: `times`, [launches, 4]."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self.times: list[list[float]] = []
        self._slots, self._iterations, self._planned = executor._slots, executor._iterations, 0.0

    def launch(self, step: Any) -> Any:
        slot, [iteration] = self._slots[step.index % len(self._slots)], self._iterations
        pack, times = slot.pack, [self._planned, self.now()]
        self.times.append(times)

        def packed(*arguments: Any) -> Any:
            work = pack(*arguments)
            times.append(self.now())
            return work

        class Handed:
            shape = iteration.shape

            def __call__(_, *arguments: Any) -> Any:  # noqa: N805
                times.append(self.now())
                return iteration(*arguments)

        slot.pack, self._iterations[0] = packed, Handed()
        try:
            launched = super().launch(step)
            self.ready_at()
            return launched
        finally:
            slot.pack, self._iterations[0] = pack, iteration

    def plans(self, policy: Any) -> Any:
        """Returns the policy; the end of each plan is recorded."""
        plan = policy.plan

        def timed(view: Any) -> Any:
            made, self._planned = plan(view), self.now()
            return made

        policy.plan = timed
        return policy


def main(path: str, held: int = 100, backend: str = "cuda", model: str = CASE.model, folder: str = RESULTS) -> None:
    """Measures, prints and writes pauses.json. path: of the trace whose requests are served. held: requests of the trace."""
    spec, figures, most = load_spec(model), dict[str, Any](), CASE.batch
    asked = workload(replace(CASE, num_requests=held), path, None)
    longest = max(request.max_tokens for request in asked.requests(None))
    machine = build(backend, spec, batch=most, max_tokens=CASE.max_tokens, longest=longest)
    trace, equal = partial(asked.requests, Vocabulary(spec)), partial(equal_requests, vocabulary=spec.vocab_size)
    short, long = partial(equal, prompt=PROMPT, new=NEW), partial(equal, most, min(LONG, longest - 2 * NEW), 2 * NEW)
    with closing(machine.server):
        for policy in (CHUNKS, WHOLE, ALONE):
            machine.server.serve(make_policy(policy), short(most))
        machine.server.serve(make_policy(WHOLE), trace()[:WARM_UP], asynchronous=False)
        for name, policy, requests, keys in (
            ("1 decode, as in a profile", ALONE, partial(short, 1), {}),
            (f"{most} decodes, as in a profile", ALONE, partial(short, most), {}),
            (f"{most} decodes of long contexts", ALONE, long, {}),
            (f"{most} prompts in chunks", CHUNKS, long, {}),
            ("trace in chunks", CHUNKS, trace, {}),
            ("trace in chunks, asynchronous", CHUNKS, trace, {"asynchronous": True}),
            ("trace in chunks, no garbage collection", CHUNKS, trace, {"collect": False}),
            ("trace in whole prompts", WHOLE, trace, {}),
            ("trace in whole prompts, asynchronous", WHOLE, trace, {"asynchronous": True}),
        ):
            figures[name] = serve(machine.server, policy, requests(), spec.name, **keys)
            print(f"  {name}: {figures[name]}", flush=True)
    card = {"card": card_name()} if backend == "cuda" else {}
    content = {
        **card,
        "model": spec.name,
        "batch": most,
        "requests": held,
        "trace": Path(path).name,
        "figures": figures,
    }
    print(f"written: {write_benchmark('pauses', machine.name, content, folder, BENCH)}")


def serve(
    server: Server, policy: str, asked: Sequence[Request], model: str, asynchronous: bool = False, collect: bool = True
) -> dict[str, Any]:
    """Serves requests; returns `divided`, the collections of garbage, and how often the thread was switched, of itself and by others."""
    timed, collections = Timed(server.executor), list[float]()

    def collected(phase: str, _: dict[str, int]) -> None:
        collections.append(1e3 * time.perf_counter())

    gc.collect()
    (gc.enable if collect else gc.disable)()
    gc.callbacks.append(collected)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    try:
        plans = timed.plans(make_policy(policy))
        record = replace(server, executor=timed).serve(plans, asked, asynchronous=asynchronous)
    finally:
        gc.callbacks.remove(collected)
        gc.enable()
    after = resource.getrusage(resource.RUSAGE_THREAD)
    settings = {"model": model, "batch": server.limits.max_batch, "case": CASE.name, "policy": policy}
    run = run_of(settings, record, asked, timed.shapes)
    _, pauses = run.device_seconds()
    predicted = device_seconds(cost_of(run, load_profile("h200")), timed.shapes, pauses)
    took = [end - begin for begin, end in zip(collections[::2], collections[1::2], strict=True)]
    return {
        "collections": {"number": len(took), "ms": sum(took), "longest_ms": max(took, default=0.0)},
        "switches": [after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw],
        **divided(record.steps, timed.times, predicted),
    }


def divided(steps: Sequence[Any], times: Sequence[Sequence[float]], predicted: NDArray[np.float64]) -> dict[str, Any]:
    """Returns the milliseconds of the pauses, their parts, and the iterations, by what they and the ones before compute: mean, median and P99.

    times: see `Timed`. predicted: seconds of the iterations.
    """
    rows = []
    for (before, step), (planned, begun, packed, handed) in zip(pairwise(steps), times[1:], strict=True):
        signals = before.received_at - before.ended + step.started - handed
        points = [before.received_at, before.done_at, step.planned_at, planned, begun, packed, handed]
        begins = max(step.started, before.ended)
        rows.append([begins - before.ended, signals, *np.diff(points), step.ended - begins])
    values = 1e3 * np.column_stack([np.array(rows), predicted[1:]])
    before_too = np.array([step.num_prefill_tokens > 0 for step in steps])
    prompts, after = before_too[1:], before_too[:-1]
    kinds = {"with prompts": prompts, "decodes alone": ~prompts & ~after, "decodes after prompts": ~prompts & after}
    found: dict[str, Any] = {}
    for kind, chosen in kinds.items():
        if chosen.any():
            columns = zip(("pause", *PARTS, "computing", "predicted"), values[chosen].T, strict=True)
            figures = {name: [column.mean(), *np.percentile(column, [50, 99])] for name, column in columns}
            found[kind] = {"number": int(chosen.sum())} | {
                name: [round(float(value), 4) for value in of] for name, of in figures.items()
            }
    return found
