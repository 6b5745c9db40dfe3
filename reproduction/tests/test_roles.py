"""Prefill and decode apart: the stored table and figure are of the stored runs."""

from pathlib import Path

import pandas as pd

from reproduction.papers.roles import KEY, LOADS, OBJECTIVES, draw, table, tables_and_links

PLACE = Path(__file__).parents[1] / "results" / "roles"


def test_the_stored_table_is_of_the_stored_runs() -> None:
    """All cells of each seed are there once; stricter objectives attain no more; the figure has a panel for each workload. All were simulated with today's tables and links."""
    data = pd.read_csv(PLACE / "runs.csv")
    assert {*data["tables"]} == {tables_and_links()}
    cells = {(gpus, name, rate) for gpus, loads in LOADS.items() for name, rates in loads.items() for rate in rates}
    for _, runs in data.groupby("seed"):
        assert len(runs) == sum(gpus for gpus, *_ in cells) == len(runs[KEY].drop_duplicates())
    strict, middle, relaxed = (data[text] for text in OBJECTIVES)
    assert (strict <= middle).all() and (middle <= relaxed).all()
    assert table(data) == (PLACE / "table.md").read_text()
    figure = draw(data)
    assert len(figure.axes) == len(LOADS[8])
    names = "SIMULATED with profile h100", "llama-3.1-8b", "batch 128", "chunk 512", "5 seeds"
    for part in (*names, data["date"].max()):
        assert part in figure.get_supxlabel()
    for panel, (rate,) in zip(figure.axes, LOADS[8].values(), strict=True):
        bars = [bar for _, _, (lines,) in panel.containers for bar in lines.get_segments()]
        ends = [height for bar in bars for _, height in bar]
        assert min(ends) >= 0 and max(ends) == rate, "intervals are cut where goodput ends"
