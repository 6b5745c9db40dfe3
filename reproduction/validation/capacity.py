"""Capacities of policies with real tokens beside simulated ones, on the same requests, and the error of simulation there.

A capacity is the highest rate at which a share of the requests (`attainment`) meet `ttft` and `tbt`, on one stretch of a trace:
its lengths in their order, with Poisson arrivals that a rate only stretches. It is searched in simulation; then the same requests
are served with real tokens at `shares` of it. `experiments.capacity` gives the interval over many stretches. Queued runs of other
requests give the speed of the card, at which everything is simulated once more.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tabulate import tabulate

from cbatch import SLO, ConfigError
from cbatch.sim import Profile, load_profile
from cbatch.validation import Switch, positive, whole
from experiments.capacity.estimate import Shares
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.selection import beginning_with
from reproduction.validation import runs as kept_runs
from reproduction.validation.cases import POLICIES, SERVE, Case, sizes, workload
from reproduction.validation.compare import Pair, by_card, compare, pair, simulate, speed_of
from reproduction.validation.report import show
from reproduction.validation.runs import ServedRun, figures

_NARROW, _RATES, _SPAN = 1.1, 9, 1.15  # bracket; rates around its middle, and the outermost over it
_AT_ONCE = 1e4  # requests per second

Seconds = Annotated[float, positive("seconds")]
Number = Annotated[int, whole(20, unit="number of requests")]


def main(
    path: str = "",
    measured: tuple[str, ...] = (),
    policies: str = "sarathi_serve;prefill_first;past_future",
    shares: tuple[float, ...] = (0.95, 1.0, 1.05),
    requests: Number = 400,
    queued: Number = 300,
    ttft: Seconds = 1.0,
    tbt: Seconds = 0.25,
    attainment: Annotated[float, positive("0.9 for 90%")] = 0.9,
    model: str = "llama-3.1-8b",
    batch: Annotated[int, whole(1)] = 48,
    hardware: str = "h200",
    serve: Switch = True,
    backend: str = "cuda",
    name: str = "capacity",
    folder: str = RESULTS,
) -> None:
    """Searches the capacities in simulation, serves around them, compares; writes NAME.npz and NAME.json.

    Args:
        path: a trace to serve. measured: files of kept runs instead, each of a card.
        policies: beginnings of names, separated by ";". shares: of the simulated capacity, at which to serve.
        requests: of each run. queued: of those that tell the card's speed.
        hardware: profile to simulate with. serve: off prints the rates and ends. backend: cpu serves small models.

    Raises:
        ConfigError: neither a trace nor measured runs, or no GPU.
    """
    if not path and not measured:
        serve_it, kept_ones = "path=azure_llm_2023_conv.csv.gz", "measured=reproduction/results/h200/capacity.npz"
        raise ConfigError(f"capacity: give a trace to serve on a GPU, {serve_it}, or kept runs, {kept_ones}")
    profile, files = load_profile(hardware), [Path(file) for file in measured]
    if path:
        server, slo = (model, batch, 16384), SLO(ttft, tbt)
        cases = [Case("card, queued", *server, (SERVE, "orca", "vllm_v1, 2048 tokens"), queued, start=600)]
        chosen = [
            Case(f"capacity, {policy}", *server, (policy,), requests, start=1500, slo=slo)
            for policy in beginning_with("policies", policies, POLICIES)
        ]
        search = partial(simulated_capacity, path=path, attainment=attainment, profile=profile)
        with ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as pool:
            for case, found in zip(chosen, pool.map(search, chosen), strict=True):
                print(f"{case.name}: {found:.2f} requests/s simulated", flush=True)
                cases += [
                    replace(case, name=f"{case.name} at {share:.0%}", load=share, rate=round(share * found, 3))
                    for share in shares
                ]
        if not serve:
            return
        files = [Path(folder) / hardware / f"{name}.npz"]
        _serve(cases, path, files[0], backend, hardware)
    kept = [kept_runs.load(file) for file in files]
    result = _results([found for _, found in kept], attainment, profile)
    about = {"measured": [each for each, _ in kept], "attainment": attainment}
    print(f"written: {write_benchmark(name, kept[0][0]['hardware'], about | result, folder, VALIDATION)}")


def simulated_capacity(case: Case, path: str, attainment: float, profile: Profile) -> float:
    """Bisects the rate to a bracket, and simulates rates around its middle; requests per second.

    Raises:
        ConfigError: no rate or every rate meets the objectives.
    """

    def share(rate: float) -> float:
        asked = workload(replace(case, rate=rate), path, None).requests(None)
        run = ServedRun({"policy": case.policies[0], **sizes(case, asked)}, {}, {})
        return figures(simulate(run, profile, requests=asked))["attainment"]

    if share(_AT_ONCE) >= attainment:
        remedy = "raise requests=, or set a shorter ttft= or tbt="
        raise ConfigError(f"{case.name}: even if all requests arrive at once the objectives are met; {remedy}")
    low, high = 1 / _AT_ONCE, _AT_ONCE
    while high > _NARROW * low:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if share(middle) >= attainment else (low, middle)
    if low == 1 / _AT_ONCE:
        raise ConfigError(f"{case.name}: no rate meets the objectives; set a longer ttft= or tbt=")
    rates = np.sqrt(low * high) * np.geomspace(1 / _SPAN, _SPAN, _RATES)
    return crossing(rates.tolist(), [share(rate) for rate in rates], case.num_requests, attainment)


def crossing(rates: Sequence[float], shares: Sequence[float], requests: int, attainment: float) -> float:
    asked = np.full((1, len(rates)), float(requests))
    return Shares(np.array(rates), asked * np.array(shares), asked, attainment).crossing()


def _serve(cases: Sequence[Case], path: str, file: Path, backend: str, hardware: str) -> None:
    """Serves the cases on one server, the lowest shares first, and keeps the runs."""
    from reproduction.validation.serve import serve_cases  # loads torch

    asked = [request for case in cases for request in workload(case, path, None).requests(None)]
    longest, ordered = max(request.max_tokens for request in asked), sorted(cases, key=lambda case: case.load or 0)
    for about, served in serve_cases(ordered, path, (), backend, longest, hardware):
        kept_runs.save(file, about, served)
    print(f"written: {file}")


def _results(cards: Sequence[Sequence[ServedRun]], attainment: float, profile: Profile) -> dict[str, Any]:
    """Returns capacities by policy, and the errors of all runs: as simulated with the profile, and at the card's speed."""
    ways: dict[str, list[Pair]] = {"profile": [], "card": []}
    speeds = []
    runs = by_card(cards)
    for of_card, shown in zip(cards, runs, strict=True):
        speed = speed_of([run for run in of_card if run.settings["rate"] is None], profile)
        speeds.append(asdict(speed))
        for run in shown:
            if run.settings["rate"]:
                ways["profile"].append(pair(run, profile))
                ways["card"].append(pair(run, replace(profile, card=speed)))
    for pairs in ways.values():
        pairs.sort(key=lambda found: float(found.run.settings["rate"]))
    errors = {way: compare(pairs, profile) for way, pairs in ways.items()}
    for way, found in errors.items():
        print(f"\n==== iteration times of the {way}")
        show(found)
    policies = dict.fromkeys(found.run.name[1] for found in ways["card"])
    capacities = {policy: _capacity(policy, ways, attainment) for policy in policies}
    rows = [
        {"policy": policy, **{name: _shown(value) for name, value in row.items()}} for policy, row in capacities.items()
    ]
    print(tabulate(rows, "keys"))
    return {"capacities": capacities, "speed": speeds, "errors": errors}


def _shown(value: float | Sequence[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else ", ".join(f"{each:.4g}" for each in value)


def _capacity(policy: str, ways: Mapping[str, Sequence[Pair]], attainment: float) -> dict[str, Any]:
    """Returns what was attained at each rate, and the crossing of `attainment`; None beyond the rates.

    ways: runs in the order of their rates.
    """
    pairs = {way: [found for found in found_all if found.run.name[1] == policy] for way, found_all in ways.items()}
    real = [found.run for found in pairs["profile"]]
    first, rates = real[0].settings, [run.settings["rate"] for run in real]
    attained = {"measured": [run.figures["attainment"] for run in real]}
    attained |= {way: [found.simulated["attainment"] for found in simulated] for way, simulated in pairs.items()}
    number = len(real[0].columns["request.prompt"])
    crossings = {way: crossing(rates, shares, number, attainment) for way, shares in attained.items()}
    known = {f"capacity, {way}": value if 0 < value < np.inf else None for way, value in crossings.items()}
    return {"searched": first["rate"] / first["load"], "rates": rates, **attained, **known}
