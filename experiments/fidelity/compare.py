"""Simulates real runs again and compares the figures."""

from collections.abc import Iterable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from cbatch import BatchShape, Limits, RunRecord, Server
from cbatch.kv import KVSize
from cbatch.sim.cost import ProfileCost, StageTimes
from cbatch.sim.executor import SimExecutor
from cbatch.sim.power import GpuClock
from cbatch.sim.profile import Profile
from experiments.config.presets import load_spec
from experiments.fidelity.cases import POLICIES
from experiments.fidelity.runs import ServedRun, figures, percentile_ranks
from experiments.store.provenance import today

TARGETS = {"total time": 0.03, "throughput": 0.03, "TTFT P50": 0.05, "TTFT P99": 0.10, "TBT P50": 0.05, "TBT P99": 0.10}
"""Largest relative errors that are acceptable."""

NUDGES = (0.99, 0.995, 1.005, 1.01)
"""Factors of all iteration times with which each run is simulated again, to see how sensitive its figures are."""


class Pair(NamedTuple):
    """A real run, the figures of its simulation, and those of simulations with all iteration times scaled (`NUDGES`).

    ranks: percentiles of the simulated run at which the real run's percentiles lie.
    """

    run: ServedRun
    simulated: dict[str, float]
    ranks: dict[str, float]
    nudged: list[dict[str, float]]


class Nudged(ProfileCost):
    """Iteration times of the profile, scaled by a factor."""

    def __init__(self, run: ServedRun, profile: Profile, factor: float = 1.0) -> None:
        super().__init__(profile, load_spec(run.settings["model"]), max_batch=run.settings["batch"])
        self.factor = factor

    def execute(self, shape: BatchShape) -> StageTimes:
        times = super().execute(shape)
        return times._replace(compute=times.compute * self.factor, head=times.head * self.factor)


def pair(run: ServedRun, profile: Profile) -> Pair:
    """Simulates a real run."""
    record = simulate(run, profile)
    nudged = [figures(simulate(run, profile, factor)) for factor in NUDGES]
    return Pair(run, figures(record), percentile_ranks(record, run.figures), nudged)


def simulate(run: ServedRun, profile: Profile, factor: float = 1.0) -> RunRecord:
    """Simulates the same requests under the same policy and limits, in the asynchronous loop."""
    settings, cost = run.settings, Nudged(run, profile, factor)
    limits = Limits(settings["batch"], settings["max_tokens"], settings["longest"], tile=settings["tile"])
    executor = SimExecutor(cost, profile.host(True, settings["model"]))
    server = Server(executor, limits, cost, KVSize(settings["num_blocks"], settings["block_size"]))
    return server.serve(POLICIES[settings["policy"]](), run.requests())


def compare(pairs: Iterable[Pair], profile: Profile) -> dict[str, Any]:
    """Returns figures and relative errors by case and policy, the largest errors, and how policies rank."""
    cases: dict[str, dict[str, Any]] = {}
    for run, simulated, ranks, nudged in pairs:
        case, policy = run.name
        errors = {name: _error(name, simulated[name], value) for name, value in run.figures.items()}
        others = (simulated, *nudged)
        moved = {name: [_error(name, other[name], value) for other in others] for name, value in run.figures.items()}
        cases.setdefault(case, {})[policy] = {
            "model": run.settings["model"],
            "requests": len(run.columns["request.prompt"]),
            "measured": dict(run.figures),
            "simulated": simulated,
            "error": errors,
            "error_range": {name: [min(found), max(found)] for name, found in moved.items()},
            "percentile_rank": ranks,
            "iterations": iteration_errors(run, profile),
        }
    found = [policy for case in cases.values() for policy in case.values()]
    sizes = {name: [abs(policy["error"][name]) for policy in found] for name in TARGETS}
    return {
        "profile": profile.name,
        "targets": TARGETS,
        "largest_error": {name: max(values) for name, values in sizes.items()},
        "median_error": {name: float(np.median(values)) for name, values in sizes.items()},
        "ranking": {case: ranking(policies) for case, policies in cases.items()},
        "cases": cases,
    }


def _error(name: str, simulated: float, measured: float) -> float:
    """Relative, but for shares: their difference."""
    return simulated - measured if name == "attainment" else simulated / measured - 1


def iteration_errors(run: ServedRun, profile: Profile) -> dict[str, dict[str, float]]:
    """Predicts every iteration of a real run from its shape; returns errors of those with and without prompts.

    number: iterations. seconds: their total time. total: its relative error. median: of the iterations' absolute errors.
    """
    shapes, real = run.shapes(), run.device_seconds()
    predicted = device_seconds(Nudged(run, profile), shapes, run.pauses())
    prompts = np.array([bool(shape.chunks) for shape in shapes])
    found = {}
    for name, chosen in (("with prompts", prompts), ("decodes alone", ~prompts)):
        if chosen.any():
            seconds, ratios = real[chosen].sum(), predicted[chosen] / real[chosen]
            total, median = predicted[chosen].sum() / seconds - 1, np.median(np.abs(ratios - 1))
            sums = {"number": int(chosen.sum()), "seconds": float(seconds)}
            found[name] = {**sums, "total": float(total), "median": float(median)}
    return found


def device_seconds(cost: ProfileCost, shapes: Iterable[BatchShape], pauses: Iterable[float]) -> NDArray[np.float64]:
    """Returns the seconds of each of these iterations on one GPU, [iterations], with these pauses before them."""
    clock = None if cost.power is None else GpuClock(cost.power)
    seconds = []
    for shape, pause in zip(shapes, pauses, strict=True):
        times = cost.execute(shape)
        saved = 0.0
        if clock is not None:
            clock.rest(pause)
            saved = clock.run(times.pace)
        seconds.append(times.compute + times.embedding + times.head - saved)
    return np.array(seconds)


def ranking(policies: dict[str, Any]) -> dict[str, Any]:
    """Returns policies ordered by measured and by simulated throughput, and the pairs whose order differs.

    swapped: measured throughput of the first over the second, minus 1, for each such pair.
    """
    kinds = ("measured", "simulated")
    speed = {kind: {name: found[kind]["throughput"] for name, found in policies.items()} for kind in kinds}
    orders = {kind: sorted(values, key=values.__getitem__, reverse=True) for kind, values in speed.items()}
    swapped = {
        f"{first}; {second}": speed["measured"][first] / speed["measured"][second] - 1
        for first, second in combinations(orders["measured"], 2)
        if speed["simulated"][first] < speed["simulated"][second]
    }
    return {**orders, "swapped": swapped}


def show(result: dict[str, Any]) -> None:
    """Prints a line per run and quantity, and a summary of the errors.

    In brackets: the range of a figure's error while all iteration times are scaled by up to 1%. A percentile next to a jump
    in the distribution may be far off although nearly all values are right; its rank in the simulated run shows that.
    """
    for case, policies in result["cases"].items():
        rows = [
            [name, *(f"{found['measured'][key]:,.4g} {found['error'][key]:+.1%}" for key in TARGETS)]
            for name, found in policies.items()
        ]
        print(f"\n{case}: {next(iter(policies.values()))['model']}; measured, and the error of simulation")
        print(tabulate(rows, ["policy", *TARGETS], disable_numparse=True))
        for name, found in policies.items():
            kinds = [
                f"{kind}: {part['number']}, {part['seconds']:.2f} s, in all {part['total']:+.1%}, each {part['median']:.1%}"
                for kind, part in found["iterations"].items()
            ]
            print(f"  iterations of {name}, predicted one by one: {'; '.join(kinds)}")
        swapped = ", ".join(f"{pair} (apart by {gap:.1%})" for pair, gap in result["ranking"][case]["swapped"].items())
        print(f"  ranking: {f'differs: {swapped}' if swapped else 'the same'}")
    print()
    for name, target in TARGETS.items():
        all_runs = [
            (f"{case}, {policy}", run) for case, runs in result["cases"].items() for policy, run in runs.items()
        ]
        missed = [(which, found) for which, found in all_runs if abs(found["error"][name]) > target]
        errors = f"{result['median_error'][name]:6.2%} (median) {result['largest_error'][name]:6.2%} (largest)"
        says = f", MISSED by {len(missed)}:" if missed else ""
        print(f"  {name:12} error {errors}, target {target:.0%}{says}")
        for which, found in missed:
            low, high = found["error_range"][name]
            place = found["percentile_rank"].get(name)
            moved = f"{low:+.1%} to {high:+.1%} as iteration times move by 1%"
            rank = "" if place is None else f"; the measured one is P{place:.2f} of the simulated run"
            print(f"      {which}: {found['error'][name]:+.1%} ({moved}){rank}")


def error_line(result: dict[str, Any]) -> str:
    """Returns the text of a profile's `error`."""
    number = sum(len(policies) for policies in result["cases"].values())
    models = sorted({found["model"] for policies in result["cases"].values() for found in policies.values()})
    median, most = result["median_error"], result["largest_error"]
    errors = [f"{name} {median[name]:.1%} (at most {most[name]:.1%})" for name in TARGETS if name != "throughput"]
    runs = f"against {number} real runs of {' and '.join(models)}"
    return f"{runs}, median error: {', '.join(errors)}; python -m experiments.bench fidelity, {today()}"


def brief_error(result: dict[str, Any]) -> str:
    """Returns the error in a few words, for `cbatch.sim.provenance.Compared`: the largest of the medians, and of all."""
    median, largest = max(result["median_error"].values()), result["largest_error"]
    worst = max(largest, key=largest.__getitem__)
    return f"error {median:.1%}, {worst} to {largest[worst]:.1%}"
