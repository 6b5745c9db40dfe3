"""Names of figures: in the plot commands of experiments and documents, and on axes."""

import re

import pytest
from places import ROOT

from experiments.plots.style import wrap
from experiments.report.headings import check_figure, heading_of

FILES = [*sorted((ROOT / "conf" / "experiment").glob("*.yaml")), *sorted((ROOT / "docs").glob("*.md"))]
GIVEN = sorted(
    {
        key
        for file in FILES
        for keys in re.findall(r"\b[xy]=((?:\w+\.)[\w.,*]+)", file.read_text())
        for key in keys.split(",")
    }
)


@pytest.mark.parametrize("key", [key for key in GIVEN if not key.startswith(("backend.", "workload.", "policy."))])
def test_plot_commands_name_figures_that_exist(key: str) -> None:
    assert "throughput.total_tokens_per_second" in GIVEN
    check_figure(f"y={key.rstrip('.')}")


@pytest.mark.parametrize(
    "key", ["throughput.decode_tokens_per_second", "iterations.tokens_of_idle_requests_and_others"]
)
def test_the_name_of_an_axis_breaks_between_words(key: str) -> None:
    heading = heading_of(key)
    words = re.split(r"[ _]", heading.axis)
    assert wrap(heading.axis, 30).split() == words and len(words) > 1
