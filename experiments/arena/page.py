"""The pages of the arena: Markdown, and HTML that needs no network, with curves by plotly and tables by itables."""

from html import escape
from typing import Any

import pandas as pd

from experiments.arena.board import ATTAINED, CELL, Board, rank
from experiments.store.labels import coincide_text

READING = (
    "Load: the request rate over the highest that any policy can sustain (B3). attained: share of the requests that meet all "
    "of their objectives, mean and ± half of the 95% interval over replications; best: cannot be told apart from the best "
    "policy of the cell, paired by replication, which is weak evidence with few. latency / bound: mean end-to-end latency over "
    "what no policy can beat (B6). The ranking's means have no interval."
)
_ACROSS = 2  # panels side by side
_FAR = 10.0  # highest over lowest capacity, from which on their axis is logarithmic
_HEIGHT = 340  # pixels of a row of panels
_STYLE = "body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1400px; padding: 0 1rem }"


def markdown(board: Board, title: str) -> str:
    """Returns the Markdown page."""
    tables = [f"## {heading}\n\n{frame.to_markdown(index=False, floatfmt='.4g')}" for heading, frame in _tables(board)]
    return "\n\n".join([f"# {title}", READING, *tables, *board.notes]) + "\n"


def html(board: Board, title: str) -> str:
    """Returns the HTML page, with the code of plotly and of DataTables inside: a click on a heading sorts, words filter."""
    from itables import options, to_html_datatable
    from itables.javascript import generate_init_offline_itables_html

    figures = [
        *([("Attainment against load", attainment_figure(board))] if len(board.cells) else []),
        *([("Capacity of each policy", capacity_figure(board))] if len(board.capacities) else []),
    ]
    look: Any = {"connected": False, "showIndex": False, "paging": False, "scrollX": True}
    parts = [(heading, str(to_html_datatable(frame.round(4), **look))) for heading, frame in _tables(board)]
    for number, (heading, figure) in enumerate(figures):
        code = figure.to_html(full_html=False, include_plotlyjs=number == 0, config={"displaylogo": False})
        parts.insert(1 + number, (heading, code))
    body = "\n".join(f"<h2>{heading}</h2>{code}" for heading, code in parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    notes = f"<p>{'<br>'.join(map(escape, board.notes))}</p>"
    scripts = generate_init_offline_itables_html(options.dt_bundle)
    text = f"{scripts}<h1>{escape(title)}</h1><p>{escape(READING)}</p>{body}{notes}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{text}</body></html>\n'


def _tables(board: Board) -> list[tuple[str, pd.DataFrame]]:
    """Returns the tables of both pages, with their headings."""
    tables = [("Ranking", rank(board.cells)), ("Cells", board.cells)] if len(board.cells) else []
    return [*tables, ("Capacities", board.capacities)] if len(board.capacities) else tables


def attainment_figure(board: Board) -> Any:
    """Returns a panel per trace and objectives, with a line per policy; of a single load a row per policy, the best on top."""
    from plotly import express

    cells = board.cells.sort_values([*CELL, "policy"]).fillna({f"{ATTAINED} ±": 0.0})
    half, mean = cells[f"{ATTAINED} ±"], cells[ATTAINED]
    cells = cells.assign(
        panel=cells["trace"] + ", " + cells["slo"], above=half.clip(upper=100 - mean), below=half.clip(upper=mean)
    )  # intervals within 0 and 100%
    look: dict[str, Any] = {"facet_col": "panel", "color": "policy", "symbol": "policy", **_panels(cells["panel"])}
    if cells["load"].nunique() > 1:
        look |= {"x": "load", "y": ATTAINED, "error_y": "above", "error_y_minus": "below"}
        figure = express.line(cells, markers=True, **look)
    else:
        look |= {"x": ATTAINED, "y": "policy", "error_x": "above", "error_x_minus": "below"}
        figure = express.scatter(cells, category_orders={"policy": rank(cells)["policy"].tolist()}, **look)
    same = coincide_text(cells.assign(label=cells["policy"]), [*CELL, ATTAINED, f"{ATTAINED} ±"])
    return _name_panels(figure, same)


def capacity_figure(board: Board) -> Any:
    """Returns a panel per trace, with a row per policy and a point for each of its objectives; the highest capacities on top."""
    from plotly import express

    rows = board.capacities
    rows = rows.assign(above=rows["high"] - rows["rate"], below=rows["rate"] - rows["low"])
    order = {"policy": rows.groupby("policy")["rate"].max().sort_values(ascending=False).index.tolist()}
    look: dict[str, Any] = {"facet_col": "trace", "color": "slo", "symbol": "slo", **_panels(rows["trace"])}
    ends = {"error_x": "above", "error_x_minus": "below"}
    far = bool(rows["rate"].max() > _FAR * rows["rate"].min())
    labels = {"rate": "capacity [requests/s]"}
    figure = express.scatter(rows, "rate", "policy", category_orders=order, log_x=far, labels=labels, **ends, **look)
    return _name_panels(figure)


def _panels(names: Any) -> dict[str, Any]:
    """Returns the arrangement of panels with these names."""
    down = -(-names.nunique() // _ACROSS)
    return {
        "facet_col_wrap": _ACROSS,
        "facet_row_spacing": 0.25 / down,
        "height": _HEIGHT * down + 120,
        "template": "plotly_white",
    }


def _name_panels(figure: Any, note: str = "") -> Any:
    """Titles each panel by its name alone, and writes a note above all panels."""
    figure.for_each_annotation(lambda title: title.update(text=title.text.partition("=")[2]))
    return figure.update_layout(title={"text": escape(note), "font": {"size": 11}})
