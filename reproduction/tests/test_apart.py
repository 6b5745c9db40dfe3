"""Prefill and decode on two GPUs: the table in the documentation is of the stored runs."""

import json
from pathlib import Path

from reproduction.validation.apart import table

ROOT = Path(__file__).parents[2]


def test_the_table_in_the_documentation_is_of_the_stored_runs() -> None:
    stored = json.loads((ROOT / "reproduction/results/h200-x2/apart-repeated.json").read_text())
    assert table(stored["runs"], "at the cards' speed") in (ROOT / "docs/cluster.md").read_text()


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
