"""VTC (OSDI 2024) on its "real" workload and its synthetic ones: service difference of clients, and the bounds that it proves.

The machine is that of the paper as far as its published measurements of first come, first served show it: each iteration takes the mean
time between two tokens there (Llama-2-7B on an A10G), and the KV cache is as large as what running requests reserve there on average
(the artifact admits by the peak to come, ours reserves whole outputs). What is compared are the other rows, and FCFS's own difference.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from cbatch import CostFunction, Engine, Policy, Request
from cbatch.results.metrics import collect_served
from cbatch.results.service import OUTPUT_WEIGHT, PROMPT_WEIGHT, WINDOW_SECONDS, Service, fairness, service_of
from experiments.settings.compose import compose_run
from policies.past_future import PastFuture
from policies.predictors import Oracle, Predictor
from policies.vtc import VTC
from reproduction.papers.jobs import Figures, run_jobs, serve_on
from reproduction.papers.machines import Machines

ITERATION, MEMORY = 0.045, 13_680
"""Seconds, and tokens of KV cache: of FCFS's logs (see `logged`)."""
REAL = "real"
SUITES = ("overload", "overload_multi", "proportional", "on_off", "poisson", "increase", "shift")
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "FCFS": lambda: PastFuture("conservative"),
    "LCF": lambda: VTC(Predictor(), lift=False),
    "VTC": lambda: VTC(Predictor()),
    "VTC-oracle": lambda: VTC(Oracle(), predict=True),
    "RPM(5)": lambda: PastFuture("conservative"),
}
RPM = 5
FILE = "vtc_real_27clients.csv.gz"


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: suite, policy, and per run the service difference (max, mean), tokens per second, shares of VTC's bounds."""
    jobs = [{"suite": suite, "policy": "VTC", "path": ""} for suite in SUITES]
    jobs += [{"suite": "overload", "policy": "FCFS", "path": ""}]
    if machines.traces is None:
        say(f"left out: the real workload; give traces=FOLDER, which holds {FILE}")
    else:
        path = str(Path(machines.traces) / FILE)
        jobs += [{"suite": REAL, "policy": policy, "path": path} for policy in POLICIES]
    data = run_jobs(run, jobs)
    data = data.assign(path=[Path(each).name for each in data["path"].fillna("")])
    return data if machines.traces is None else pd.concat([data, logged(path)], ignore_index=True)


def logged(path: str) -> pd.DataFrame:
    """The same figures from the latencies that the authors measured; seconds per token and reserved tokens of the machine."""
    table, rows = pd.read_csv(path), []
    arrival, prompts, outputs = (table[name].to_numpy() for name in ("arrival_s", "prompt_tokens", "output_tokens"))
    tokens = prompts + outputs
    for policy in ("fcfs", "vtc"):
        first, last = (arrival + table[f"{policy}_{what}_s"].to_numpy() for what in ("ttft", "latency"))
        service = Service(table["client"].to_numpy(str), arrival, first, last, prompts, outputs)
        gaps = ((last - first) / (outputs - 1))[outputs > 50]
        reserved = [tokens[(first <= time) & (last > time)].sum() for time in np.linspace(50, 550, 200)]
        machine = {"iteration": float(gaps.mean()), "reserved": float(np.mean(reserved))}
        found = {**_differences(service), "tokens": tokens.sum() / last.max(), **machine}
        rows.append({"suite": "logs", "policy": policy.upper(), **found})
    return pd.DataFrame(rows)


def run(suite: str, policy: str, path: str) -> Figures:
    """One workload under one policy."""
    requests = requests_of(suite, path)
    if policy.startswith("RPM"):
        requests = limited(requests, RPM)
    serving, spread = POLICIES[policy](), Spread(requests)
    note = partial(spread.note, serving) if isinstance(serving, VTC) else (lambda engine: None)
    record = serve_on(CostFunction(lambda shape: ITERATION), serving, requests, memory=MEMORY, on_step=note)
    served = collect_served(record)
    service = service_of(record.requests, served)
    assert service is not None
    tokens = float((served.prompt_tokens + served.output_tokens).sum() / served.last_token.max())
    # what the client that received most by then is ahead of the one that received least
    gaps = {f"gap_{second}": float(np.ptp(service.received(np.array([second])))) for second in (175, 350, 500)}
    bound = max(max(request.num_prompt_tokens for request in requests), OUTPUT_WEIGHT * MEMORY)
    pair, any_ = spread.ahead["pair"], spread.ahead["any"]
    shares = {"spread": spread.widest / bound, "pair": pair / (2 * bound), "any": any_ / (4 * bound)}
    return {**_differences(service), "tokens": tokens, "served": len(requests), **gaps, **shares}


def requests_of(suite: str, path: str) -> list[Request]:
    """The requests of a published workload."""
    options = [f"workload.path={path}"] if suite == REAL else []
    return list(compose_run(f"workload=vtc_{suite}", *options).workload.requests(None))


def limited(requests: Sequence[Request], most: int) -> list[Request]:
    """Those that a limit of requests per client and minute lets in: of the last 60 s, those let in count."""
    let_in: dict[str | None, list[float]] = {}
    kept = []
    for request in requests:
        times = let_in.setdefault(request.client, [])
        if sum(time > request.arrival_time - WINDOW_SECONDS for time in times) < most:
            times.append(request.arrival_time)
            kept.append(request)
    return kept


class Spread:
    """How far clients that wait are apart, while a policy runs; in units of service.

    widest: their counters. ahead["pair"], ["any"]: how much more than a waiting client another one has received since any time
    from which on both waited, and from which on the one did.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.widest, self.ahead = 0.0, {"pair": 0.0, "any": 0.0}
        self._clients = sorted({str(request.client) for request in requests})
        self._places = {request.id: self._clients.index(str(request.client)) for request in requests}
        self._prompts = {request.id: request.num_prompt_tokens for request in requests}  # of those without a token
        self._steps = 0
        self._service = np.zeros(len(self._clients))
        self._least = {name: np.full((len(self._clients),) * 2, np.inf) for name in self.ahead}

    def note(self, policy: VTC, engine: Engine) -> None:
        """Look at the state after an iteration."""
        if len(engine.record.receivers) == self._steps:
            return  # the server was idle
        self._steps = len(engine.record.receivers)
        waiting = {str(request.client) for request in engine.view.waiting}
        counters = [counter for client, counter in policy.counters.items() if str(client) in waiting]
        self.widest = max(self.widest, max(counters, default=0.0) - min(counters, default=0.0))
        for id_ in engine.record.receivers[-1].tolist():
            self._service[self._places[id_]] += OUTPUT_WEIGHT + PROMPT_WEIGHT * self._prompts.pop(id_, 0)
        ahead = self._service[:, None] - self._service  # [who received more, who waits]
        waits = np.array([client in waiting for client in self._clients])
        for name, holds in (("pair", waits[:, None] & waits), ("any", waits[None, :].repeat(len(waits), 0))):
            self._least[name] = np.where(holds, np.minimum(self._least[name], ahead), np.inf)
            self.ahead[name] = max(self.ahead[name], float(np.where(holds, ahead - self._least[name], 0.0).max()))


def _differences(service: Service) -> Figures:
    difference = fairness(service)["service_difference"]
    return {"most": difference["max"], "mean": difference["mean"]}
