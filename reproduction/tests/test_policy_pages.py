"""Every policy has a page, and the schedules that the pages show are those that the policies make today."""

import re
from pathlib import Path

import pytest
from commands import ROOT
from PIL import Image

from cbatch.replay.schedule import Doing
from experiments.settings.compose import policy_names
from reproduction.papers import schedules

PAGES = ROOT / "docs" / "policies"


def test_each_policy_has_a_page_and_each_page_a_policy() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted([*policy_names(), "properties"])
    overview = (ROOT / "docs" / "policies.md").read_text()
    assert {f"policies/{name}.md" for name in policy_names()} <= set(re.findall(r"\]\((.*?)\)", overview))


@pytest.mark.parametrize("name", policy_names())
def test_the_schedule_of_a_page_is_todays(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    [figure] = re.findall(r"!\[.+\]\((.+)\)\n\n[A-Z]", text)  # with words below it
    path = (PAGES / figure).resolve()
    assert path.stem == name and path.stat().st_size < 40_000
    schedule, _ = schedules.record(name)
    with Image.open(path) as picture:
        drawn = picture.info["Description"]
    again = "draw it again with python -m reproduction.papers schedules, and look at the words below it"
    assert drawn == schedule.text(schedules.NAMES), again


def test_the_five_requests_tell_the_policies_apart() -> None:
    """Trail makes no preemption here, which leaves shortest first; all others differ."""
    made = {name: schedules.record(name)[0].text(schedules.NAMES) for name in policy_names()}
    assert made["trail"] == made["length_order"]
    assert len(set(made.values())) == len(made) - 1
    doing = {cell.doing for row in schedules.record("mlfq")[0].cells.values() for cell in row.values()}
    assert doing == set(Doing)


def test_the_command_draws_a_picture_for_each_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "policy_names", lambda: ["orca", schedules.FCFS])
    schedules.main(str(tmp_path / "new"))
    for name in ("orca", schedules.FCFS):
        with Image.open(tmp_path / "new" / f"{name}.png") as picture:
            assert picture.info["Description"] == schedules.record(name)[0].text(schedules.NAMES)
