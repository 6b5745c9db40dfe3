"""Sarathi-Serve's evaluation: capacity under its objectives, latencies against the rate, the cost of chunks, and its ablation.

Mistral-7B on one A100 and Yi-34B on two, from published kernel timings. A rate holds, by the rule of the authors' search, if the
median scheduling delay is at most 2 s and the P99 of all gaps between tokens at most the objective: 0.1 or 0.5 s (Mistral-7B), 0.2
or 1 s (Yi-34B). All series serve the same requests: lengths of ShareGPT as filtered for the paper, Poisson arrivals. As in the
paper, Sarathi-Serve has a budget of 512 tokens for the strict objective and of 2,048 for the relaxed one. Runs are of 512 requests, the
authors' of 2,048: past its capacity a queue grows, so that ours bears slightly higher rates.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from cbatch import BatchShape, Plan, View
from cbatch.model.topology import Topology
from cbatch.sim import Profile, ProfileCost
from cbatch.sim.profile_file import profile_text
from experiments.plots.parts import label_log
from experiments.plots.style import line_style, new_figure
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_text
from reproduction.papers.claims import Claim
from reproduction.papers.frames import select
from reproduction.papers.jobs import Figures, crossing, run_jobs, summary_of
from reproduction.papers.machines import TABLES_OPTION, Machines
from reproduction.papers.quantities import slowdown, value
from reproduction.parts import legend
from reproduction.profiles import convert

FOLDER = Path("runs", "paper")
"""Where the profile that the runs share is written."""
TRACE = "sharegpt_8k_llama2_rows1-20490.csv.gz"
REQUESTS, STEPS, STEP = 512, 12, 1.25
_DELAY = 2.0  # seconds


class Server(NamedTuple):
    """A model on A100s. lowest: requests per second of the first of the rates."""

    gpus: int
    lowest: float
    strict: float
    relaxed: float


SERVERS = {"mistral-7b": Server(1, 0.6, 0.1, 0.5), "yi-34b": Server(2, 0.2, 0.2, 1.0)}

_OWN = "policy=" + __name__
SERIES = {
    "vLLM": "policy=prefill_first",
    "Orca": "policy=orca",
    "Sarathi-Serve 512": "policy=sarathi_serve chunk=512",
    "Sarathi-Serve 2048": "policy=sarathi_serve chunk=2048",
    "hybrid only": "policy=sarathi_serve chunk=16384",
    "chunks only": f"{_OWN}.ChunksOnly",
}
"""Overrides by name. hybrid only: whole prompts beside decodes; chunks only: iterations of a chunk and of decodes take turns."""

_BEST = {"strict": "Sarathi-Serve 512", "relaxed": "Sarathi-Serve 2048"}
_LABELS = {"ttft_p50": "median TTFT [s]", "tbt_p99": "P99 TBT [s]"}
_PROMPTS, _CHUNKS = (2048, 4096, 8192, 16384), (512, 1024, 2048)


class ChunksOnly:
    """Chunked prompts without hybrid batches: an iteration computes chunks of prompts or decodes, in turns."""

    def __init__(self, budget: int = 512) -> None:
        self.budget, self._decodes = budget, False

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        prompts = [*view.prefilling, *view.waiting]
        self._decodes = (not self._decodes and bool(view.decoding)) or not prompts
        if not self._decodes:
            for request in prompts:
                left = self.budget - plan.num_tokens
                if left <= 0 or not plan.add(request, left, reserve=request.num_tokens):
                    break
        if not plan.num_requests:
            plan.add_decodes(preempt_newest=True)
        return plan.build()


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: model, series, rate (requests per second), and seconds: ttft_p50, delay_p50, tbt_p99.

    Rows of series "N-token chunks" have no rate: `prompt` tokens computed in chunks take `over` times as long as at once. Rows of
    series "decodes" have the seconds of an iteration of 32 decodes at 4,096 tokens of context: `seconds`.
    """
    if machines.traces is None or machines.tables is None:
        say(f"left out: give traces=FOLDER, the published traces, and {TABLES_OPTION}")
        return pd.DataFrame()
    jobs: list[Mapping[str, Any]] = [
        {"model": model, "series": series, "rate": round(server.lowest * STEP**step, 4)}
        for (model, server), series, step in product(SERVERS.items(), SERIES, range(STEPS))
    ]
    profile = convert(Path(machines.tables), [load_spec(model) for model in SERVERS])
    write_text(path := FOLDER / f"{profile.name}.json", profile_text(profile))
    places = {"profile": str(path), "traces": machines.traces}
    served = run_jobs(run, [{**job, **places} for job in jobs]).drop(columns=[*places])
    costs = {model: _cost(machines, profile, model, server) for model, server in SERVERS.items()}
    return pd.concat([served, pd.DataFrame(list(chain.from_iterable(_alone(*each) for each in costs.items())))])


def _cost(machines: Machines, profile: Profile, model: str, server: Server) -> ProfileCost:
    cost = ProfileCost(profile, load_spec(model), Topology(tensor_parallel=server.gpus))
    machines.note(model, {"model": model, **cost.provenance()})
    return cost


def _alone(model: str, cost: ProfileCost) -> list[dict[str, Any]]:
    """What single iterations say."""
    rows: list[dict[str, Any]] = [
        {"model": model, "series": "decodes", "seconds": cost.predict(BatchShape((), 32, 32 * 4096))}
    ]
    for prompt, chunk in product(_PROMPTS, _CHUNKS):
        over = slowdown(cost.predict, chunk, prompt)
        rows.append({"model": model, "series": f"{chunk}-token chunks", "prompt": prompt, "over": over})
    return rows


def run(model: str, series: str, rate: float, profile: str, traces: str) -> Figures:
    """One run."""
    lengths = f"workload=sharegpt workload.lengths.path={traces}/{TRACE} workload.lengths.order=random"
    load = f"workload.num_requests={REQUESTS} workload.arrivals.rate={rate}"
    machine = f"hardware={profile} model={model} backend.tensor_parallel={SERVERS[model].gpus} batch=128"
    found = summary_of(*f"{SERIES[series]} {lengths} {load} {machine}".split())
    delay, tbt = found["scheduling_delay_seconds"]["p50"], found["tbt_seconds"]["p99"]
    return {"ttft_p50": found["ttft_seconds"]["p50"], "delay_p50": delay, "tbt_p99": tbt}


def capacity(data: pd.DataFrame, model: str, series: str, slo: str) -> float:
    """The rate from which on the median delay or the P99 of the gaps is too long."""
    shown = select(data, model=model, series=series).set_index("rate")
    limits = {"delay_p50": _DELAY, "tbt_p99": getattr(SERVERS[model], slo)}
    ends = [crossing(shown.index.tolist(), shown[column].tolist(), most) for column, most in limits.items()]
    known = [end for end in ends if end == end]
    return min(known) if known else float("nan")


def lead(data: pd.DataFrame, model: str, slo: str, under: str) -> float:
    """Sarathi-Serve's capacity, with the budget for the objective, over that of another series."""
    return capacity(data, model, _BEST[slo], slo) / capacity(data, model, under, slo)


def at_rate(data: pd.DataFrame, model: str, what: str, series: str) -> float:
    """A latency in seconds, at the rate nearest to 0.8 of Sarathi-Serve's capacity under the strict objective."""
    shown, wanted = select(data, model=model, series=series), 0.8 * capacity(data, model, _BEST["strict"], "strict")
    return float(shown[what].iloc[(shown["rate"] - wanted).abs().argmin()])


def objective(data: pd.DataFrame, model: str, slo: str) -> float:
    """The objective over the time of an iteration of 32 decodes at 4,096 tokens of context."""
    return float(getattr(SERVERS[model], slo) / value(data, "seconds", model=model, series="decodes"))


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Median TTFT and P99 of the gaps against the rate, with the objectives, and capacities."""
    figure, axes = new_figure(2, 3, 5.0)
    for row, (model, server) in zip(axes, SERVERS.items(), strict=True):
        own = select(data, model=model)
        for panel, (what, label) in zip(row, _LABELS.items(), strict=False):
            for index, series in enumerate(SERIES):
                line = select(own, series=series)
                panel.plot(line["rate"], line[what], label=series, **line_style(index))
            panel.set(title=model, xlabel="request rate [requests/s]", ylabel=label, yscale="log")
        for limit in (server.strict, server.relaxed):
            row[1].axhline(limit, color="#555555", linewidth=0.7, label="objectives")
        for panel in row[:2]:
            label_log(panel.yaxis)
        for place, (slo, best) in enumerate(_BEST.items()):
            for index, series in enumerate(["vLLM", "Orca", best]):
                color = line_style(list(SERIES).index(series))["color"]
                row[2].bar(4 * place + index, capacity(data, model, series, slo), color=color)
        row[2].set_xticks([1, 5], [f"strict, {server.strict:g} s", f"relaxed, {server.relaxed:g} s"])
        row[2].set(title=f"{model}, capacity", ylabel="requests/s")
    legend(figure, axes[0][:2], last="objectives")
    return figure
