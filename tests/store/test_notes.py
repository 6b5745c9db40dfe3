"""Notes on results are the same below tables, plots and comparisons."""

from pathlib import Path

import pytest
from hand_made import write_run

from experiments.compare import report, things_of
from experiments.plots import attainment, latency_cdf, latency_vs_rate, table

NOTES = [
    "SIMULATED with profile h200 (error: 5%)",
    "iterations outside the measured range: 12, in 4 of 8 runs",
    "true output lengths known to the policy, as max_new_tokens",
    "made by different versions of mine; see about.code in summary.json",
]
TAIL = (
    "beyond a run's P99 lie 0.03 of its requests, fewer than 10: the P99s of TTFT are unreliable; serve more requests"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies at two rates with two seeds: all simulated, those of one policy with 3 iterations outside the measured range."""
    root = tmp_path_factory.mktemp("sweep")
    for policy, outside in (("a", 3), ("b", 0)):
        for rate in (1, 2):
            for seed in (0, 1):
                execution = {"profile": "h200", "error": "error: 5%", "iterations_outside_measured_range": outside}
                code = {"framework": "c", "own": {"mine": policy}}
                about = {"policy": policy, "simulated": True, "execution": execution, "code": code}
                given = {"overrides": [f"workload.arrivals.rate={rate}"], "output_lengths_known": True}
                settings = {"workload": {"arrivals": {"rate": rate}, "seed": seed}, "seed": seed}
                write_run(root / f"{policy},{rate},{seed}", {**about, **given}, settings, speed=float(seed))
    return root


@pytest.mark.parametrize("plot", [attainment, latency_cdf, latency_vs_rate])
def test_plots_have_the_notes_of_the_table(folder: Path, plot: object) -> None:
    assert table.text(folder).splitlines()[-5:] == [TAIL, *NOTES]
    below = plot.draw(folder).get_supxlabel().splitlines()  # type: ignore[attr-defined]
    assert below[:4] == NOTES and below[4].endswith(" coincide")  # all have the latencies of the run made by hand
    assert below[5:] == {latency_vs_rate: [TAIL]}.get(plot, [])


def test_p99s_are_not_judged_where_none_is_drawn(folder: Path) -> None:
    assert TAIL not in latency_vs_rate.draw(folder, percentiles=(50,)).get_supxlabel()


def test_comparisons_have_the_notes_of_the_table(folder: Path) -> None:
    assert report(things_of([folder]), []).splitlines()[-5:] == [TAIL, *NOTES]
    assert report(things_of([folder]), ["ttft_seconds.p50"]).splitlines()[-4:] == NOTES
