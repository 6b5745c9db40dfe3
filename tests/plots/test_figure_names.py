"""Names of figures: in the plot commands of experiments and documents, and on axes."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hand_made import ABOUT, SETTINGS, write_run
from places import ROOT

from experiments.plots.parts import wrap
from experiments.plots.series import load_series, without_policies
from experiments.plots.style import PLAIN, _overload_text, _shared_texts
from experiments.report.headings import check_figure, heading_of
from experiments.report.notes import notes_of
from experiments.report.titles import gpus_texts

KEYS, POOLS = ("replicas", "role"), {"p": {"replicas": 1}, "d": {"replicas": 2}}
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


def test_what_a_policy_spends_is_neither_better_nor_worse() -> None:
    """More bytes for the same work raise MBU, slower work lowers power, and more drafts lower one figure of drafts and raise the other."""
    spent = ("mfu.run", "mbu.run", "mbu.decode", "energy.watts", "drafts.accepted_share", "drafts.acceptance_length")
    assert {heading_of(key).better for key in spent} == {""}
    assert {heading_of(f"energy.{key}").better for key in ("joules", "joules_per_token")} == {"lower"}


def test_lines_leave_out_what_all_lines_of_a_policy_share(tmp_path: Path) -> None:
    chunking = "chunking=fixed(chunk=2048, tile=1)"
    texts = [f"serve({chunking})", f"serve({chunking}, drafting=table([[1,32,7],[33,64,4]]))", "joint(tbt=1)", "orca"]
    for number, text in enumerate(texts):
        write_run(tmp_path / str(number), {**ABOUT, "policy": text}, {**SETTINGS, "policy": text})
    runs = load_series(tmp_path)
    assert {*runs["label"]} == {"serve", "serve(drafting=table([[1,32,7],[33,64,4]]))", "joint(tbt=1)", "orca"}


def test_a_run_without_the_settings_of_the_others_has_a_name(tmp_path: Path) -> None:
    """Also where the policies are on the axis."""
    write_run(tmp_path / "undivided", ABOUT, SETTINGS)
    for number in (1, 3):
        write_run(tmp_path / f"p{number}", ABOUT, {**SETTINGS, "backend.pools.p.replicas": number})
    runs = load_series(tmp_path)
    named = {"without p.replicas", "p.replicas=1", "p.replicas=3"}
    assert {*runs["label"]} == named and runs["heading"].iloc[0] == runs["policy"].iloc[0]
    whole = runs.assign(label=runs["policy"] + ", " + runs["label"]).replace(
        {"label": {f"{runs['policy'].iloc[0]}, without p.replicas": runs["policy"].iloc[0]}}
    )
    assert {*without_policies(whole, PLAIN)["label"]} == named


def test_figures_name_the_drafter_and_an_eviction_that_evicts(tmp_path: Path) -> None:
    """A run that was told to make no drafts, as a baseline, needs no advice."""
    about = {**ABOUT, "drafter": "mine", "lacks": ["drafts"]}
    drafter = {"eviction": "lru", "drafter.max_drafts": 7}
    for name, drafting in {"baseline": "none", "fixed": "fixed"}.items():
        run = {**about, "overrides": [f"policy='p(drafting={drafting})'"]}
        write_run(tmp_path / name, run, {**SETTINGS, **drafter})
        assert any("asks for no drafts" in note for note in notes_of([run])) == (name == "fixed")
    runs = load_series(tmp_path)
    assert "drafter mine, at most 7 drafts" in ", ".join(_shared_texts(runs))
    for evicted in (0, 3):
        shown = ", ".join(_shared_texts(runs.assign(**{"prefix_cache.evicted_blocks": evicted})))
        assert ("eviction lru" in shown) == (evicted > 0)


def test_figures_name_the_points_with_overload(tmp_path: Path) -> None:
    """Two policies at five rates: the two runs at 8 and 16 of one, and one of two at 4 of the other. Renamed as in the legend."""
    compared = {"batches": [1, 9], "loads": [0, 1], "shares_of_bound": [0, 1]}
    execution = {"compared": compared, "iterations_outside_measured_range": 0, "profile": "p", "error": "e"}
    full = [("a", rate, seed) for rate in (8, 16) for seed in (1, 2)] + [("b", 4, 2)]
    for policy, rate, seed in product("ab", (1, 2, 4, 8, 16), (1, 2)):
        about = {"policy": policy, "simulated": True, "execution": execution, "overrides": [f"rate={rate}"]}
        about |= {"queue_grows": (policy, rate, seed) in full, "mean_waiting": 3, "requests": 9}
        settings = SETTINGS | {"policy": policy, "workload.rate": rate, "workload.seed": seed}
        write_run(tmp_path / f"{policy}{rate:02}{seed}", ABOUT | about, settings)
    renamed = replace(PLAIN, labels={"a": "A"})
    for shown, look, text in (
        (["workload.rate"], renamed, "overload: A at rate=8, 16 and b at rate=4"),
        ([], PLAIN, "overload: a, rate=8 and a, rate=16 and b, rate=4"),
        (["policy", "workload.rate"], PLAIN, "overload: a at rate=8, 16 and b at rate=4"),
    ):
        runs = load_series(tmp_path, look, shown)
        assert _overload_text(runs) == text
    over = runs["summary"].map(lambda summary: summary["about"]["queue_grows"])
    assert _overload_text(runs[over]) == _overload_text(runs[~over]) == "", "of all or none the other note says it"


def test_labels_name_the_roles_of_replicas(tmp_path: Path) -> None:
    """Also of runs without pools; pools of other names with the same roles stay apart; on an axis of replicas a label has no numbers of them."""
    roles, swapped = {"p": (1, "prefill"), "d": (None, "decode")}, {"d": (1, "prefill"), "p": (1, "decode")}
    for name, pools in {"apart": roles, "swapped": swapped, "one": {"all": (2, None)}, "none": {}}.items():
        keys = {f"pools.{pool}.{key}": value for pool, of in pools.items() for key, value in zip(KEYS, of, strict=True)}
        settings = {f"backend.{key}": value for key, value in {"replicas": 2, **keys}.items()}
        write_run(tmp_path / name, ABOUT, SETTINGS | settings)
    labels = load_series(tmp_path).set_index("folder")["label"].rename(lambda folder: Path(folder).name)
    assert labels["one"].startswith("pools=2 both") and labels["none"].startswith("pools=2 both")
    assert labels["apart"].startswith("pools=1 prefill + 1 decode") and labels.nunique() == 4
    shown = load_series(tmp_path, shown=["backend.pools.p.replicas"])["label"]
    assert not shown.str.contains("prefill [+]").any()
    assert gpus_texts({"backend.pools.p.role": "prefill", "backend.replicas": 3}, POOLS) == [
        "1 p (prefill) and 2 d replicas"
    ]
