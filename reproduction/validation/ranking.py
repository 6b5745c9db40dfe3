"""How often simulation names the winner that reality names, over all pairs of settings that one card served, and what trusting it costs.

    python -m reproduction.validation ranking

It needs no GPU: measured and simulated figures are those of the files in `measured`. A pair is decided if it differs by more than the noise: the
largest difference between cards that served the same setting. Simulation names a winner if no change of all iteration times of either run by up to
1% makes them meet. The regret is the measured figure of the setting that simulation prefers over the better one's, minus 1; it counts undecided pairs, too.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reproduction import RESULTS
from reproduction.validation.compare import card_of

FILES = (
    *(f"h100/{name}" for name in ("ranked", "other-card", "code", "held_out", "newer-kernels", "sessions")),
    *(f"h200/held_out{end}" for end in ("", "-batches", "-qwen3-8b", "-synchronous")),
    *(f"h200/capacity{end}" for end in ("-90", "", "-bracket")),
)
FIGURES = {"TTFT mean", "TTFT P99", "TPOT mean", "TPOT P99", "end to end mean", "end to end P99"}
"""Each is better if it is smaller."""


def main(measured: tuple[str, ...] = ()) -> None:
    """Prints the table. measured: files that `fidelity`, `capacity` and `sessions` wrote; none: `FILES`."""
    paths = measured or [f"{RESULTS}/{name}.json" for name in FILES]
    found = pairs([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths])
    counted = {"noise": "max", "apart": "size", "decided": "sum", "same": "sum", "regret": "max"}
    counted |= {"named": "sum", "right": "sum", "regret of named": "max"}
    rows = [found.groupby(keys).agg(counted) for keys in (["what", "figure"], [lambda row: ("all", "")])]
    text = dict.fromkeys(("noise", "regret", "regret of named"), "{:.1%}".format)
    print(pd.concat(rows).rename(columns={"apart": "pairs"}).to_string(formatters=text))


def pairs(files: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns a row for every figure of every two settings of a card.

    Columns: what (in what they differ), figure, noise, apart (the larger over the smaller, minus 1), decided, same (winner, of a
    decided pair), regret; named (a winner, by simulation), right (that winner), regret of named.
    """
    columns = ["file", "card", "workload", "policy", "figure", "measured", "simulated", "low", "high"]
    runs = pd.DataFrame([(file, *run) for file, kept in enumerate(files) for run in served(kept)], columns=columns)
    repeats = runs.groupby(["file", "workload", "policy", "figure"])["measured"]
    noise = (repeats.max() / repeats.min() - 1).groupby("figure").max()
    runs = runs.assign(place=runs.index)
    both = runs.merge(runs, on=["file", "card", "figure"], suffixes=("", "_other")).query("place < place_other")
    real, virtual = (both[kind] / both[f"{kind}_other"] for kind in ("measured", "simulated"))
    apart, right = np.maximum(real, 1 / real) - 1, (real < 1) == (virtual < 1)
    load, policy = (both[key] != both[f"{key}_other"] for key in ("workload", "policy"))
    what = np.where(load & policy, "load and policy", np.where(load, "load", "policy"))
    limit = both["figure"].map(noise)
    found = both[["figure"]].assign(what=what, noise=limit, apart=apart, decided=apart > limit)
    found = found.assign(same=right & found["decided"], regret=np.where(right, 0.0, apart))
    named = (both["high"] < both["low_other"]) | (both["low"] > both["high_other"])
    return found.assign(named=named, right=named & right, **{"regret of named": found["regret"].where(named, 0.0)})


def served(content: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    """Yields the card, the workload and its load, the policy, and each figure's name, of a file's runs; its measured and simulated value,
    and the lowest and highest that is simulated if all iteration times change by up to 1%."""
    if "runs" in content:
        for run in content["runs"]:
            workload = f"{run['load']}, {run['cache over working set']}"
            yield from _figures(("1", workload, f"{run['policy']}, {run['eviction']}"), run)
        return
    for name, policies in content.get("errors", {}).get("profile", content)["cases"].items():
        case, card = card_of(name)
        for policy, run in policies.items():
            workload = case.removesuffix(", again").replace(policy, "its capacity")
            yield from _figures((f"{card}, {run.get('loop')}, {run['model']}", workload, policy), run)


def _figures(setting: tuple[str, str, str], run: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    kinds = ("measured", "simulated", "error_range")
    real, virtual, ranges = ({name.replace(" p", " P"): value for name, value in run[kind].items()} for kind in kinds)
    for name in real.keys() & FIGURES:
        yield *setting, name, real[name], virtual[name], *(real[name] * (1 + error) for error in ranges[name])
