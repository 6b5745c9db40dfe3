"""How often simulation names the winner that reality names, over all pairs of settings that one card served, and what trusting it costs.

    python -m reproduction.validation ranking

It needs no GPU: measured and simulated figures are those of the files in `measured`. A pair is decided if it differs by more than the noise: the
largest difference between cards that served the same setting. The regret is the measured figure of the setting that simulation prefers over the
better one's, minus 1; it counts undecided pairs, too.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from reproduction import RESULTS
from reproduction.validation.compare import card_of

FILES = (
    *("h100/held_out", "h100/sessions", "h200/held_out", "h200/held_out-batches", "h200/held_out-qwen3-8b"),
    *("h200/held_out-synchronous", "h200/capacity-90", "h200/capacity", "h200/capacity-bracket"),
)
FIGURES = ("TTFT mean", "TTFT P99", "TPOT mean", "TPOT P99", "end to end mean", "end to end P99")
"""Each is better if it is smaller."""


class Served(NamedTuple):
    """A setting that one card served: its workload and load, its policy, and the figures by kind, measured and simulated."""

    workload: str
    policy: str
    measured: Mapping[str, float]
    simulated: Mapping[str, float]


class Pair(NamedTuple):
    """Two settings on one card. what: in what they differ. apart: measured, of the larger over the smaller, minus 1."""

    figure: str
    what: str
    apart: float
    same: bool

    @property
    def regret(self) -> float:
        return 0.0 if self.same else self.apart


def main(measured: tuple[str, ...] = ()) -> None:
    """Prints the table. measured: files that `fidelity`, `capacity` and `sessions` wrote; none: `FILES`."""
    paths = measured or [f"{RESULTS}/{name}.json" for name in FILES]
    files = [[*served(json.loads(Path(path).read_text(encoding="utf-8")))] for path in paths]
    noise, found = noise_of(files), [pair for file in files for card in file for pair in pairs(card)]
    rows = list[tuple[Any, ...]]()
    for what in ("policy", "load or batch", "load or batch, and policy"):
        for figure in FIGURES:
            of = [pair for pair in found if (pair.what, pair.figure) == (what, figure)]
            if of:
                rows.append((what, figure, noise[figure], *counts(of, noise)))
    rows.append(("all", "", "", *counts(found, noise)))
    heads = ["settings that differ in", "figure", "noise", "pairs", "decided", "same winner", "share", "largest regret"]
    print(tabulate(rows, heads, floatfmt=("", "", ".1%", "", "", "", ".1%", ".1%")))


def served(content: Mapping[str, Any]) -> Iterable[list[Served]]:
    """Yields the settings of each card in a file."""
    if "runs" in content:
        yield [
            Served(
                f"{run['load']}, {run['cache over working set']}", f"{run['policy']}, {run['eviction']}", *_figures(run)
            )
            for run in content["runs"]
        ]
        return
    cards = defaultdict(list)
    for name, policies in content.get("errors", {}).get("profile", content)["cases"].items():
        case, card = card_of(name)
        for policy, run in policies.items():
            loop, workload = run.get("loop"), case.removesuffix(", again").replace(policy, "its capacity")
            cards[card, loop, run["model"]].append(Served(workload, policy, *_figures(run)))
    yield from cards.values()


def _figures(run: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    measured, simulated = (
        {name.replace(" p", " P"): value for name, value in run[kind].items()} for kind in ("measured", "simulated")
    )
    return measured, simulated


def noise_of(files: Iterable[Iterable[Iterable[Served]]]) -> dict[str, float]:
    """Returns the largest relative difference between cards of a file that served the same setting, by figure."""
    repeats = defaultdict(list)
    for file, cards in enumerate(files):
        for setting in chain.from_iterable(cards):
            repeats[file, setting.workload, setting.policy].append(setting.measured)
    several = [each for each in repeats.values() if len(each) > 1]
    return {
        figure: max(
            (_spread(values) for each in several if (values := [one[figure] for one in each if figure in one])),
            default=0.0,
        )
        for figure in FIGURES
    }


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values) - 1


def pairs(card: Iterable[Served]) -> Iterable[Pair]:
    """Yields every two settings of a card, for each figure that both have."""
    for first, second in combinations(card, 2):
        kinds = ["load or batch"] * (first.workload != second.workload) + ["policy"] * (first.policy != second.policy)
        for figure in FIGURES:
            if figure in first.measured and figure in second.measured:
                real, virtual = (
                    getattr(first, kind)[figure] / getattr(second, kind)[figure] for kind in ("measured", "simulated")
                )
                yield Pair(figure, ", and ".join(kinds), max(real, 1 / real) - 1, (real < 1) == (virtual < 1))


def counts(found: Iterable[Pair], noise: Mapping[str, float]) -> tuple[int, int, int, float, float]:
    """Returns the pairs, those decided, those of them whose winner simulation names, their share, and the largest regret of all pairs."""
    every = [*found]
    decided = [pair for pair in every if pair.apart > noise[pair.figure]]
    same = sum(pair.same for pair in decided)
    return len(every), len(decided), same, same / max(len(decided), 1), max(pair.regret for pair in every)
