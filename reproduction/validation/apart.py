"""Prefill and decode apart, against two replicas that do both: served on two GPUs, and simulated from their profile.

    python -m reproduction.validation apart hardware=h200 traces=FOLDER     # on two GPUs; FOLDER has the published traces
    python -m reproduction.validation apart measured=reproduction/results/h200-x2/apart.json traces=FOLDER   # simulates its runs again

Lengths are those of the Azure traces of conversations and code, in random order, arrivals Poisson. A request attains its objectives if its time
to first token and its mean time per further token do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, product, repeat
from math import inf, nan
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tabulate import tabulate

from cbatch import SLO
from cbatch.cluster import LeastLoaded, ReplicatedServer
from cbatch.record import RunRecord
from cbatch.results.summary import summarize
from cbatch.sim import Profile, load_profile
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import profile_text
from experiments.profile.machine import hardware_name
from experiments.report.intervals import compare, mean_of
from experiments.report.text import format_mean
from experiments.settings.command_line import check_name
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.setup.servers import equal_requests
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.validation.compare import speed_of
from reproduction.validation.runs import ServedRun, Watched, load, run_of, save
from reproduction.validation.stored import served_before

LOADS = {"azure_conv_lengths": (12, 24, 36), "azure_code_lengths": (6, 12, 18)}
"""Requests per second, by workload."""

OBJECTIVES = {
    "strict": SLO(ttft=0.2, tpot=0.008),
    "steady": SLO(ttft=0.5, tpot=0.01),
    "relaxed": SLO(ttft=0.5, tpot=0.02),
}
LAYOUTS = "both", "pull", "push"
AT_SPEED = "at the cards' speed"
LONGEST = "workload=closed workload.num_requests=1 workload.length=8192"
SETUP = "model=llama-3.1-8b policy=sarathi_serve chunk=512 batch=128 max_tokens=2048 kv_tokens=262144 block_size=128 prefix_cache=true"


def server_of(*keys: str, hardware: Sequence[str]) -> ReplicatedServer:
    """Returns a prefiller and a decoder. hardware: of each."""
    roles = zip(("prefill", "decode"), hardware, strict=True)
    pools = ",".join(f"{role}:{{role:{role},hardware:{profile}}}" for role, profile in roles)
    chosen = (
        *SETUP.split(),
        *LONGEST.split(),
        "backend.router=least_loaded",
        f"backend.pools={{{pools}}}",
        f"hardware={hardware[0]}",
    )
    server = assemble(compose_run(*chosen, *keys)).server
    assert isinstance(server, ReplicatedServer)
    return server


def simulated_server(profile: Profile, cards: Sequence[Card]) -> ReplicatedServer:
    """Returns `server_of` simulated cards of these speeds."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number, _ in enumerate(cards)]
        for file, card in zip(files, cards, strict=True):
            file.write_text(profile_text(replace(profile, card=card)))
        return server_of("backend=sim", "backend.host_seconds=auto", hardware=[*map(str, files)])


def laid_out(server: ReplicatedServer, layout: str) -> ReplicatedServer:
    """Returns the server whose replicas do both, or pull or push what the prefiller has computed, by chunk or by layer."""
    if layout == "both":
        return replace(server, roles=(), moves=None, router=LeastLoaded())
    assert server.moves is not None
    layers = compose_run(*SETUP.split()).model.num_layers if layout == "layers" else 1
    return replace(server, moves=replace(server.moves, push=layout != "pull", layers=layers))


def simulate(server: ReplicatedServer, keys: str, layout: str) -> RunRecord:
    chosen: Any = compose_run(*SETUP.split(), *keys.split())
    return laid_out(server, layout).engine(chosen.policy(), chosen.workload.source(None)).run()


def measure(
    server: ReplicatedServer, about: Mapping[str, Any], keys: str, vocabulary: Any, profile: Profile
) -> tuple[dict[str, Any], list[ServedRun]]:
    """Serves a workload. Returns its figures and the speed of each card in this run, and each replica's iterations, with the ids of its requests.

    about: the row of `asked`.
    """
    chosen: Any = compose_run(*SETUP.split(), *keys.split())
    watched = [_Watched(each.executor) for each in server.servers]
    servers = [replace(each, executor=executor) for each, executor in zip(server.servers, watched, strict=True)]
    laid = laid_out(replace(server, servers=servers), about["layout"])
    cluster = laid.engine(chosen.policy(), chosen.workload.source(vocabulary))
    record = cluster.run()
    runs: list[list[ServedRun]] = []
    for engine, executor in zip(cluster.engines, watched, strict=True):
        requests = sorted(engine.record.requests, key=lambda request: request.id)
        settings = {**about, "model": chosen.model.name, "batch": chosen.batch, "replica": len(runs)}
        settings["ids"] = [request.id for request in requests]
        runs.append([run_of(settings, engine.record, requests, executor.shapes)] if executor.shapes else [])
    moves: Any = simulated_server(profile, [Card()] * 2).moves
    cards = [*map(asdict, cards_of(runs, record.transfers, profile, moves.delay))]
    return {"measured": figures(record), "cards": cards}, [*chain(*runs)]


class _Watched(Watched):
    """Also has what transfers need of the executor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["executor"], name)


def cards_of(runs: Sequence[Sequence[ServedRun]], transfers: Sequence[Any], profile: Profile, delay: Any) -> list[Card]:
    """Returns the speed of each replica's card.

    runs: of each; none of one that has computed nothing. delay: seconds of a send, see `Moves`; simulation adds them by itself.
    """
    delays = [0.0] * len(runs)
    for sent in transfers:
        delays[sent.sender] += delay.at(sent.num_bytes)
    return [speed_of(own, profile, seconds) for own, seconds in zip(runs, delays, strict=True)]


def elsewhere(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Card]:
    """Returns the mean speed of each card in the runs of the same cell with other seeds; none if there are none.

    A card's speed depends on what it does: one that computes prompts all the time is slower, with equal iterations, than one that also decodes.
    """
    cell, seed = ("workload", "rate", "layout"), row["seed"]
    others = [
        each["cards"]
        for each in rows
        if [each[key] for key in cell] == [row[key] for key in cell] and each["seed"] != seed and "cards" in each
    ]
    return [
        Card(same[0]["name"], *(fmean(card[kind] for card in same) for kind in ("prompts", "decodes")))
        for same in zip(*others, strict=True)
    ]


def figures(record: RunRecord) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": len(record.requests)}
    for name, objectives in OBJECTIVES.items():
        summary = summarize(record, num_blocks=1, max_batch=1, objectives=objectives, num_replicas=2)
        found[name] = summary["goodput"]["attained_share"]
    for name in ("ttft_seconds", "tpot_seconds"):
        found |= {f"{name} {rank}": summary[name.split("_")[0] + "_seconds"][rank] for rank in ("mean", "p50", "p90")}
    if record.transfers:
        moved = [sent for sent in record.transfers if sent.num_bytes]
        rates = [sent.num_bytes / (sent.ended - sent.started) / 1e9 for sent in moved if sent.ended > sent.started]
        found |= {
            "transfers": len(moved),
            "GB/s": float(np.median(rates or [nan])),
            "GB": sum(sent.num_bytes for sent in moved) / 1e9,
        }
        found["hidden share"] = float(np.mean([sent.hidden for sent in record.transfers]))
        found["visible ms"] = 1e3 * float(np.median([sent.ended - sent.started for sent in record.transfers]))
    return found


def routed(row: Mapping[str, Any], runs: Sequence[ServedRun], record: RunRecord) -> str:
    """Returns how many requests were simulated where they were served, and the mean TTFT of those before the first that was not; "" without iterations.

    runs: kept, of all rows. record: of the row's simulation, on two replicas of both.
    """
    served: dict[int, tuple[int, float]] = {}  # replica and TTFT, by id
    for run in runs:
        if all(run.settings[key] == row[key] for key in ("workload", "rate", "seed")) and row["layout"] == "both":
            arrival = run.columns["request.arrival"]
            ttft = (
                run.columns["request.first_token"] + arrival.min() - arrival
            )  # a run begins as its first request arrives
            served |= zip(run.settings["ids"], product([run.settings["replica"]], (ttft / 1e6).tolist()), strict=True)
    moved = [id_ for id_, (replica, _) in served.items() if replica != record.replica_of[id_]]
    before = [each for each in record.requests if each.id < min(moved, default=inf)]
    if not served or not before:
        return ""
    real = 1e3 * fmean(served[each.id][1] for each in before)
    simulated = 1e3 * fmean((each.token_times[0] or nan) - each.arrival_time for each in before)
    times = f"{real:.1f} ({simulated:.1f}) ms"
    return f"; {len(served) - len(moved)} simulated where served; TTFT of the first {len(before)} {times}"


def asked(only: str, layouts: str, seeds: int, seconds: float) -> list[dict[str, Any]]:
    """Returns the runs to measure, of each cell with each seed.

    only: cells such as azure_conv_lengths/36, with commas between, in this order; "": all. layouts: of `LAYOUTS`, likewise; push at one rate alone.
    """
    known = {f"{name}/{rate}": (name, rate) for name, rates in LOADS.items() for rate in rates}
    rows = []
    for cell, seed, layout in product(
        only.split(",") if only else known, range(seeds), layouts.split(",") if layouts else LAYOUTS
    ):
        check_name("cell", cell, dict.fromkeys(known, ""))
        check_name("layout", layout, dict.fromkeys(LAYOUTS, ""))
        name, rate = known[cell]
        if layout == "push" and rate != LOADS[name][1]:
            continue
        lengths = "workload.lengths.max_length=8191 workload.lengths.too_long=clip"
        keys = f"workload=traces/{name} workload.arrivals.rate={rate} workload.num_requests={round(rate * seconds)} seed={seed} {lengths}"
        rows.append({"workload": name, "rate": rate, "seed": seed, "layout": layout, "keys": keys})
    return rows


def main(
    hardware: str = "h200",
    measured: str = "",
    traces: str = "",
    seconds: float = 10.0,
    seeds: int = 1,
    only: str = "",
    layouts: str = "",
    folder: str = RESULTS,
) -> None:
    """Serves and simulates, writes apart.json, after each served run too, and prints it as a table. apart.npz has the iterations of served runs.

    seconds: of arrivals in each run. only, layouts: see `asked`. measured: such a file; needs no GPU.
    """
    about: dict[str, Any] = {}
    kept_runs: list[ServedRun] = []
    profile = load_profile(hardware)
    if measured:
        kept, about = served_before(measured)
        rows, device = kept["runs"], kept["hardware"]
        if (iterations := Path(measured).with_suffix(".npz")).is_file():
            _, kept_runs = load(iterations)
    else:
        rows, device = asked(only, layouts, seeds, seconds), f"{hardware_name('cuda')} x2"

    def write(runs: list[dict[str, Any]]) -> Path:
        return write_benchmark("apart", device, {**about, "profile": hardware, "runs": runs}, folder, VALIDATION)

    if not measured:
        from cbatch.model.checkpoint import Vocabulary

        vocabulary, real = (
            Vocabulary(compose_run(*SETUP.split()).model),
            server_of("backend=cuda", hardware=[hardware] * 2),
        )
        for layout in LAYOUTS:  # compiles what the first run would compile
            warm_up = equal_requests(64, 300, 16, vocabulary.size)
            laid_out(real, layout).engine(compose_run(*SETUP.split()).policy(), warm_up).run()
        for number, row in enumerate(rows, 1):
            found, runs = measure(real, row, f"{row['keys']} traces={traces}", vocabulary, profile)
            row |= found
            kept_runs += runs
            print(f"{number} of {len(rows)}: {row['keys']} {row['layout']}", flush=True)
            save(write(rows[:number]).with_suffix(".npz"), {"profile": hardware}, kept_runs)
    compared = {"simulated": rows, AT_SPEED: [row for row in rows if elsewhere(row, rows)]}
    for name, row in ((name, row) for name, own in compared.items() for row in own):
        server = simulated_server(profile, [Card()] * 2 if name == "simulated" else elsewhere(row, rows))
        record = simulate(server, f"{row['keys']} traces={traces}", row["layout"])
        row[name] = figures(record)
        print(show(row, name) + routed(row, kept_runs, record), flush=True)
    tables = (f"{name}:\n{table(own, name)}" for name, own in compared.items() if own)
    print(write(rows), *tables, differences(rows), sep="\n")


def table(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    """Returns the means of the runs of each cell, measured and simulated, with 95% intervals where there are several. name: of the simulated figures."""
    judged, rows, cells = _judged(runs, "measured"), [], dict[tuple[Any, ...], list[Mapping[str, Any]]]()
    for run in runs:
        cells.setdefault((run["workload"].split("_")[1], run["rate"], run["layout"]), []).append(run)
    for cell, same in cells.items():
        texts = []
        for key, unit in (*zip(judged, repeat(100)), ("ttft_seconds mean", 1e3), ("tpot_seconds mean", 1e3)):
            real, simulated = ({run["seed"]: unit * run[kind][key] for run in same} for kind in ("measured", name))
            mean = mean_of([*real.values()])
            ratio = mean_of([*simulated.values()]).mean / mean.mean if mean.mean else nan
            digits = 2 if key.startswith("tpot") else 1
            interval, ends = "", ""
            if len(same) > 1:
                _, low, high = compare(real, simulated, paired=True).ratio
                interval = f" ± {mean.half:.{digits}f}"
                ends = f" [{100 * low - 100:+.1f}, {100 * high - 100:+.1f}]"
            text = format_mean(mean, is_share=True) if unit == 100 else f"{mean.mean:.{digits}f}{interval}"
            texts += [text, f"{100 * ratio - 100:+.1f}{ends}"]
        rows.append([*cell, len(same), *texts])
    shown = *(f"{each} [%]" for each in judged), "TTFT [ms]", "per token [ms]"
    heads = [text for column in shown for text in (column, "simulated, off by [%]")]
    return tabulate(rows, ["lengths", "requests/s", "layout", "runs", *heads], "github", disable_numparse=True) + "\n"


def _judged(runs: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """Returns the objectives by which all runs were judged. kind: measured, or simulated."""
    return [name for name in OBJECTIVES if all(name in run[kind] for run in runs)]


def differences(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns how many points more replicas with roles attain than replicas of both, with 95% intervals, paired, where a cell has several runs.

    Older runs were not judged by all objectives as they were served.
    """
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        cells.setdefault((run["workload"].split("_")[1], run["rate"]), []).append(run)
    rows = []
    for (cell, same), key in product(cells.items(), _judged(runs, "simulated")):
        kinds = dict.fromkeys(run["layout"] for run in same)
        for layout in [each for each in kinds if each != "both" and "both" in kinds]:
            texts = []
            for kind in ("measured", "simulated"):
                if key not in _judged(runs, kind):
                    texts.append("")
                    continue
                both, apart = (
                    {run["seed"]: 100 * run[kind][key] for run in same if run["layout"] == each}
                    for each in ("both", layout)
                )
                if len(apart) > 1:
                    value, low, high = compare(both, apart, paired=True).difference
                    texts.append(f"{value:+.1f} [{low:+.1f}, {high:+.1f}]")
                else:
                    texts.append(f"{fmean(apart.values()) - fmean(both.values()):+.1f}")
            rows.append([*cell, layout, key, *texts])
    return (
        tabulate(
            rows,
            ["lengths", "requests/s", "layout", "objectives", "measured", "simulated"],
            "github",
            disable_numparse=True,
        )
        + "\n"
    )


def show(row: Mapping[str, Any], kind: str) -> str:
    """Returns a run's line: figures, with the simulated ones of a kind behind."""
    real, simulated = row.get("measured", {}), row[kind]
    parts = [f"{name} {real.get(name, nan):.4g} ({simulated.get(name, nan):.4g})" for name in simulated]
    return f"{row['workload']} {row['rate']}/s, seed {row['seed']}, {row['layout']}, {kind}: {', '.join(parts)}"
