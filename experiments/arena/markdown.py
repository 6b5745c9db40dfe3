"""The leaderboard as a Markdown page."""

from collections.abc import Sequence
from statistics import fmean

from tabulate import tabulate

from experiments.arena.rows import Board, Capacity, Row
from experiments.store.text import format_mean

Table = tuple[Sequence[str], list[list[str]]]

READING = (
    "Load: the request rate over the highest that any policy can sustain (B3). attained: share of the requests that meet all "
    "of their objectives, mean ± half of the 95% interval over replications; bold: cannot be told apart from the best policy of "
    "the cell, paired by replication, which is weak evidence with few. latency / bound: mean end-to-end latency over what no "
    "policy can beat (B6). The ranking's means have no interval."
)


def page(board: Board, title: str) -> str:
    """The whole page."""
    parts = [f"# {title}", READING]
    if board.rows:
        parts += ["## Ranking", _markdown(ranking(board.rows))]
    for trace, slo in dict.fromkeys((row.trace, row.slo) for row in board.rows):
        own = [row for row in board.rows if (row.trace, row.slo) == (trace, slo)]
        parts += [f"## {trace}, {slo}", _markdown(_cells(own))]
    if board.capacities:
        parts += ["## Capacities", _markdown(capacities(board.capacities))]
    return "\n\n".join([*parts, *board.notes]) + "\n"


def ranking(rows: Sequence[Row]) -> Table:
    """A row per policy: means over the cells that all policies have, the highest attainment first."""
    found: dict[str, dict[tuple[str, str, float], Row]] = {}
    for row in rows:
        found.setdefault(row.policy, {})[row.trace, row.slo, row.load] = row
    common = set.intersection(*(set(cells) for cells in found.values()))
    by_policy = {policy: [cells[key] for key in common] for policy, cells in found.items()} if common else {}
    lines = [
        (
            -fmean(row.share for row in own),
            [
                policy,
                f"{100 * fmean(row.share for row in own):.1f}",
                f"{sum(row.best for row in own)} of {len(own)}",
                f"{fmean(row.figures['regret.latency'].mean for row in own):.2f}",
            ],
        )
        for policy, own in by_policy.items()
    ]
    heads = ["policy", "attained [%]", "not told apart from the best in", "latency / bound"]
    return heads, [line for _, line in sorted(lines)]


def _cells(rows: Sequence[Row]) -> Table:
    """A row per policy, two columns per load."""
    loads: dict[float, set[str]] = {}
    for row in sorted(rows, key=lambda row: row.load):
        loads.setdefault(row.load, set()).add(f" ({row.rate:.3g}/s)")
    policies = dict.fromkeys(row.policy for row in sorted(rows, key=lambda row: (-row.load, -row.share)))
    by_place = {(row.policy, row.load): row for row in rows}
    heads = ["policy"]
    for load, rates in loads.items():
        heads += [f"attained [%], load {load:g}{rates.pop() if len(rates) == 1 else ''}", "latency / bound"]
    lines = []
    for policy in policies:
        line = [policy]
        for load in loads:
            line += _pair(by_place.get((policy, load)))
        lines.append(line)
    return heads, lines


def _pair(row: Row | None) -> list[str]:
    """The two columns of a cell."""
    if row is None:
        return ["-", "-"]
    attained = format_mean(row.figures["attainment.share"].times(100))
    return [f"**{attained}**" if row.best else attained, format_mean(row.figures["regret.latency"])]


def capacities(found: Sequence[Capacity]) -> Table:
    """A row per capacity."""
    heads = ["trace", "SLO", "policy", "capacity [requests/s], 95% interval", "of the bound [%]"]
    lines = [
        [
            each.trace,
            each.slo,
            each.policy,
            f"{each.rate:.4g} [{each.low:.4g}, {each.high:.4g}]",
            "-" if each.of_bound is None else f"{100 * each.of_bound:.1f}",
        ]
        for each in found
    ]
    return heads, lines


def _markdown(table: Table) -> str:
    heads, lines = table
    aligned = ["left", *["right"] * (len(heads) - 1)]
    return tabulate(lines, heads, tablefmt="github", colalign=aligned if lines else None, disable_numparse=True)
