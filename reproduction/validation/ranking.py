"""How often simulation picks the winner of the real runs, over all pairs of settings that one card served, and what trusting it costs.

    python -m reproduction.validation ranking

It needs no GPU: measured and simulated figures are those of the files in `measured`. Three tables: pairs of policies at equal load, by how far
apart they were measured; the same pairs by figure; pairs that differ in load, too. Then the errors of the simulated ratio in every figure,
of the pairs with arrivals; then of those whose simulated iterations all fitted captured graphs. A pair is decided if it differs by more than the noise: the
largest difference between repeats of one setting, by the same card or another. Without repeats the noise is unknown, and no pair is decided.
Simulation names a winner if it stays the winner when all iteration times of either run change by up to 1%. The regret is the measured figure of the
setting that simulation prefers over the better one's, minus 1; it counts undecided pairs, too.

The baseline, `elsewhere`, needs no simulation: it names the policy that won most pairs of these two policies in other sessions, a session being a
card and a file; `other loads` also leaves out pairs of the same load and requests there, which another session has merely repeated.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reproduction import RESULTS
from reproduction.validation.compare import CLOSED, card_of, in_graphs

FILES = (
    *(f"h100/{name}" for name in ("ranked", "other-card", "code", "held_out", "newer-kernels", "sessions")),
    *(f"h200/{name}" for name in ("ranked", "code", "code-150", "code-card", "code-slow")),
    *(f"h200/{name}" for name in ("batch-32", "batch-32-code", "batch-128")),
    *(f"h200/received-{name}" for name in ("chats", "code", "chats-pairs", "code-pairs")),
    *(f"h200/held_out{end}" for end in ("", "-batches", "-qwen3-8b", "-synchronous")),
    *(f"h200/capacity{end}" for end in ("-90", "", "-bracket")),
)
FIGURES = {"TTFT mean", "TTFT P99", "TPOT mean", "TPOT P99", "end to end mean", "end to end P99"}
"""Each is better if it is smaller."""

SEPARATIONS = (0.01, 0.02, 0.05, 0.1)
BASELINES = ("elsewhere", "other loads")
_JOBS = ("busy", "turn")  # the times of a session without its pauses, and of its turns
_RATIOS = ("TTFT", "TPOT", "TBT", "end to end", *_JOBS)
_SHARES = ("noise", "regret", "regret of named")


def main(measured: tuple[str, ...] = ()) -> None:
    """Prints the table. measured: files that `fidelity`, `capacity` and `sessions` wrote; none: `FILES`."""
    paths = measured or [f"{RESULTS}/{name}.json" for name in FILES]
    files = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    found = pairs(files)
    alone = found[found["what"] == "policy"]
    sessions, policies = (alone[name].nunique() for name in ("session", "policies"))
    number = alone.groupby("figure").size().max()
    print(
        f"{policies} pairs of policies at equal load, served in {sessions} sessions: {number} pairs of runs, each by up to six figures"
    )
    apart = pd.cut(alone["apart"], [0, *SEPARATIONS, np.inf], right=False).rename("apart")
    kinds: dict[str, Any] = {"figure": "size", **dict.fromkeys(("right", *BASELINES), "mean")}
    kinds |= {"decided": "sum", "same": "sum", "named": "sum", "named right": "sum"}
    for part in (alone, alone[alone["named"]]):
        print(_text(part.groupby(apart, observed=True).agg(kinds), ["right", *BASELINES]))
        print(_text(part.groupby("what").agg(kinds), ["right", *BASELINES]))
    counted: dict[str, Any] = {"noise": "max", "apart": "size", "decided": _count, "same": _count, "regret": "max"}
    counted |= {"named": "sum", "named right": "sum", "regret of named": "max"}
    rows = [found.groupby(keys).agg(counted) for keys in (["what", "figure"], "what")]
    print(_text(rows[0].loc[["policy"]], _SHARES), _text(rows[1], _SHARES), sep="\n")
    for cases in (dict, in_graphs):
        print(_text(ratio_errors({"cases": cases(_cases(kept))} for kept in files), ["median", "largest"]))


def _count(values: "pd.Series[Any]") -> Any:
    """Returns how many values are true; NaN if none is known."""
    return values.sum(min_count=1)


def _text(table: pd.DataFrame, shares: Sequence[str]) -> str:
    """Returns a table as text, with a dash for what is unknown."""
    shown = table.rename(columns={"apart": "pairs", "figure": "pairs"})
    for name in shown:
        form = "{:.1%}" if name in shares else "{:,.0f}"
        shown[name] = ["-" if pd.isna(value) else form.format(value) for value in shown[name]]
    return shown.to_string()


def pairs(files: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns a row for every figure of every two settings of a card.

    Columns: session, workload, policies, what (in what they differ), figure, noise, apart (the larger over the smaller, minus 1), decided, right
    (the winner, by simulation), same (right, of a decided pair), regret; named (a winner, by simulation), named right, regret of named;
    elsewhere, other loads (right, by the baseline; NaN if it has no winner). noise, decided and same are NaN without repeats.
    """
    columns = ["file", "card", "workload", "policy", "figure", "measured", "simulated", "low", "high"]
    runs = pd.DataFrame([(file, *run) for file, kept in enumerate(files) for run in served(kept)], columns=columns)
    repeats = runs.groupby(["file", "workload", "policy", "figure"])["measured"]
    noise = (repeats.max() / repeats.min() - 1)[repeats.size() > 1].groupby("figure").max()
    runs = runs.assign(place=runs.index)
    both = runs.merge(runs, on=["file", "card", "figure"], suffixes=("", "_other")).query("place < place_other")
    real, virtual = (both[kind] / both[f"{kind}_other"] for kind in ("measured", "simulated"))
    apart, right = real.where(real > 1, 1 / real) - 1, (real < 1) == (virtual < 1)
    load, policy = (both[key] != both[f"{key}_other"] for key in ("workload", "policy"))
    what = np.where(load & policy, "load and policy", np.where(load, "load", "policy"))
    limit = both["figure"].map(noise)
    session, policies = both["file"].astype(str) + " " + both["card"], _either(both["policy"], both["policy_other"])
    found = both[["figure", "workload"]].assign(session=session, policies=policies, what=what, noise=limit, apart=apart)
    decided = (apart > limit).astype(float).where(limit.notna())
    found = found.assign(right=right, decided=decided, same=decided * right, regret=np.where(right, 0.0, apart))
    named = (both["high"] < both["low_other"]) | (both["low"] > both["high_other"])
    more = {"named right": named & right, "regret of named": found["regret"].where(named, 0.0)}
    won = np.where((real < 1) == (both["policy"] < both["policy_other"]), 1, -1)
    return found.assign(
        named=named, **more, **_elsewhere(found[found["what"] == "policy"].assign(won=won[what == "policy"]))
    )


def ratio_errors(files: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns the errors of the simulated ratio of two policies, or settings of one, that one card served with equal arrivals, by figure, and throughput and total time also of queued requests; repeats are left out.

    The error is the larger of simulated over real ratio and its inverse, minus 1: the same whichever of the two is the baseline.
    """
    rows, cases = list[tuple[str, float]](), defaultdict[tuple[int, str], list[Mapping[str, Any]]](list)
    for file, kept in enumerate(files):
        for name, policies in _cases(kept).items():
            for policy, run in policies.items() if ", again" not in name else ():
                cases[file, name.replace(f", {policy}", "")].append(run)
    for runs in cases.values():
        for one, other in combinations(runs, 2):
            chosen = (*CLOSED, *_RATIOS) if None not in (one["load"], other["load"]) else (*CLOSED,)
            for figure in (figure for figure in one["measured"] if figure.startswith(chosen)):
                real, virtual = (one[kind][figure] / other[kind][figure] for kind in ("measured", "simulated"))
                rows.append((figure, max(virtual / real, real / virtual) - 1))
    errors = pd.DataFrame(rows, columns=["figure", "error"]).groupby("figure", sort=False)["error"]
    return pd.DataFrame({"pairs": errors.size(), "median": errors.median(), "largest": errors.max()})


def job_cases(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the runs of a file that `jobs` wrote as cases, by policy, with the times of sessions and turns."""
    cases = defaultdict[str, dict[str, Any]](dict)
    for run in content["runs"]:
        times = {
            kind: {name.replace(" p", " P"): value for name, value in run[kind].items() if name.startswith(_JOBS)}
            for kind in ("measured", "simulated")
        }
        cases[f"{run['workload']}, {run['kv_tokens']}"][run["policy"]] = {"load": "closed", **times}
    return {"cases": cases}


def _either(first: "pd.Series[str]", second: "pd.Series[str]") -> list[str]:
    """Returns the name of each pair of policies, in either order."""
    return [" | ".join(sorted(pair)) for pair in zip(first, second, strict=True)]


def _elsewhere(found: pd.DataFrame) -> dict[str, "pd.Series[float]"]:
    """Returns whether the baselines are right about each pair. won: 1 if the policy that comes first in the alphabet won, otherwise -1."""
    pair = ["policies", "figure"]
    total, here, load, same = (
        found.groupby([*pair, *more])["won"].transform("sum")
        for more in ((), ("session",), ("workload",), ("session", "workload"))
    )
    others = (total - here, total - here - load + same)
    return {
        name: (wins * found["won"] > 0).astype(float).where(wins != 0)
        for name, wins in zip(BASELINES, others, strict=True)
    }


def served(content: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    """Yields the card, the workload and its load, the policy, and each figure's name, of a file's runs; its measured and simulated value,
    and the lowest and highest that is simulated if all iteration times change by up to 1%."""
    if "runs" in content:
        for run in content["runs"]:
            workload = f"{run['load']}, {run['cache over working set']}"
            yield from _figures(("1", workload, f"{run['policy']}, {run['eviction']}"), run)
        return
    for name, policies in _cases(content).items():
        case, card = card_of(name)
        for policy, run in policies.items():
            workload = case.removesuffix(", again").replace(policy, "its capacity")
            yield from _figures((f"{card}, {run.get('loop')}, {run['model']}", workload, policy), run)


def _cases(content: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Returns the runs of each case of a file, by policy; none of a file of sessions."""
    cases: Mapping[str, Mapping[str, Any]] = content.get("errors", {}).get("profile", content).get("cases", {})
    return cases


def _figures(setting: tuple[str, str, str], run: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    kinds = ("measured", "simulated", "error_range")
    real, virtual, ranges = ({name.replace(" p", " P"): value for name, value in run[kind].items()} for kind in kinds)
    for name in real.keys() & FIGURES:
        yield *setting, name, real[name], virtual[name], *(real[name] * (1 + error) for error in ranges[name])
