"""Decodes with drafts of n-grams or of a smaller model: served on a GPU, and simulated from its profile with the survivals that were measured.

    python -m reproduction.validation drafts hardware=h200                                             # on a GPU
    python -m reproduction.validation drafts draft_model=llama-3.2-1b drafts=0,1,2,3                   # a model that is wrong after a fifth of all tokens
    python -m reproduction.validation drafts measured=reproduction/results/h200/simulated-drafts.json  # simulates its runs again

The text repeats with misprints (`reproduction/repeating.py`), which decides what is accepted: `simulated` follows the text, with what each request
really accepts, and `drawn` draws from the survivals of the run of the same load and number of drafts, equal for all requests. Two numbers of drafts
are decided if they differ by more than any setting did between repeats.
"""

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cbatch import ModelSpec, Request, Server, Step
from cbatch.drafts import NgramDrafter
from cbatch.results.summary import summarize
from cbatch.sim import load_profile
from cbatch.sim.drafter import SurvivalsDrafter
from experiments.profile.machine import hardware_name
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.repeating import Text, continue_text, make_model, right_drafts
from reproduction.validation.compare import tables_of

SETUP = "model={} policy=sarathi_serve chunking=fixed chunk=1024 max_tokens=2048 batch=128 kv_tokens=147456 block_size=128 drafting=fixed"
REQUESTS = {4: 8, 32: 32, 64: 64, 128: 128}
"""By load: how many run at a time."""
TEXT = Text(0, 512, 512, 0.2)
DRAWS = 4
"""Simulations of each run, with other draws of what is accepted; their figures are averaged."""


class TextDrafter(SurvivalsDrafter):
    """Accepts the drafts that the text decides. right: of `right_drafts`."""

    def __init__(self, right: NDArray[np.int64], drafter: SurvivalsDrafter) -> None:
        super().__init__(alpha=1.0, max_drafts=drafter.max_drafts, model=drafter.model)
        self._right = right

    def draw(self, step: Step, rejected: NDArray[np.int64]) -> NDArray[np.int64]:
        assert step.drafts is not None
        known = step.start + step.num_tokens - step.drafts - rejected
        accepted: NDArray[np.int64] = np.minimum(self._right[step.table.id[step.rows], known], step.drafts)
        return accepted


def server_of(model: str, *keys: str) -> Any:
    settings = compose_run(*SETUP.format(model).split(), *keys)
    return assemble(settings, largest=Request(0, TEXT.prompt + TEXT.new - 1, 1)).server


def figures(server: Server, load: int, k: int, model: str, text: Text = TEXT) -> dict[str, Any]:
    """Serves requests, `load` at a time, with k drafts for each decode, and returns the run's figures."""
    settings = compose_run(*SETUP.format(model).split(), f"drafting.k={k}")
    server = replace(server, limits=replace(server.limits, max_batch=load))
    requests = text._replace(number=text.number or REQUESTS[load]).requests(settings.model.vocab_size)
    engine = server.engine(settings.policy(), requests)
    record = engine.run()
    steps, summary = record.steps, summarize(record, num_blocks=1, max_batch=1, outcomes=engine.state.drafts.counts)
    seconds, alone = steps[-1].done_at, [step for step in steps if not step.num_prefill_tokens]
    device = float(np.median([step.ended - step.started for step in alone]))
    return {
        "tokens_per_second": sum(request.num_output_tokens for request in record.requests) / seconds,
        "tpot_seconds": summary["tpot_seconds"]["mean"],
        "device_ms": 1e3 * device,
        "ms_per_iteration": 1e3 * float(np.median(np.diff([step.started for step in alone]))),
        **{key: summary.get("drafts", {}).get(key) for key in ("acceptance_length", "survivals")},
    }


def main(
    hardware: str = "h200",
    model: str = "llama-3.1-8b",
    backend: str = "cuda",
    loads: tuple[int, ...] = (4, 32, 64, 128),
    drafts: tuple[int, ...] = (0, 1, 3, 5, 7),
    repeats: int = 2,
    draft_model: str = "",
    skips: float = 0.2,
    measured: str = "",
    folder: str = RESULTS,
) -> None:
    """Serves and simulates, prints and writes simulated-drafts.json, or with a draft model simulated-draft-model.json.

    draft_model: a preset; it skips a token after the share `skips` of all tokens. measured: a file of this command, whose runs are simulated again;
    needs no GPU.
    """
    about: dict[str, Any] = {"model": model, "draft_model": draft_model, "skips": skips if draft_model else None}
    if measured:
        kept: dict[str, Any] = json.loads(Path(measured).read_text(encoding="utf-8"))
        rows, device = kept["runs"], kept["hardware"]
        about |= {key: kept[key] for key in about if key in kept}
        about["measured"] = kept.get("measured") or {key: kept[key] for key in ("hardware", "date", "commit")}
        model, draft_model, skips = about["model"], about["draft_model"], about["skips"] or 0.0
    else:
        device = hardware_name(backend)
        rows = [{"load": load, "k": k} for _, load, k in product(range(repeats), loads, drafts)]
    name = "simulated-draft-model" if draft_model else "simulated-drafts"
    most, loads = max(row["k"] for row in rows), tuple({row["load"]: None for row in rows})
    drafter = [f"drafter.max_drafts={most}", *([f"drafter.model={draft_model}"] if draft_model else [])]
    if not measured:
        real = _real_server(model, draft_model, skips, backend, drafter)
        for load, k in product(loads, (0, most)):  # compiles what the first runs would compile
            figures(real, load, k, model, TEXT._replace(number=min(load, 16), new=16))
        for row in rows:
            row["measured"] = figures(real, row["load"], row["k"], model)
            print(row, flush=True)
            write_benchmark(name, device, {**about, "runs": rows}, folder, VALIDATION)
    rows = [row for row in rows if "measured" in row]  # others did not end
    vocabulary = compose_run(*SETUP.format(model).split()).model.vocab_size
    propose = partial(continue_text, skips=skips) if draft_model else NgramDrafter(min_n=1).propose
    texts = {load: TEXT._replace(number=REQUESTS[load]).requests(vocabulary) for load in loads}
    right = {load: right_drafts(requests, propose, most) for load, requests in texts.items()}
    kind = ["drafter=model"] if draft_model else ["drafter=survivals", "drafter.layers=0"]
    for row in rows:
        shares = [*(row["measured"]["survivals"] or {}).values()]
        shares += [0.0] * (most - len(shares))  # graphs are captured for the most drafts
        survivals = f"drafter.survivals={shares}".replace(" ", "")
        keys = ["backend=sim", f"hardware={hardware}", *kind, *drafter, survivals]
        by_text = server_of(model, *keys)
        by_text.executor.drafter = TextDrafter(right[row["load"]], by_text.executor.drafter).on(by_text.executor.cost)
        row["simulated"] = _numbers([figures(by_text, row["load"], row["k"], model)])
        servers = (server_of(model, *keys, f"seed={seed}") for seed in range(DRAWS))
        row["drawn"] = _numbers([figures(server, row["load"], row["k"], model) for server in servers])
    print(report(rows))
    about |= {"profile": hardware, "tables": tables_of(load_profile(hardware)), "runs": rows}
    print(f"written: {write_benchmark(name, device, about, folder, VALIDATION)}")


def _real_server(model: str, draft_model: str, skips: float, backend: str, drafter: list[str]) -> Any:
    """Returns a server of models that write and draft known text, made on its device."""
    kind = ["drafter=model"] if draft_model else ["drafter=ngram", "drafter.min_n=1"]

    def make(spec: ModelSpec, device: Any) -> Any:
        return make_model(replace(spec, tied_embeddings=False), device, skips if spec.name == draft_model else 0.0)

    module = import_module("cbatch.runtime.cpu" if backend == "cpu" else "cbatch.runtime.gpu.build")
    with patch.object(module, "load_model", make):
        return server_of(model, f"backend={backend}", *kind, *drafter)


def _numbers(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {key: fmean(run[key] for run in runs) for key, value in runs[0].items() if type(value) is float}


def report(rows: list[dict[str, Any]]) -> str:
    """Returns figures and errors of each setting, the best numbers of drafts, and how often simulation names the better of two."""
    kinds = ["measured", "simulated", "drawn"]
    runs = pd.DataFrame(
        {"figure": name, "load": row["load"], "k": row["k"], **{kind: row[kind][name] for kind in kinds}}
        for row in rows
        for name in row["simulated"]
    )
    repeats = runs.groupby(["figure", "load", "k"])
    cells = repeats[kinds].mean()
    errors = 100 * (cells.div(cells["measured"], axis=0) - 1)
    noise = (repeats["measured"].max() / repeats["measured"].min() - 1).groupby("figure").max()
    judged = cells.loc[["tokens_per_second", "tpot_seconds"]]
    judged.loc["tpot_seconds"] = 1 / judged.loc["tpot_seconds"].to_numpy()  # the larger is the better
    by_drafts: Any = judged.unstack("k")
    best = by_drafts.stack(0).idxmax(axis=1).unstack()
    pairs = judged.reset_index().merge(judged.reset_index(), on=["figure", "load"]).query("k_x < k_y")
    apart = {kind: pairs[f"{kind}_x"] / pairs[f"{kind}_y"] - 1 for kind in kinds}
    decided = apart["measured"].abs() > pairs["figure"].map(noise)
    right = {kind: int((decided & (apart["measured"] * apart[kind] > 0)).sum()) for kind in kinds[1:]}
    return f"{cells.join(errors[kinds[1:]], rsuffix=' %').round(4).to_string()}\nbest numbers of drafts:\n{best.to_string()}\nnoise: {noise[['tokens_per_second', 'tpot_seconds']].to_dict()}\npairs at equal load: {decided.sum()} decided, right: {right}"
