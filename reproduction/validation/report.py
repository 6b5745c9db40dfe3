"""What is printed of a comparison."""

from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from reproduction.validation.compare import CLOSED, KINDS, RANK, RANKS, TARGETS, is_within, judged


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


def _within_line(result: Mapping[str, Any]) -> str:
    figures, runs = result["within"]["all figures"], result["within"]["all runs"]
    targets = f"{RANKS['mean']:.0%} of means and medians, {RANKS['P99']:.0%} of P90 and P99, or {RANK} percentiles"
    found = f"{figures[0]} of {figures[1]} figures, all of them in {runs[0]} of {runs[1]} runs"
    return f"within target ({targets}): {found}"
