"""Describes a capacity in full or in a line, and the capacities of a sweep as a table."""

from pathlib import Path

from tabulate import tabulate

from experiments.capacity.folder import read_searches
from experiments.report.notes import notes_of
from experiments.report.text import Summary, format_share
from experiments.report.titles import title_of


def capacity_text(summary: Summary) -> str:
    """Returns the full description of a capacity."""
    about, figures = summary["about"], summary["capacity"]
    latencies = " and ".join(f"{key} {limit:g} s" for key, limit in figures["slo"].items() if limit is not None)
    holds = f"attainment of {format_share(figures['attainment'])}" + (f"; {latencies}" if latencies else "")
    rows = [("capacity", f"{interval(figures)}, 95% interval, {_replications(figures)}"), ("holds", holds)]
    for pool, of in about.get("pools", {"": about}).items():
        most = f"batches of {of['limits']['batch']}, iterations of {of['limits']['tokens']:,} tokens, at most"
        rows.append((f"limits {pool}".strip(), most))
    if warmup := figures["warmup_requests"]:
        ends = "first" if "sessions" in figures else "first and last"
        rows.append(("counted", f"all but the {ends} {warmup:,} requests of a replication"))
    if regret := summary.get("regret"):
        bound = f"{regret['rate_bound']:.4g} requests/s, the most that can be sustained"
        rows.append(("of the bound", f"{_of_bound(regret)}, which is {bound}"))
    took = f"{about['wall_seconds']:.0f} s, {figures['cpu_seconds']:.0f} s of CPU"
    rows.append(("took", f"{took} for {figures['simulations']} simulations, including any kept from before"))
    curve = summary["curves"]["attainment"]
    columns = (curve[name] for name in ("rate", "replications", "share", "low", "high"))
    shares = [
        (f"{rate:.4g}", number, f"{100 * share:.2f}% [{100 * low:.2f}, {100 * high:.2f}]")
        for rate, number, share, low, high in zip(*columns, strict=True)
    ]
    heads = [capacity_of(figures)[1], "replications", "attainment"]
    at_rates = tabulate(shares, heads, disable_numparse=True, stralign="right")
    figures_of_all = tabulate(rows, tablefmt="plain", disable_numparse=True)
    return "\n".join([title_of(about), *notes_of([about]), "", figures_of_all, "", at_rates])


def _replications(figures: Summary) -> str:
    return f"{figures['replications']} replications of {figures['requests']:,} requests"


def interval(figures: Summary) -> str:
    """Returns a capacity with its interval."""
    low, (rate, unit), high = figures["low"], capacity_of(figures), figures["high"]
    return f"{rate:.4g} [{low:.4g}, {high:.4g}] {unit} (±{100 * (high - low) / 2 / rate:.2g}%)"


def capacity_of(figures: Summary) -> tuple[float, str]:
    """Returns a capacity and its unit."""
    if "sessions" in figures:
        return figures["sessions"], "sessions"
    return figures["requests_per_second"], "requests/s"


def _of_bound(regret: Summary | None) -> str:
    if regret is None:
        return "-"
    low, high = (format_share(regret[f"capacity_{end}"]) for end in ("low", "high"))
    return f"{format_share(regret['capacity'])} [{low}, {high}]"


def capacity_line(name: str, summary: Summary) -> str:
    """Returns a search of a sweep in one line."""
    return f"{name}: {interval(summary['capacity'])}"


def capacity_table(root: Path) -> str:
    """Returns the capacities in and below a folder, in the order of the sweep, and the command that compares several."""
    from experiments.report.labels import label_runs  # loads pandas

    runs = read_searches(root)
    several = runs["label"].nunique() > 1
    compared = f"\ndifferences and their intervals: python -m experiments.compare {root}" if several else ""
    runs = runs.assign(label=label_runs(runs, apart=True))
    rows = [
        (label, interval(summary["capacity"]), _of_bound(summary.get("regret")), _replications(summary["capacity"]))
        for label, summary in zip(runs["label"], runs["summary"], strict=True)
    ]
    heads = ["search", "capacity, 95% interval", "of the bound", "from"]
    table = tabulate(rows, heads, disable_numparse=True)
    return "\n".join([table, *notes_of(summary["about"] for summary in runs["summary"])]) + compared
