"""Prefill and decode on two GPUs: the stored tables are of the stored runs."""

import json
from pathlib import Path

import pytest

from reproduction.validation.apart import table

PLACE = Path(__file__).parents[1] / "results" / "h200-x2"


@pytest.mark.parametrize("name", ["apart", "apart-repeated"])
def test_the_stored_table_is_of_the_stored_runs(name: str) -> None:
    stored = json.loads((PLACE / f"{name}.json").read_text())
    kind = "at the cards' speed" if stored.get("cards") else "simulated"
    assert table(stored["runs"], kind) == (PLACE / f"{name}.md").read_text()


def test_a_cell_has_the_means_of_its_runs_and_the_error_of_the_mean() -> None:
    """Two runs of 40 and 60% (mean 50, half an interval 12.706 x 10), simulated as 44 and 66%: 10% too many, by a constant factor."""
    figures = {"relaxed": 1.0, "ttft_seconds mean": 0.1, "tpot_seconds mean": 0.005}
    cell = {"workload": "azure_conv_lengths", "rate": 36, "layout": "both"}
    runs = [
        {
            **cell,
            "seed": seed,
            "measured": {**figures, "strict": share},
            "simulated": {**figures, "strict": 1.1 * share},
        }
        for seed, share in enumerate((0.4, 0.6))
    ]
    row = table(runs, "simulated").splitlines()[2].split("|")
    assert [text.strip() for text in row[4:9]] == [
        "2",
        "50.0 ± 127.1",
        "+10.0 [+10.0, +10.0]",
        "100.0 ± 0.0",
        "+0.0 [+0.0, +0.0]",
    ]
