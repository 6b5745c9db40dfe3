"""Every policy has a page, and the schedules that the pages show are those that the policies make today."""

import re

import pytest
from commands import ROOT
from PIL import Image

from experiments.plots.schedule import Doing
from experiments.settings.compose import policy_names
from reproduction.papers import schedules

PAGES = ROOT / "docs" / "policies"


def test_each_policy_has_a_page_and_each_page_a_policy() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted([*policy_names(), "properties"])
    overview = (ROOT / "docs" / "policies.md").read_text()
    assert {f"policies/{name}.md" for name in policy_names()} <= set(re.findall(r"\]\((.*?)\)", overview))


@pytest.mark.long
def test_the_schedules_of_the_pages_are_todays() -> None:
    """Which are equal: no request follows another; no job and no preemption changes an order; the longest output comes first anyway."""
    made = {}
    for name in policy_names():
        [figure] = re.findall(r"!\[.+\]\((.+)\)\n\n[A-Z]", (PAGES / f"{name}.md").read_text())  # with words below it
        assert (PAGES / figure).stem == name
        made[name] = schedules.text_of(schedules.record(name)[0])
        with Image.open(PAGES / figure) as picture:
            again = "draw it again with python -m reproduction.papers schedules, and look at the words below it"
            assert picture.info["Description"] == made[name], again
    equal = {text: [name for name in made if made[name] == text] for text in made.values()}
    assert [names for names in equal.values() if len(names) > 1] == [
        ["atlas", "plas"],
        ["justitia", "length_order", "trail"],
        ["longest_first", "sarathi_serve"],
        ["session_affinity", "vllm_v1"],
    ]
    assert {cell.doing for row in schedules.record("mlfq")[0].values() for cell in row.values()} == set(Doing)


@pytest.mark.long
def test_the_words_below_a_schedule_have_its_figures() -> None:
    """`E, which ends at 6 s instead of 14 s`, and mean latencies; the second is that of first come, first served."""

    def ends(policy: str) -> dict[str, float]:
        _, requests = schedules.record(policy)
        latencies = [request.finished_at - request.arrival_time for request in requests]
        return {
            "mean": sum(latencies) / 5,
            **{name: each.finished_at for name, each in zip("ABCDE", requests, strict=True)},
        }

    stated, fcfs = [], ends(schedules.FCFS)
    for name in policy_names():
        text = " ".join((PAGES / f"{name}.md").read_text().split())
        pattern = r"(mean|[A-E])(?: latency is|, which ends at) ([\d.]+) s instead of ([\d.]+) s"
        stated += [(name, what, *map(float, times)) for what, *times in re.findall(pattern, text)]
    assert [(name, what, ends(name)[what], fcfs[what]) for name, what, _, _ in stated] == stated
    assert {name for name, *_ in stated} == {"length_order", "ltr", "mlfq", "plas", "vllm_v1"}
