"""Past-Future admission (ASPLOS 2025) in the simulator of its artifact: steps, use of the KV cache, evictions.

3,000 requests, 120,000 tokens of KV cache, outputs of at most 4,096 tokens as far as policies know, a history of 500 outputs of 512
tokens. Requests are admitted before every tenth decode step; their prompts are computed beside that step, and cost none of their
own, as there. As there, counting ends when the last request is admitted.
"""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cbatch import CostFunction, Engine, Plan, Request, View
from experiments.plots.style import new_figure
from policies.past_future import ADMISSIONS, PastFuture
from policies.predictors import Oracle
from policies.shared.future_memory import most_held
from reproduction.papers.claims import Claim
from reproduction.papers.frames import pivot, select
from reproduction.papers.jobs import Figures, run_jobs, serve_on
from reproduction.papers.machines import Machines
from reproduction.parts import grouped_bars, legend, mark_printed

MEMORY, LIMIT, INTERVAL, NUM_REQUESTS = 120_000, 4096, 10, 3000
LENGTHS = {"D1": ((32, 4096), (2048, 4096)), "D2": ((3000, 5000), (3000, 5000)), "D3": ((2048, 4096), (32, 4096))}
"""The least and the most tokens of prompts and of outputs, drawn uniformly."""
PANELS = {"steps": "decode steps [1,000]", "use": "mean use [%]", "peak": "peak to come [%]", "evicted": "evicted [%]"}
_MARK = "the artifact's simulator, run again"


class Tenth(PastFuture):
    """Admits before every tenth step, and notes until when requests wait, and what those admitted will hold at most."""

    def __init__(self, admission: str) -> None:
        reserve = 0.0 if admission == "optimum" else 0.03
        super().__init__(admission, reserve=reserve, draws=5, history=[512] * 500)
        self.steps, self.peaks = 0, list[float]()
        self._true = Oracle()

    def plan(self, view: View) -> Plan:
        if view.iteration % INTERVAL:
            plan = view.plan()
            plan.add_decodes(preempt_newest=True)
            return plan.build()
        made = super().plan(view)
        if view.waiting:
            held = [*({*view.running, *made.requests} - {*made.preempt})]
            left = [self._true.remaining(request) for request in held]
            self.steps = view.iteration
            self.peaks.append(most_held([request.num_tokens for request in held], left))
        return made


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: lengths, admission, steps, and in percent use and peak (of the KV cache) and evicted (of those ended)."""
    return run_jobs(run, [{"lengths": name, "admission": rule} for name in LENGTHS for rule in ADMISSIONS])


def run(lengths: str, admission: str, num_requests: int = NUM_REQUESTS) -> Figures:
    """One row of the artifact's table."""
    prompts, outputs = LENGTHS[lengths]
    random, limit = Random(0), max(LIMIT, outputs[1])
    drawn = [(random.randint(*prompts), random.randint(*outputs)) for _ in range(num_requests)]
    requests = [Request(i, prompt, limit, true_new_tokens=output) for i, (prompt, output) in enumerate(drawn)]
    policy, used, evicted = Tenth(admission), list[int](), list[int]()

    def note(engine: Engine) -> None:
        used.append(engine.record.steps[-1].kv_blocks_used)
        evicted.append(engine.record.steps[-1].num_preempted)
        engine.record.steps.clear()  # hundreds of thousands of rows that are not used
        engine.record.receivers.clear()

    serve_on(CostFunction(lambda shape: 1.0), policy, requests, memory=MEMORY, tokens=32_768 + limit, on_step=note)
    ended = sum((request.finished_at or 0.0) <= policy.steps for request in requests)
    return {
        "steps": policy.steps,
        "use": 100 * float(np.mean(used[: policy.steps])) / MEMORY,
        "peak": 100 * float(np.mean(policy.peaks)) / MEMORY,
        "evicted": 100 * sum(evicted[: policy.steps]) / ended,
    }


def row_error(
    data: pd.DataFrame, lengths: str, admission: str, steps: float, use: float, peak: float, evicted: float
) -> float:
    """The largest difference from a row of the table, in units of what is allowed: 1% of the steps, 1 point of the others."""
    ours = select(data, lengths=lengths, admission=admission).iloc[0]
    points = (abs(ours["use"] - use), abs(ours["peak"] - peak), abs(ours["evicted"] - evicted))
    return float(max(*points, 100 * abs(ours["steps"] / steps - 1)))


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each column of the table, bars of each rule; the artifact's values as marks."""
    figure, [panels] = new_figure(1, len(PANELS), 2.6)
    for panel, (what, label) in zip(panels, PANELS.items(), strict=True):
        factor = 1e-3 if what == "steps" else 1.0
        table = factor * pivot(data, "lengths", "admission", what)
        bars = grouped_bars(panel, table, width=0.2)
        rows = [claim.setting for claim in printed if claim.quantity == row_error.__name__]
        places = [bars[row["admission"]][[*table.index].index(row["lengths"])] for row in rows]
        points = zip(places, (factor * row[what] for row in rows), strict=True)
        mark_printed(panel, points, markersize=3, label=_MARK)
        panel.set(ylabel=label)
    legend(figure, panels[:1], ncols=5, last=_MARK)
    return figure
