"""The leaderboard as one self-contained HTML page: curves by plotly, tables that sort by a click and filter by a word."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from string import Template
from typing import Any

import pandas as pd

from cbatch import ConfigError
from experiments.arena.markdown import READING, capacities, ranking
from experiments.arena.rows import Board, Capacity, Row
from experiments.plots.series import coincide_text
from experiments.plots.style import line_style, wrap_origin
from experiments.store.text import format_mean

_ACROSS = 2  # panels side by side
_FAR = 10.0  # highest over lowest capacity, from which on their axis is logarithmic
_LOAD = "load: request rate / highest that can be sustained (B3)"
_LOG = {"type": "log", "dtick": "D2", "tickformat": "~g"}
_HEIGHT = 340  # pixels of a row of panels
_SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "*": "star",
}
"""What plotly calls the markers of `line_style`."""

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1400px; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 1.5rem }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th { cursor: pointer; position: sticky; top: 0; background: #f4f4f4 } th[data-way="1"]::after { content: " \\25b2" } th[data-way="-1"]::after { content: " \\25bc" }
td.text, th.text { text-align: left } tr.best td { background: #eef6ec }
.wide { overflow-x: auto; max-height: 36rem; overflow-y: auto } input { font: inherit; padding: .2rem .5rem; margin: .3rem 0; width: 24rem; max-width: 100% }
</style></head><body>
<h1>$title</h1><p>$reading</p>
$parts
<p>$notes</p>
<script>
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const table = head.closest("table"), body = table.tBodies[0], way = head.dataset.way === "-1" ? 1 : -1;
  for (const other of table.querySelectorAll("th")) delete other.dataset.way;
  head.dataset.way = way;
  const key = row => row.cells[head.cellIndex].dataset.value;
  const compare = (a, b) => a === b ? 0 : isNaN(a) || isNaN(b) ? String(a).localeCompare(b) : a - b;
  [...body.rows].sort((a, b) => way * compare(key(a), key(b))).forEach(row => body.append(row));
};
for (const field of document.querySelectorAll("input")) field.oninput = () => {
  const words = field.value.toLowerCase().split(" ");
  for (const row of field.nextElementSibling.querySelectorAll("tbody tr"))
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
};
</script></body></html>
""")


def check_plotly() -> None:
    """Raises ConfigError where plotly is missing, before hours of simulation."""
    if find_spec("plotly") is None:
        raise ConfigError("plotly, which draws the page, is not installed; pip install -e '.[arena]'")


def page(board: Board, title: str) -> str:
    """The whole page, with plotly's code inside."""
    parts, figures = [], []
    if board.rows:
        parts += ["<h2>Ranking</h2>", _table(*ranking(board.rows))]
        figures.append(("Attainment against load", attainment_figure(board.rows, board.notes)))
    if board.capacities:
        figures.append(("Capacity against SLO", capacity_figure(board.capacities, board.notes)))
    for place, (heading, figure) in enumerate(figures):
        code = figure.to_html(full_html=False, include_plotlyjs=place == 0, config={"displaylogo": False})
        parts.append(f"<h2>{heading}</h2>{code}")
    if board.rows:
        parts += ["<h2>Cells</h2>", _FILTER, _cells(board.rows)]
    if board.capacities:
        parts += ["<h2>Capacities</h2>", _FILTER, _table(*capacities(board.capacities), text=3)]
    notes = "<br>".join(map(_escape, board.notes))
    return _PAGE.substitute(title=_escape(title), reading=_escape(READING), parts="\n".join(parts), notes=notes)


_FILTER = '<input type="search" placeholder="show rows that contain these words">'


def attainment_figure(rows: Sequence[Row], notes: Sequence[str] = ()) -> Any:
    """A panel per trace and objectives, a line per policy; of one load a row per policy, the best on top.

    Intervals are drawn within 0 and 100%. notes: stand below, before the policies whose lines coincide in all panels.
    """
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(f"{row.trace}, {row.slo}", []).append(row)
    names, loads = sorted({row.policy for row in rows}), {row.load for row in rows}
    figure = _subplots(list(panels), len(names), shared_yaxes=len(loads) == 1)
    for place, own in enumerate(panels.values()):
        for policy in names:
            points = sorted((row for row in own if row.policy == policy), key=lambda row: row.load)
            means = [row.figures["attainment.share"] for row in points]
            shares = {
                "array": [min(mean.half, 1 - mean.mean) for mean in means],
                "arrayminus": [min(mean.half, mean.mean) for mean in means],
                "thickness": 1,
                "width": 2,
            }
            if len(loads) == 1:
                line = {"x": [mean.mean for mean in means], "y": [row.policy for row in points], "error_x": shares}
            else:
                line = {"x": [row.load for row in points], "y": [mean.mean for mean in means], "error_y": shares}
            _add(figure, line, policy, names, place)
    attained = {"range": [-0.05, 1.05], "tickformat": ".0%"}
    if len(loads) == 1:
        figure.update_xaxes(
            **attained, title_text=f"attained at {loads.pop():g} of the highest rate that can be sustained (B3)"
        )
        order = [line[0] for line in reversed(ranking(rows)[1])]
        figure.update_yaxes(categoryorder="array", categoryarray=order, dtick=1, tickfont_size=10)
        figure.update_layout(showlegend=False)
    else:
        figure.update_yaxes(**attained)
        figure.update_yaxes(title_text="attainment", col=1)
        figure.update_xaxes(title_text=_LOAD)
    _write_below(figure, [*notes, _coincide(rows)])
    return figure


def _coincide(rows: Sequence[Row]) -> str:
    """Which policies have equal attainments and intervals in all cells."""
    by_cell = sorted(rows, key=lambda row: (row.trace, row.slo, row.load))
    means = [row.figures["attainment.share"] for row in by_cell]
    cells = [(row.policy, row.trace, row.slo, row.load, *mean) for row, mean in zip(by_cell, means, strict=True)]
    keys = ["trace", "slo", "load", "mean", "half", "number"]
    return coincide_text(pd.DataFrame(cells, columns=["label", *keys]).sort_values("label", kind="stable"), keys)


def _write_below(figure: Any, notes: Iterable[str]) -> None:
    """Small type below the panels."""
    lines = wrap_origin("\n".join(filter(None, notes))).splitlines()
    margin = figure.layout.margin.update(b=80 + 14 * len(lines))
    figure.update_layout(height=figure.layout.height + margin.b)
    place = {"x": 0, "y": 0, "yshift": -60, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top"}
    text = "<br>".join(map(_escape, lines))
    figure.add_annotation(text=text, align="left", showarrow=False, font_size=11, **place)


def capacity_figure(found: Sequence[Capacity], notes: Sequence[str] = ()) -> Any:
    """A panel per trace, a row per policy, a point for each of its SLOs; the highest capacities on top. notes: stand below.

    The axis is logarithmic where capacities lie far apart.
    """
    panels: dict[str, list[Capacity]] = {}
    for each in found:
        panels.setdefault(each.trace, []).append(each)
    best = {each.policy: each.rate for each in sorted(found, key=lambda each: each.rate)}
    rows = sorted(best, key=lambda policy: (best[policy], policy))
    slos = sorted({each.slo for each in found}, key=lambda slo: max(each.rate for each in found if each.slo == slo))
    figure = _subplots(list(panels), len(rows), shared_yaxes=True)
    for place, own in enumerate(panels.values()):
        for slo in slos:
            points = [each for each in own if each.slo == slo]
            above, below = [each.high - each.rate for each in points], [each.rate - each.low for each in points]
            bars = {"symmetric": False, "array": above, "arrayminus": below, "thickness": 1, "width": 2}
            line = {"x": [each.rate for each in points], "y": [each.policy for each in points], "error_x": bars}
            _add(figure, line, slo, slos, place)
    figure.update_traces(mode="markers")
    rates = [each.rate for each in found]
    figure.update_xaxes(
        title_text="capacity [requests/s]", **(_LOG if max(rates) > _FAR * min(rates) else {"rangemode": "tozero"})
    )
    figure.update_yaxes(categoryorder="array", categoryarray=rows, dtick=1, tickfont_size=10)
    _write_below(figure, notes)
    return figure


def _subplots(titles: Sequence[str], lines: int, *, shared_yaxes: bool = False) -> Any:
    """Panels for these titles, high enough for a legend of that many lines."""
    from plotly.subplots import make_subplots

    down, across = -(-len(titles) // _ACROSS), min(len(titles), _ACROSS)
    gap = 90 / (_HEIGHT * down)  # pixels between rows
    look = {"vertical_spacing": gap, "horizontal_spacing": 0.07, "shared_yaxes": shared_yaxes}
    figure = make_subplots(down, across, subplot_titles=titles, **look)
    height = max(_HEIGHT * down + 60, 29 * lines + 130)  # a longer legend would scroll
    figure.update_layout(height=height, template="plotly_white", margin={"t": 40, "l": 60, "r": 20})
    return figure


def _add(figure: Any, line: Mapping[str, Any], policy: str, names: Sequence[str], place: int) -> None:
    """A policy's line in a panel. Its one legend entry hides and shows it in all panels."""
    from plotly.graph_objects import Scatter

    if not line["x"]:
        return
    style = line_style(names.index(policy))
    dashes = "solid" if style["linestyle"] == "-" else ",".join(f"{1.5 * part:g}px" for part in style["linestyle"][1])
    symbol = _SYMBOLS[style["marker"]] + ("-open" if "markerfacecolor" in style else "")
    marker = {"symbol": symbol, "size": 1.8 * style["markersize"]}
    drawn = {"color": style["color"], "dash": dashes, "width": 1.5}
    look = {"mode": "lines+markers", "line": drawn, "marker": marker}
    new = policy not in {trace.name for trace in figure.data}
    legend = {"name": policy, "legendgroup": policy, "showlegend": new}
    figure.add_trace(Scatter(**line, **look, **legend), place // _ACROSS + 1, place % _ACROSS + 1)


def _cells(rows: Sequence[Row]) -> str:
    """Every cell, a row each."""
    heads = ["policy", "trace", "SLO", "load", "requests/s", "attained [%]", "latency / bound", "violations over bound"]
    heads += ["TTFT p50 [s]", "TTFT p99 [s]", "TBT p99 [ms]", "preemptions"]
    columns = [("attainment.share", 100.0), ("regret.latency", 1.0), ("regret.violations", 1.0)]
    columns += [("ttft_seconds.p50", 1.0), ("ttft_seconds.p99", 1.0), ("tbt_seconds.p99", 1e3)]
    columns += [("run.preemptions", 1.0)]
    lines = []
    for row in rows:
        shown = [
            (format_mean(row.figures[key].times(factor)), factor * row.figures[key].mean) for key, factor in columns
        ]
        texts = [row.policy, row.trace, row.slo, f"{row.load:g}", f"{row.rate:.3g}"]
        lines.append([*((text, text) for text in texts), *shown])
    return _html(heads, lines, [row.best for row in rows], text=3)


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], text: int = 1) -> str:
    """A table whose cells sort by the number that they begin with."""
    rows = [
        [(cell, cell if place < text else cell.split(" ")[0].replace(",", "")) for place, cell in enumerate(line)]
        for line in lines
    ]
    return _html(heads, rows, [False] * len(rows), text)


def _html(heads: Sequence[str], lines: Sequence[Sequence[tuple[str, object]]], best: Sequence[bool], text: int) -> str:
    """text: how many columns at the left are words. Each cell is (text, what it sorts by)."""

    def kind(place: int) -> str:
        return ' class="text"' if place < text else ""

    head = "".join(f"<th{kind(place)}>{_escape(name)}</th>" for place, name in enumerate(heads))
    body = "".join(
        ("<tr class='best'>" if good else "<tr>")
        + "".join(
            f'<td{kind(place)} data-value="{_escape(value)}">{_escape(shown)}</td>'
            for place, (shown, value) in enumerate(line)
        )
        + "</tr>"
        for line, good in zip(lines, best, strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _escape(value: object) -> str:
    return escape(str(value))
