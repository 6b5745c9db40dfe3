"""What is printed of a comparison."""

from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from reproduction.validation.compare import BARS, CLOSED, KINDS, RANK, RANKS, TARGETS, is_within, judged, within_bars

ITERATIONS = ("with prompts", "decodes alone")


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
        for name, found in policies.items():
            parts = (found["iterations"].get(kind) for kind in ITERATIONS)
            cells[name] += [f"{part['seconds']:,.4g} {part['total']:+.1%}" if part else "" for part in parts]
        columns += [f"iterations {kind}, s" for kind in ITERATIONS]
        print(tabulate([*zip(columns, *cells.values(), strict=True)], ["", *cells], disable_numparse=True))
    rows, missed = [], list[tuple[str, ...]]()
    for name, target in TARGETS.items():
        if name in result["median_error"]:
            runs = judged(result["cases"], name)
            outside = [(which, name, found) for which, found in runs if not is_within(name, target, found)]
            missed += [_missed(*each) for each in outside]
            errors = (result["median_error"][name], result["largest_error"][name], target)
            rows.append((name, *(f"{error:.1%}" for error in errors), f"{len(outside)} of {len(runs)}"))
    if missed:
        columns = ["missed", "", "error", "within 1% of speed", "percentile of the simulated run"]
        print(f"\n{tabulate(missed, columns, disable_numparse=True)}")
    print(f"\n{tabulate(rows, ['error', 'median', 'largest', 'target', 'missed by'], disable_numparse=True)}")
    for card, kinds in result["cards"].items():
        errors_of_card = ", ".join(f"{kind} {error:+.1%}" for kind, error in kinds.items())
        print(f"  card {card}: all iterations, predicted one by one: {errors_of_card}")
    print(f"  {_within_line(result)}")
    bars = ", ".join(f"{bar:.0%} ({rank})" for rank, bar in BARS.items())
    print("  all latencies within {}: {} of {} runs".format(bars, *within_bars(result["cases"])))
    for key, whose in (("at_card_speed", "the card"), ("at_own_speed", "the run's own iterations")):
        for name, found in result.get(key, {}).items():
            print(f"  {name} at the speed of {whose}: {found['median']:.1%} (at most {found['largest']:.1%})")


def _missed(run: str, name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a row of a figure outside its target."""
    reached, rank = found.get("error_range", {}).get(name, ()), found["percentile_rank"].get(name)
    within = " to ".join(f"{error:+.1%}" for error in reached)
    return run, name, f"{found['error'][name]:+.1%}", within, f"{rank:.1f}" if rank else ""


def _within_line(result: Mapping[str, Any]) -> str:
    figures, runs = result["within"]["all figures"], result["within"]["all runs"]
    targets = f"{RANKS['mean']:.0%} of means and medians, {RANKS['P99']:.0%} of P90 and P99, or {RANK} percentiles"
    found = f"{figures[0]} of {figures[1]} figures, all of them in {runs[0]} of {runs[1]} runs"
    return f"within target ({targets}): {found}"
