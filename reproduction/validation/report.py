"""What is printed of a comparison, and what a profile says of its error."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from experiments.store.provenance import today
from reproduction.validation.compare import CLOSED, KINDS, RANK, RANKS, TARGETS, is_within, judged

BRIEF = ("mean", "P50", "P90", "P99")
"""Figures by the ends of their names; the largest error of each is printed with each simulated result."""


def show(result: dict[str, Any]) -> None:
    """Prints the figures of each run with their errors, and a summary of the errors."""
    for case, policies in result["cases"].items():
        model = next(iter(policies.values()))["model"]
        print(f"\n{case}: {model}; measured, and the error of simulation")
        columns = [*CLOSED, *(f"{kind} {rank}" for kind in KINDS for rank in RANKS)]
        cells = {
            name: [f"{found['measured'][column]:,.4g} {found['error'][column]:+.1%}" for column in columns]
            for name, found in policies.items()
        }
        print(tabulate([*zip(columns, *cells.values(), strict=True)], ["", *cells], disable_numparse=True))
    rows = []
    for name, target in TARGETS.items():
        if name in result["median_error"]:
            runs = judged(result["cases"], name)
            missed = sum(not is_within(name, target, found) for _, found in runs)
            errors = (result["median_error"][name], result["largest_error"][name], target)
            rows.append((name, *(f"{error:.1%}" for error in errors), f"{missed} of {len(runs)}"))
    print(f"\n{tabulate(rows, ['error', 'median', 'largest', 'target', 'missed by'], disable_numparse=True)}")
    for card, kinds in result["cards"].items():
        errors_of_card = ", ".join(f"{kind} {error:+.1%}" for kind, error in kinds.items())
        print(f"  card {card}: all iterations, predicted one by one: {errors_of_card}")
    print(f"  {_within_line(result)}")
    for name, found in result.get("at_card_speed", {}).items():
        print(f"  {name} at the speed of the card: {found['median']:.1%} (at most {found['largest']:.1%})")


def error_line(result: Mapping[str, Any], command: str) -> str:
    """Returns the text of a profile's `error`, which names the commits of the runtime that served the real runs."""
    found = _runs(result)
    models = sorted({run["model"] for run in found})
    median, most, by_card = result["median_error"], result["largest_error"], result["cards"]
    errors = ", ".join(f"{name} {error:.1%} (at most {most[name]:.1%})" for name, error in median.items())
    queued = sum(run["load"] is None for run in found)
    num_cards = len({origin.get("card", number) for number, origin in enumerate(result["measured"])})
    runs = f"against {len(found)} real runs of {' and '.join(models)} on {num_cards} card{'s' * (num_cards > 1)}"
    traces = list(dict.fromkeys(card["trace"].split(".")[0] for card in result["measured"] if "trace" in card))
    where = [_conditions(found), f"{queued} of {len(found)} queued", *(f"lengths of {trace}" for trace in traces)]
    runs += f" ({'; '.join(where)})"
    if commits := list(dict.fromkeys(card["commit"] for card in result["measured"] if card.get("commit"))):
        runs += f" by the runtime of {' and '.join(commits)}"
    errors += f"; {_within_line(result)}"
    kinds = list(dict.fromkeys(kind for kinds in by_card.values() for kind in kinds))
    off = {kind: [kinds[kind] for kinds in by_card.values() if kind in kinds] for kind in kinds}
    spread = ", ".join(f"{kind} {min(found):+.1%} to {max(found):+.1%}" for kind, found in off.items())
    return f"{runs}, median error: {errors}; iterations, by card: {spread}; {command}, {today()}"


def _conditions(runs: Sequence[Mapping[str, Any]]) -> str:
    """In which batches and at which shares of the capacity these runs were served: "batch 48, load 45-90%"."""
    loads = [round(100 * run["load"]) for run in runs if run["load"] is not None]
    return f"batch {_span(run['batch'] for run in runs)}, {f'load {_span(loads)}%' if loads else 'queued'}"


def _span(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return "-".join(map(str, found[:: max(len(found) - 1, 1)]))


def _within_line(result: Mapping[str, Any]) -> str:
    figures, runs = result["within"]["all figures"], result["within"]["all runs"]
    targets = f"{RANKS['mean']:.0%} of means and medians, {RANKS['P99']:.0%} of P90 and P99, or {RANK} percentiles"
    found = f"{figures[0]} of {figures[1]} figures, all of them in {runs[0]} of {runs[1]} runs"
    return f"within target ({targets}): {found}"


def brief_error(result: Mapping[str, Any]) -> str:
    """Returns the text of `cbatch.sim.provenance.Compared.brief`: the largest errors, and for which batches and loads."""
    errors = [
        f"{end} {max(sizes):.0%}"
        for end in BRIEF
        if (sizes := [error for name, error in result["largest_error"].items() if name.endswith(f" {end}")])
    ]
    return f"largest error: {', '.join(errors)}; {_conditions(_runs(result))}"


def _runs(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [run for policies in result["cases"].values() for run in policies.values()]
