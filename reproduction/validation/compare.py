"""Simulates real runs again and compares the figures."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch import BatchShape, KVSize, Limits, ModelSpec, Request, RunRecord, Server
from cbatch.bounds import Bounds, minorants_of
from cbatch.model.topology import Topology
from cbatch.results.summary import offered_rate
from cbatch.sim import Profile, ProfileCost, SimExecutor
from cbatch.sim.links import Links
from cbatch.sim.measured import HostTimes
from cbatch.sim.power import GpuClock
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import profile_text
from experiments.setup.presets import load_spec
from reproduction.validation.cases import make_policy
from reproduction.validation.runs import ServedRun, figures, percentile_ranks

CLOSED = {"total time": 0.03, "throughput": 0.03}
"""Largest relative errors that are acceptable, of runs whose requests all wait at the start: in others arrivals decide."""

KINDS = ("TTFT", "TBT", "TPOT", "end to end")
RANKS = {"mean": 0.03, "P50": 0.03, "P90": 0.08, "P99": 0.08}
TARGETS = CLOSED | {f"{kind} {rank}": target for kind in KINDS for rank, target in RANKS.items()}
"""The same, and of all runs. P90 and P99 are right, too, within `RANK` percentiles of the simulated run."""

RANK = 0.3

BARS = {"mean": 0.05, "P50": 0.05, "P90": 0.1, "P99": 0.15}
"""Errors of latencies by which documents count runs, whatever the percentile of the simulated run."""

NUDGES = (0.99, 0.995, 1.005, 1.01)
"""Factors of all iteration times with which each run is simulated again, to see how sensitive its figures are."""


class Pair(NamedTuple):
    """A real run, the figures of its simulation, and those of simulations with all iteration times scaled (`NUDGES`).

    ranks: percentiles of the simulated run at which the real run's percentiles lie.
    num_eager: simulated iterations with prompts that fit no captured graph.
    """

    run: ServedRun
    simulated: dict[str, float]
    ranks: dict[str, float]
    nudged: list[dict[str, float]]
    num_eager: int = 0


def cost_of(run: ServedRun, profile: Profile) -> ProfileCost:
    """Returns what predicts the iterations of a run."""
    spec, gpus = load_spec(run.settings["model"]), run.settings.get("tensor_parallel", 1)
    return ProfileCost(profile, spec, Topology(gpus), run.settings["batch"])


def simulated_server(profile: Profile, spec: ModelSpec, limits: Limits, kv: KVSize) -> Server:
    """Returns a server of a simulated GPU, whose host takes the profile's time in the asynchronous loop."""
    cost = ProfileCost(profile, spec, max_batch=limits.max_batch)
    return Server(SimExecutor(cost, profile.host_time(True, spec)), limits, cost, kv)


def scaled(profile: Profile, factor: float) -> Profile:
    """Returns a profile with all iteration times scaled by a factor."""
    card = profile.card
    return replace(profile, card=replace(card, prompts=factor * card.prompts, decodes=factor * card.decodes))


def pair(run: ServedRun, profile: Profile) -> Pair:
    """Simulates a real run."""
    record = simulate(run, profile, cost=(cost := cost_of(run, profile)))
    nudged = [figures(simulate(run, scaled(profile, factor))) for factor in NUDGES]
    return Pair(run, figures(record), percentile_ranks(record, run.figures), nudged, cost.num_eager)


def simulate(
    run: ServedRun, profile: Profile, requests: Sequence[Request] | None = None, cost: ProfileCost | None = None
) -> RunRecord:
    """Simulates the same requests, or others, under the same policy and limits, in the same loop, with the host of their runtime.

    cost: `cost_of` them, which counts iterations.
    """
    asynchronous = run.settings.get("loop", "async") == "async"
    cost, (limits, kv) = cost or cost_of(run, profile), _sizes(run)
    host = profile.host_time(asynchronous, cost.spec)
    if not run.settings.get("receives_in_launch"):
        host = replace(host, receives_in_launch=False)
    server = Server(SimExecutor(cost, host), limits, cost, kv)
    asked = run.requests() if requests is None else requests
    return server.serve(make_policy(run.settings["policy"]), asked, asynchronous=asynchronous)


def share_of_bound(run: ServedRun, profile: Profile) -> float | None:
    """Returns the rate of a run's arrivals over B3, the share that `workload.load` states; None if all requests arrive at once."""
    requests, (limits, kv) = run.requests(), _sizes(run)
    if math.isnan(rate := offered_rate(requests)):
        return None
    return rate / Bounds(requests, minorants_of(cost_of(run, profile), limits), limits, kv.num_tokens).rate


def _sizes(run: ServedRun) -> tuple[Limits, KVSize]:
    settings = run.settings
    limits = Limits(settings["batch"], settings["max_tokens"], settings["longest"], tile=settings["tile"])
    return limits, KVSize(settings["num_blocks"], settings["block_size"])


def compare(pairs: Iterable[Pair], profile: Profile) -> dict[str, Any]:
    """Returns figures and relative errors by case and policy, the median and the largest errors.

    Of several cards, the names of cases end with the card (`on_card`).
    """
    cases: dict[str, dict[str, Any]] = {}
    for run, simulated, ranks, nudged, num_eager in pairs:
        case, policy = run.name
        errors = {name: _error(name, simulated[name], value) for name, value in run.figures.items()}
        cases.setdefault(case, {})[policy] = {
            "model": run.settings["model"],
            "batch": run.settings["batch"],
            "gpus": run.settings.get("tensor_parallel", 1),
            "loop": run.settings.get("loop", "async"),
            "load": run.settings.get("load"),
            "share_of_bound": share_of_bound(run, profile),
            "requests": len(run.columns["request.prompt"]),
            "measured": dict(run.figures),
            "simulated": simulated,
            "error": errors,
            "error_range": error_ranges(run.figures, [simulated, *nudged]),
            "percentile_rank": ranks,
            "iterations": iteration_errors(run, profile),
            "eager_iterations": num_eager,
            "receives_in_launch": run.settings.get("receives_in_launch", False),
        }
    return {
        "profile": profile.name,
        "tables": tables_of(profile, gpus_of(cases)),
        **({"at_speed_of": profile.card.text} if profile.card.name else {}),
        "targets": TARGETS,
        **summarize(cases),
        "cases": cases,
    }


def gpus_of(cases: Mapping[str, Any]) -> int:
    """Returns the number of GPUs that served the runs of a comparison."""
    return max(int(run.get("gpus", 1)) for runs in cases.values() for run in runs.values())


def tables_of(profile: Profile, gpus: int = 1) -> str:
    """Returns a digest of the tables of this number of GPUs in a profile, by which all compared runs, in 16-bit numbers, are simulated: of all but its error, price, power, peaks, links, shapes, block size, wider formats, drafts, host times of prompts in the cache and of handovers, which they lack, and of chunks, which the asynchronous loop hides, and whether tokens are received in a launch (`of_newest_runtime`)."""
    models = {
        name: replace(
            model,
            shape={},
            host=_of_decodes(model.host),
            tensor_parallel={
                degree: replace(tables, drafted_only=None)
                for degree, tables in model.tensor_parallel.items()
                if degree == gpus
            },
        )
        for name, model in profile.models.items()
    }
    ceilings = replace(profile.ceilings, flops_per_second_by_dtype={})
    timeless: dict[str, Any] = {
        "error": "",
        "compared": {},
        "links": Links(),
        "price": None,
        "peak": None,
        "block_size": 16,
        "watts": None,
        "host": _of_decodes(profile.host),
        "origins": {
            place: text
            for place, text in profile.origins.items()
            if place[-1:] not in (("host",), ("drafted_only",)) or len(place) == 1
        },
    }
    text = profile_text(replace(profile, **timeless, ceilings=ceilings, models=models))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _of_decodes(times: HostTimes | None) -> HostTimes | None:
    without: dict[str, Any] = {
        "receives_in_launch": False,
        "seconds_per_found_prompt": 0.0,
        "seconds_per_found_token": 0.0,
        "seconds_per_chunk": 0.0,
        "handover_seconds": 0.0,
    }
    return times and {loop: replace(time, **without) for loop, time in times.items()}


def summarize(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the largest and the median errors of these runs; within the target of each figure, and of all: [runs within, judged]."""
    runs = {name: judged(cases, name) for name in TARGETS}
    sizes = {name: [abs(run["error"][name]) for _, run in found] for name, found in runs.items()}
    met = {name: [which for which, run in found if is_within(name, TARGETS[name], run)] for name, found in runs.items()}
    missed = {which for name, found in runs.items() for which, _ in found if which not in met[name]}
    every = sum(map(len, cases.values()))
    figures = {name: [len(met[name]), len(found)] for name, found in runs.items() if found}
    totals = {"figures": np.sum(list(figures.values()), axis=0).tolist(), "runs": [every - len(missed), every]}
    return {
        "largest_error": {name: max(values) for name, values in sizes.items() if values},
        "median_error": {name: float(np.median(values)) for name, values in sizes.items() if values},
        "within": figures | {f"all {what}": counts for what, counts in totals.items()},
        "cards": cards(cases),
    }


def in_graphs(cases: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the runs of which every simulated iteration with prompts fitted a captured graph."""
    chosen = {
        name: {policy: run for policy, run in runs.items() if run.get("eager_iterations") == 0}
        for name, runs in cases.items()
    }
    return {name: runs for name, runs in chosen.items() if runs}


def of_newest_runtime(cases: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the runs, without launches of an earlier runtime if there are any of today's, which receives tokens during them."""
    chosen = {
        name: {
            policy: run
            for policy, run in runs.items()
            if run.get("receives_in_launch") or run.get("eager_iterations") == 0
        }
        for name, runs in cases.items()
    }
    newest = any(
        run["eager_iterations"] for runs in chosen.values() for run in runs.values() if run.get("receives_in_launch")
    )
    return {name: runs for name, runs in chosen.items() if runs} if newest else dict(cases)


def judged(cases: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names of the runs that this figure is judged by, and the runs. Clients do not report all figures."""
    every = [(f"{case}, {policy}", run) for case, runs in cases.items() for policy, run in runs.items()]
    chosen = [(which, run) for which, run in every if name in run["error"]]
    return [(which, run) for which, run in chosen if name not in CLOSED or run.get("load") is None]


def is_within(name: str, target: float, found: Mapping[str, Any]) -> bool:
    """Whether a run is within the target of a figure, or, as P90 or P99, within `RANK` percentiles."""
    place = found["percentile_rank"].get(name) if name.endswith((" P90", " P99")) else None
    return abs(found["error"][name]) <= target or (place is not None and abs(place - float(name[-2:])) <= RANK)


def within_bars(cases: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many runs have no latency whose error exceeds its bar (`BARS`), and how many runs there are."""
    bars = {f"{kind} {rank}": bar for kind in KINDS for rank, bar in BARS.items()}
    errors = [run["error"] for runs in cases.values() for run in runs.values()]
    met = [all(abs(of_run.get(name, 0.0)) <= bar for name, bar in bars.items()) for of_run in errors]
    return sum(met), len(met)


def on_card(case: str, card: int) -> str:
    """Returns the name of a case that was served on several cards."""
    return f"{case}, card {card}"


def by_card(cards: Sequence[Sequence[ServedRun]]) -> list[list[ServedRun]]:
    """Returns the runs of each card. If there are several cards, the names of the runs' cases say which."""
    if len(cards) == 1:
        return [[*cards[0]]]
    return [
        [replace(run, settings={**run.settings, "case": on_card(run.settings["case"], card)}) for run in runs]
        for card, runs in enumerate(cards, 1)
    ]


def card_of(case: str) -> tuple[str, str]:
    """Returns a case's name without its card, and the card."""
    name, several, card = case.rpartition(", card ")
    return (name, card) if several else (case, "1")


def cards(cases: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the relative error of the total time of all iterations, predicted one by one, of each card and kind."""
    sums: dict[str, dict[str, list[float]]] = {}
    for case, runs in cases.items():
        _, card = card_of(case)
        for kind, part in ((kind, part) for run in runs.values() for kind, part in run["iterations"].items()):
            measured = sums.setdefault(card, {}).setdefault(kind, [0.0, 0.0])
            measured[0] += part["seconds"]
            measured[1] += part["seconds"] * (1 + part["total"])
    return {
        card: {kind: predicted / real - 1 for kind, (real, predicted) in kinds.items()}
        for card, kinds in sorted(sums.items())
    }


def error_ranges(measured: Mapping[str, float], simulated: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Returns the smallest and the largest error of each measured figure among simulations."""
    errors = {name: [_error(name, run[name], value) for run in simulated] for name, value in measured.items()}
    return {name: [min(of_name), max(of_name)] for name, of_name in errors.items()}


def _error(name: str, simulated: float, measured: float) -> float:
    """Relative, but for shares: their difference."""
    return simulated - measured if name == "attainment" else simulated / measured - 1


def iteration_errors(run: ServedRun, profile: Profile) -> dict[str, dict[str, float]]:
    """Predicts every iteration of a real run from its shape; returns errors of those with and without prompts.

    number: iterations. seconds: their total time. total: its relative error. median: of the iterations' absolute errors.
    Of a run whose iterations were not kept, the errors that its settings tell, if any.
    """
    if "step.started" not in run.columns:
        return dict(run.settings.get("iterations", {}))
    shapes, (real, pauses) = run.shapes(), run.device_seconds()
    predicted = device_seconds(cost_of(run, profile), shapes, pauses)
    prompts = np.array([bool(shape.chunks) for shape in shapes])
    kinds = {"with prompts": prompts, "decodes alone": ~prompts}
    return {name: errors_of_times(real[kind], predicted[kind]) for name, kind in kinds.items() if kind.any()}


def errors_of_times(real: NDArray[np.float64], predicted: NDArray[np.float64]) -> dict[str, float]:
    """Returns the errors of the predicted seconds of some iterations, as `iteration_errors` has them."""
    total, median = predicted.sum() / real.sum() - 1, np.median(np.abs(predicted / real - 1))
    return {"number": len(real), "seconds": float(real.sum()), "total": float(total), "median": float(median)}


def speed_of(runs: Iterable[ServedRun], profile: Profile, delay: float = 0.0) -> Card:
    """Returns the speed of the card that served these runs: measured over predicted time of all iterations, by kind.

    Launches have the factor of the profile's card: the times of iterations do not tell theirs.
    delay: seconds by which sends have lengthened the iterations with prompts, which are counted elsewhere.
    """
    sums = {"with prompts": [-delay, 0.0], "decodes alone": [0.0, 0.0]}
    for kind, errors in (item for run in runs for item in iteration_errors(run, profile).items()):
        sums[kind][0] += errors["seconds"]
        sums[kind][1] += errors["seconds"] * (1 + errors["total"])
    prompts, decodes = (real / predicted if predicted else 1.0 for real, predicted in sums.values())
    card = profile.card
    return Card("the card that served", prompts * card.prompts, decodes * card.decodes, card.launches)


def device_seconds(cost: ProfileCost, shapes: Iterable[BatchShape], pauses: Iterable[float]) -> NDArray[np.float64]:
    """Returns the seconds of each of these iterations, [iterations], with these pauses before them."""
    clock = None if cost.power is None else GpuClock(cost.power)
    seconds = []
    for shape, pause in zip(shapes, pauses, strict=True):
        times = cost.execute(shape)
        saved = 0.0
        if clock is not None:
            clock.rest(pause)
            saved = clock.run(times.pace)
        seconds.append(times.compute + times.communication + times.embedding + times.head - saved)
    return np.array(seconds)
