"""Simulates real runs again and compares the figures."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from cbatch import BatchShape, KVSize, Limits, Request, RunRecord, Server
from cbatch.sim import Profile, ProfileCost, SimExecutor
from cbatch.sim.cost import StageTimes
from cbatch.sim.power import GpuClock
from experiments.config.presets import load_spec
from experiments.fidelity.card import AS_MEASURED, CardSpeed, card_speed
from experiments.fidelity.cases import POLICIES
from experiments.fidelity.runs import ServedRun, figures, percentile_ranks
from experiments.store.provenance import today

CLOSED = {"total time": 0.03, "throughput": 0.03}
"""Largest relative errors that are acceptable, of runs whose requests all wait at the start: in others arrivals decide."""

KINDS = ("TTFT", "TBT", "TPOT", "end to end")
RANKS = {"mean": 0.03, "P50": 0.03, "P90": 0.08, "P99": 0.08}
TARGETS = CLOSED | {f"{kind} {rank}": target for kind in KINDS for rank, target in RANKS.items()}
"""The same, and of all runs. A percentile is right, too, within `RANK` percentiles of the simulated run."""

SUMMARY = ("TTFT mean", "TBT mean", "TPOT mean", "end to end mean", "TTFT P99", "TBT P99")

RANK = 0.3

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
    """Iteration times of the profile, scaled by a factor and to the speed of a card."""

    def __init__(self, run: ServedRun, profile: Profile, factor: float = 1.0, speed: CardSpeed = AS_MEASURED) -> None:
        super().__init__(profile, load_spec(run.settings["model"]), max_batch=run.settings["batch"])
        self.factor, self.speed = factor, speed

    def execute(self, shape: BatchShape) -> StageTimes:
        times, factor = super().execute(shape), self.factor * self.speed.factor(shape)
        return times._replace(compute=times.compute * factor, head=times.head * factor)


def pair(run: ServedRun, profile: Profile, speed: CardSpeed = AS_MEASURED) -> Pair:
    """Simulates a real run."""
    record = simulate(run, profile, 1.0, speed)
    nudged = [figures(simulate(run, profile, factor, speed)) for factor in NUDGES]
    return Pair(run, figures(record), percentile_ranks(record, run.figures), nudged)


def simulate(
    run: ServedRun,
    profile: Profile,
    factor: float = 1.0,
    speed: CardSpeed = AS_MEASURED,
    requests: list[Request] | None = None,
) -> RunRecord:
    """Simulates the same requests, or others, under the same policy and limits, in the asynchronous loop."""
    settings, cost = run.settings, Nudged(run, profile, factor, speed)
    limits = Limits(settings["batch"], settings["max_tokens"], settings["longest"], tile=settings["tile"])
    executor = SimExecutor(cost, profile.host(True, settings["model"]))
    server = Server(executor, limits, cost, KVSize(settings["num_blocks"], settings["block_size"]))
    return server.serve(POLICIES[settings["policy"]](), run.requests() if requests is None else requests)


def compare(pairs: Iterable[Pair], profile: Profile) -> dict[str, Any]:
    """Returns figures and relative errors by case and policy, the median and the largest errors, and how policies rank.

    Runs of several cards are told apart by the end of their case's name (`on_card`).
    """
    cases: dict[str, dict[str, Any]] = {}
    for run, simulated, ranks, nudged in pairs:
        case, policy = run.name
        errors = {name: _error(name, simulated[name], value) for name, value in run.figures.items()}
        others = (simulated, *nudged)
        moved = {name: [_error(name, other[name], value) for other in others] for name, value in run.figures.items()}
        cases.setdefault(case, {})[policy] = {
            "model": run.settings["model"],
            "load": run.settings.get("load"),
            "requests": len(run.columns["request.prompt"]),
            "measured": dict(run.figures),
            "simulated": simulated,
            "error": errors,
            "error_range": {name: [min(found), max(found)] for name, found in moved.items()},
            "percentile_rank": ranks,
            "iterations": iteration_errors(run, profile),
        }
    sizes = {name: [abs(run["error"][name]) for _, run in judged(cases, name)] for name in TARGETS}
    return {
        "profile": profile.name,
        "targets": TARGETS,
        "largest_error": {name: max(values) for name, values in sizes.items() if values},
        "median_error": {name: float(np.median(values)) for name, values in sizes.items() if values},
        "cards": cards(cases),
        "ranking": {case: ranking(policies) for case, policies in cases.items()},
        "cases": cases,
    }


def judged(cases: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names of the runs that this figure is judged by, and the runs."""
    every = [(f"{case}, {policy}", run) for case, runs in cases.items() for policy, run in runs.items()]
    return [(which, run) for which, run in every if name not in CLOSED or run.get("load") is None]


def on_card(case: str, card: int) -> str:
    """Returns the name of a case that was served on several cards."""
    return f"{case}, card {card}"


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


def speed_of(runs: Iterable[ServedRun], profile: Profile) -> CardSpeed:
    """Returns the speed of the card that served these runs."""
    found = [(run.shapes(), run) for run in runs]
    return card_speed(
        (shapes, run.device_seconds(), device_seconds(Nudged(run, profile), shapes, run.pauses()))
        for shapes, run in found
    )


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
    """Prints the figures of each run, and a summary of the errors.

    In brackets: the range of a figure's error while all iteration times are scaled by up to 1%. A percentile next to a jump
    in the distribution may be far off although nearly all values are right; its rank in the simulated run shows that.
    """
    for case, policies in result["cases"].items():
        rows = [
            [name if kind == KINDS[0] else "", kind, *(_cell(found, f"{kind} {rank}") for rank in RANKS)]
            for name, found in policies.items()
            for kind in KINDS
        ]
        print(f"\n{case}: {next(iter(policies.values()))['model']}; measured, and the error of simulation")
        print(tabulate(rows, ["policy", "", *RANKS], disable_numparse=True))
        for name, found in policies.items():
            kinds = [
                f"{kind}: {part['number']}, {part['seconds']:.2f} s, in all {part['total']:+.1%}, each {part['median']:.1%}"
                for kind, part in found["iterations"].items()
            ]
            print(f"  {name}: {'; '.join(f'{what} {_cell(found, what)}' for what in CLOSED)}")
            print(f"  iterations of {name}, predicted one by one: {'; '.join(kinds)}")
        swapped = ", ".join(f"{pair} (apart by {gap:.1%})" for pair, gap in result["ranking"][case]["swapped"].items())
        print(f"  ranking: {f'differs: {swapped}' if swapped else 'the same'}")
    print()
    for name, target in TARGETS.items():
        if name in result["median_error"]:
            _show_errors(name, target, result)
    for card, kinds in result["cards"].items():
        errors = ", ".join(f"{kind} {error:+.1%}" for kind, error in kinds.items())
        print(f"  card {card}: all iterations, predicted one by one: {errors}")
    if at_speed := _at_card_speed(result):
        print(f"  runs whose requests arrive over time, at the speed of their card, median error: {at_speed}")


def _cell(found: Mapping[str, Any], name: str) -> str:
    return f"{found['measured'][name]:,.4g} {found['error'][name]:+.1%}"


def _show_errors(name: str, target: float, result: Mapping[str, Any]) -> None:
    """Prints the errors of a figure, and of the run that it misses by most."""
    runs = judged(result["cases"], name)
    missed = [(abs(found["error"][name]), which, found) for which, found in runs if not _within(name, target, found)]
    errors = f"{result['median_error'][name]:6.2%} (median) {result['largest_error'][name]:6.2%} (largest)"
    says = f", MISSED by {len(missed)} of {len(runs)}, most by:" if missed else ""
    print(f"  {name:15} error {errors}, target {target:.0%}{says}")
    if missed:
        _, which, found = max(missed, key=lambda miss: miss[:2])
        low, high = found["error_range"][name]
        place = found["percentile_rank"].get(name)
        moved = f"{low:+.1%} to {high:+.1%} as iteration times move by 1%"
        rank = "" if place is None else f"; the measured one is P{place:.2f} of the simulated run"
        print(f"      {which}: {found['error'][name]:+.1%} ({moved}){rank}")


def _within(name: str, target: float, found: Mapping[str, Any]) -> bool:
    place, percentile = found["percentile_rank"].get(name), name.rpartition(" P")[2]
    return abs(found["error"][name]) <= target or (place is not None and abs(place - float(percentile)) <= RANK)


def error_line(result: dict[str, Any]) -> str:
    """Returns the text of a profile's `error`, which names the commits of the runtime that served the real runs."""
    number = sum(len(policies) for policies in result["cases"].values())
    models = sorted({found["model"] for policies in result["cases"].values() for found in policies.values()})
    median, most, by_card = result["median_error"], result["largest_error"], result["cards"]
    errors = ", ".join(f"{name} {median[name]:.1%} (at most {most[name]:.1%})" for name in SUMMARY)
    if at_speed := _at_card_speed(result):
        errors += f"; at the speed of their card, of the runs whose requests arrive over time: {at_speed}"
    runs = f"against {number} real runs of {' and '.join(models)} on {len(by_card)} card{'s' * (len(by_card) > 1)}"
    if commits := list(dict.fromkeys(card["commit"] for card in result["measured"] if card.get("commit"))):
        runs += f" by the runtime of {' and '.join(commits)}"
    kinds = list(dict.fromkeys(kind for kinds in by_card.values() for kind in kinds))
    off = {kind: [kinds[kind] for kinds in by_card.values() if kind in kinds] for kind in kinds}
    spread = ", ".join(f"{kind} {min(found):+.1%} to {max(found):+.1%}" for kind, found in off.items())
    command = f"python -m experiments.bench fidelity, {today()}"
    return f"{runs}, median error: {errors}; iterations, by card: {spread}; {command}"


def _at_card_speed(result: Mapping[str, Any]) -> str:
    errors = result.get("at_card_speed", {}).items()
    known = {name: f"{name} {found['median']:.1%} (at most {found['largest']:.1%})" for name, found in errors}
    return ", ".join(known[name] for name in SUMMARY if name in known)


def brief_error(median: float, most: float) -> str:
    """Returns the text of `cbatch.sim.provenance.Compared.brief`: the error of the mean TTFT over the runs, the largest of all means."""
    return f"error: TTFT {median:.0%}, at most {most:.0%}"
