"""Which runs of a folder are shown, under which labels: whatever varies tells runs apart, and what is left out is named."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hand_made import ABOUT, write_run

from cbatch import ConfigError
from experiments.plots import series
from experiments.plots.series import coincide_text, load_rates, load_runs, load_series, summarize_series, swept
from experiments.plots.style import add_title, new_figure
from experiments.store.run_folder import UNFINISHED
from experiments.store.runs import Run, label_runs, label_seeds
from experiments.store.selection import Omitted, choose_runs, drop_repeats, find_unfinished, omitted_text, select_runs
from experiments.store.tables import load
from experiments.sweep import run_table


def run(name: str = "orca", *given: str, chunk: int | None = None, tokens: float = 1.0, **settings: Any) -> Run:
    """given: overrides. chunk: of a policy that has chunks. settings: by key, with __ for the dots."""
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    about = {**ABOUT, "policy": name, "overrides": list(given), "chunking": "tile_aligned" if chunk else None}
    figures = {"throughput": {"tokens": tokens}}
    return Run(Path("sweep") / ",".join([name, *given]), keys, {"about": {**about, "chunk": chunk}, **figures})


def test_a_label_is_the_name_and_what_varies() -> None:
    """Not `b`, which is the same in all."""
    runs = [run("orca", f"w.a={value}", "b=1", w__a=value, b=1) for value in (0.5, 2.0)]
    assert label_runs(runs) == ["orca, a=0.5", "orca, a=2"]
    assert label_runs(runs, ["w.a"], apart=False) == ["orca", "orca"]
    assert label_runs(runs[:1]) == ["orca"]
    assert label_runs([run("sarathi", chunk=chunk, policy__chunking__chunk=chunk) for chunk in (1, 2)]) == [
        *("sarathi 1", "sarathi 2")
    ]


def test_a_selector_that_the_name_tells_is_not_named_again() -> None:
    """Two chunk selectors: the names "sarathi 256" and "sarathi 256, fixed" differ, so what follows from that is no part."""
    runs = [run("sarathi", chunk=256, policy__chunking___target_=f"policies.chunking.{name}") for name in ("A", "B")]
    runs[1].summary["about"]["chunking"] = "fixed"
    assert label_runs(runs) == ["sarathi 256", "sarathi 256, fixed"]


def test_the_value_of_an_override_may_hold_an_equals_sign() -> None:
    """The key ends at the first one, and the signs before it that add or remove a key are no part of it."""
    given = run("orca", "+policy.text=a=b", "~sampling", "++w.size=3").given
    assert given == {"policy.text": "a=b", "sampling": "", "w.size": "3"}
    runs = [run("orca", f"experiment=a={value}", w__n=value) for value in (1, 2)]
    assert label_runs(runs) == ["orca, experiment=a=1", "orca, experiment=a=2"]


def test_a_swept_setting_is_named_also_where_it_was_not_given() -> None:
    assert label_runs([run("orca", batch=18), run("orca", "batch=4", batch=4)]) == ["orca, batch=18", "orca, batch=4"]


def test_what_was_swept_is_named_even_if_something_else_tells_the_runs_apart() -> None:
    runs = [run("orca", f"a={a}", f"b={a + 1}", a=a, b=a + 1) for a in (1, 2)]
    assert label_runs(runs) == ["orca, a=1, b=2", "orca, a=2, b=3"]


def test_an_experiment_stands_for_the_settings_that_it_brings() -> None:
    """Not for those that are swept beside it."""
    low, high = {"w__rate": 1, "w__num": 10}, {"w__rate": 5, "w__num": 50}
    given = [("low", 1, low), ("high", 1, high), ("low", 2, low), ("high", 2, high)]
    runs = [run("orca", f"experiment={name}", f"batch={batch}", batch=batch, **keys) for name, batch, keys in given]
    assert label_runs(runs) == [f"orca, batch={batch}, experiment={name}" for name, batch, _ in given]


def test_a_parameter_that_follows_a_swept_key_is_named() -> None:
    """As policy.budget=${chunk} does: the policy has no chunks, so the key alone says nothing."""
    runs = [run("Mine", f"chunk={size}", chunk=None, policy__budget=size) for size in (128, 256)]
    assert label_runs(runs) == ["Mine, budget=128", "Mine, budget=256"]


def test_an_argument_in_a_policys_name_is_not_repeated_behind_it() -> None:
    runs = [run(f"a.Mine(budget={size}, k=1)", policy__budget=size) for size in (51, 512)]
    assert label_runs([*runs, run("a.Mine", "+policy.budget=1", policy__budget=1)]) == [
        "Mine(budget=51, k=1)",
        "Mine(budget=512, k=1)",
        "Mine, budget=1",
    ]


def test_lists_classes_and_paths_are_short_unless_that_hides_a_difference() -> None:
    assert label_runs([run(sizes=[1, 2]), run(sizes=[1, 3])]) == ["orca, sizes=[1, 2]", "orca, sizes=[1, 3]"]
    assert label_runs([run(p__lengths___target_=f"a.b.{name}") for name in ("X", "Y")]) == [
        *("orca, lengths=X", "orca, lengths=Y")
    ]
    assert label_runs([run(path="/a/x.csv"), run(path="/a/y.csv")]) == ["orca, path=x.csv", "orca, path=y.csv"]
    assert label_runs([run(path="/a/x/"), run(path="/a/y/")]) == ["orca, path=x", "orca, path=y"]
    assert label_runs([run(path="/a/x.csv"), run(path="/b/x.csv")]) == ["orca, path=/a/x.csv", "orca, path=/b/x.csv"]
    assert label_runs([run(share=0.1234567), run(share=0.1234568)]) == [
        *("orca, share=0.1234567", "orca, share=0.1234568")
    ]


def test_keys_are_as_long_as_it_takes_to_tell_them_apart() -> None:
    runs = [run("orca", f"a.n={a}", f"b.n={b}", a__n=a, b__n=b) for a in (1, 2) for b in (1, 2)]
    assert label_runs(runs)[1] == "orca, a.n=1, b.n=2"


def test_a_setting_that_a_policy_does_not_have_is_not_in_its_label() -> None:
    runs = [run("orca"), *(run("Mine", f"+policy.size={size}", policy__size=size) for size in (1, None))]
    assert label_runs(runs) == ["orca", "Mine, size=1", "Mine, size=null"]


def test_a_policy_that_was_edited_between_two_runs_has_two_labels() -> None:
    runs = [run("Mine"), run("Mine")]
    for digest, each in zip("ab", runs, strict=True):
        each.summary["about"]["code"] = {"framework": "f", "own": {"mine": digest}}
    first, second = label_runs(runs)
    assert re.fullmatch(r"Mine, code=[0-9a-f]{6}", first) and re.fullmatch(r"Mine, code=[0-9a-f]{6}", second)
    assert first != second


def test_the_order_of_a_runs_own_modules_is_no_difference() -> None:
    first, second = run("Mine"), run("Mine")
    first.summary["about"]["code"] = {"own": {"a": "1", "b": "2"}}
    second.summary["about"]["code"] = {"own": {"b": "2", "a": "1"}}
    assert first.effective == second.effective


def test_what_a_run_was_made_with_is_named_where_it_differs() -> None:
    runs = [run("orca"), run("orca")]
    for value, each in zip("ab", runs, strict=True):
        each.summary["about"].update(dict.fromkeys(("slo", "backend", "runtime", "model", "workload"), value))
    assert label_runs(runs)[0] == "orca, workload=a, model=a, runtime=a, backend=a, slo=a"


def test_runs_share_a_label_where_seeds_were_swept_and_otherwise_not() -> None:
    assert label_seeds([run(workload__seed=seed) for seed in (0, 1)]) == ["orca", "orca"]
    seeds = [run(workload__seed=seed)._replace(folder=Path(f"runs/{place}")) for place, seed in enumerate((0, 0, 1))]
    assert label_seeds(seeds) == ["orca", "orca", "orca"], "one was measured twice"
    twice = [run(tokens=place)._replace(folder=Path(f"runs/{place}")) for place in (1, 2)]
    assert label_seeds(twice) == ["orca, 1", "orca, 2"]


def test_measured_repetitions_are_told_apart_by_any_difference_or_by_their_folders() -> None:
    """`chunk` has no effect on orca; both runs count all the same, as their figures differ."""
    runs = [run("orca", f"chunk={size}", tokens=size)._replace(settings={"chunk": size}) for size in (128, 256)]
    assert drop_repeats(runs) == (runs, [])
    assert label_runs(runs) == ["orca, chunk=128", "orca, chunk=256"]
    assert label_runs(runs, apart=False) == ["orca", "orca"]
    twice = [run(tokens=1)._replace(folder=Path("runs/a")), run(tokens=2)._replace(folder=Path("runs/b"))]
    assert label_runs(twice) == ["orca, a", "orca, b"]


# -- runs that are not shown ------------------------------------------------------------------------------------------


def test_a_run_that_repeats_another_is_named_with_the_reason() -> None:
    runs = [run("orca", f"chunk={size}")._replace(settings={"chunk": size, "batch": 1}) for size in (1, 2, 3)]
    assert drop_repeats(runs) == (
        runs[:1],
        [
            Omitted(f"orca,chunk={size}", "each differs from another run only in chunk, which orca does not read")
            for size in (2, 3)
        ],
    )
    assert drop_repeats([runs[0], runs[0]._replace()])[1] == [Omitted("orca,chunk=1", "each repeats another run")]
    dated = [run(day=date(2026, 1, day)) for day in (1, 2, 1)]  # as YAML reads 2026-01-01
    assert drop_repeats(dated)[0] == dated[:2]
    assert run(sweep__jobs=1).effective == run(sweep__jobs=2).effective  # how a sweep is run changes none of its runs
    other = runs[1]._replace(settings={"chunk": 2, "batch": 2})
    assert drop_repeats([runs[0], other]) == ([runs[0], other], [])


def test_chunks_that_are_chosen_automatically_are_the_same_whatever_selector_was_asked_for() -> None:
    runs = [run("sarathi", f"chunking={kind}", policy__chunking___target_=kind) for kind in ("fixed", "tile_aligned")]
    for each in runs:
        each.summary["about"]["chosen"] = {"chunking": "pd_aware"}
    assert drop_repeats(runs)[0] == runs[:1]


def test_the_reasons_are_listed_with_the_names() -> None:
    assert omitted_text([Omitted("a", "x"), Omitted("b", "y"), Omitted("c", "x")]) == (
        "2 runs not shown: x\n  a\n  c\n1 run not shown: y\n  b"
    )
    assert omitted_text([]) == ""


def test_names_of_all_combinations_are_listed_as_one() -> None:
    names = [f"chunk={chunk},policy=orca,ratio={ratio}" for chunk in (256, 512) for ratio in (2, 5, 14)]
    assert omitted_text([Omitted(name, "x") for name in names]) == (
        "6 runs not shown: x\n  chunk=256|512,policy=orca,ratio=2|5|14"
    )
    assert omitted_text([Omitted(f"a=x={value}", "x") for value in (1, 2)]) == "2 runs not shown: x\n  a=x=1|x=2"
    for separate in (names[:-1], ["a=1,b=1", "a=1,c=1"], ["a=1,b=1", "a=1"], ["first", "second"]):
        assert omitted_text([Omitted(name, "x") for name in separate]).splitlines()[1:] == [
            f"  {name}" for name in separate
        ]


def test_unfinished_runs_are_named_with_the_reason(tmp_path: Path) -> None:
    """Failed before or after its folder was made, still running or killed, without a report, and run again since."""
    write_run(tmp_path / "whole")
    for name, said in {"failed": {"error": "no memory"}, "running": {"status": "begun"}, "lost": None}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
        if said is not None:
            (tmp_path / name / UNFINISHED).write_text(json.dumps(said))
    (tmp_path / "errors.log").write_bytes(b"chunk=0: chunk=0: give 1 or more\nwhole: failed\nx: p\xe9 is no path\n")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "errors.log").write_text("chunk=1: no memory\n")  # another sweep's
    assert find_unfinished(tmp_path) == [
        Omitted("chunk=0", "chunk=0: give 1 or more"),
        Omitted("x", "p\ufffd is no path"),
        Omitted("chunk=1", "no memory"),
        Omitted("failed", "no memory"),
        Omitted("lost", "did not finish"),
        Omitted("running", "is running, or was killed"),
    ]
    assert [each.name for each in select_runs(tmp_path, "l")[1]] == ["failed", "lost"]


# -- frames of runs ---------------------------------------------------------------------------------------------------


def test_runs_are_chosen_by_the_names_of_their_own_folders_or_by_their_overrides() -> None:
    runs = [run("orca", "a=1"), run("sarathi", "a=2")._replace(folder=Path("sweep/x"))]
    assert choose_runs(runs, "a=1") == runs[:1] and choose_runs(runs, "x") == choose_runs(runs, "a=2") == runs[1:]
    assert choose_runs(runs, "") == runs
    with pytest.raises(ConfigError, match=r"runs=\.: no folder name contains this"):  # no pattern
        choose_runs(runs, ".")
    with pytest.raises(ConfigError, match=r"runs=sweep: no folder name contains this; there are orca,a=1, x ..."):
        choose_runs(runs, "sweep")
    with pytest.raises(ConfigError, match=r"there are a, b, c, d, e \.\.\.$"):
        choose_runs([run(name) for name in "abcdef"], "x")


def test_a_number_chooses_no_longer_one() -> None:
    runs = [run("orca", f"rate={rate}", "x=1") for rate in (4, 40, 4.5)]
    assert choose_runs(runs, "rate=4") == runs[:1] and choose_runs(runs, "rate=4.5|rate=40") == runs[1:]
    assert choose_runs(runs, "rate=") == runs


def test_lines_that_coincide_are_named() -> None:
    """a and c are equal at both x; b has the same values at another x."""
    rows = [
        (label, x, y)
        for label, xs in (("a", (1, 2)), ("b", (1, 3)), ("c", (1, 2)))
        for x, y in zip(xs, (5, 6), strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["label", "x", "y"])
    assert coincide_text(frame, ["x", "y"]) == "a and c coincide"
    assert coincide_text(frame.assign(y=range(6)), ["x", "y"]) == ""
    assert coincide_text(frame, ["y"]) == "a and b and c coincide"
    assert coincide_text(frame[::-1], ["x", "y"]) == "c and a coincide", "in the order of the lines"


def test_a_plot_shows_as_many_series_as_there_are_styles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in "ab":
        write_run(tmp_path / policy, {"policy": policy})
    monkeypatch.setattr(series, "MOST_SERIES", 2)
    assert load_series(tmp_path, "", ())["label"].to_list() == ["a", "b"]
    monkeypatch.setattr(series, "MOST_SERIES", 1)
    with pytest.raises(ConfigError, match="shows at most 1 series, the folder holds 2; choose with runs=TEXT"):
        load_series(tmp_path, "", ())


def test_labels_of_a_frame_pool_seeds(tmp_path: Path) -> None:
    """As in tables, so that the mean of a group is one over seeds."""
    for policy in "ab":
        for seed in (0, 1):
            settings = {"seed": seed, "workload": {"seed": seed}}
            write_run(tmp_path / f"{policy}{seed}", {"policy": policy}, settings, speed=1.0 + seed)
    means = load(tmp_path).groupby("label")["throughput.total_tokens_per_second"].mean()
    assert means.to_dict() == {"a": 1.5, "b": 1.5}


def test_labels_of_a_frame_are_those_of_the_table_also_where_runs_repeat_others(tmp_path: Path) -> None:
    """Orca's runs do not depend on `chunk`, so that the table shows one of them."""
    for policy, chunk in (("orca", 256), ("orca", 512), ("sarathi", 256)):
        about = {"policy": policy, "chunk": chunk if policy == "sarathi" else None, "overrides": [f"chunk={chunk}"]}
        write_run(tmp_path / f"{policy}{chunk}", about, {"chunk": chunk})
    assert load(tmp_path)["label"].to_list() == ["orca", "orca", "sarathi 256"]
    assert re.findall(r"^(?:orca|sarathi)[^\s]*(?: \d+)?", run_table(tmp_path), re.MULTILINE) == ["orca", "sarathi 256"]


def test_a_run_whose_table_was_cut_off_is_not_read(tmp_path: Path) -> None:
    table = write_run(tmp_path / "run") / "steps.csv"
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"steps\.csv: is cut off or changed"):
        load(tmp_path)


def test_the_frame_has_the_settings_as_they_were(tmp_path: Path) -> None:
    """Also `chunk` for a policy whose record says that it has no chunks, and lists; and the label."""
    for chunk in (128, 256):
        policy = {"budget": chunk, "sizes": [chunk, 1]}
        about = {"overrides": ["experiment=low", f"chunk={chunk}"]}
        write_run(tmp_path / f"{chunk}", about, {"chunk": chunk, "policy": policy})
    runs = load(tmp_path)
    assert runs["chunk"].to_list() == runs["policy.budget"].to_list() == [128, 256]
    assert runs["policy.sizes"].to_list() == [[128, 1], [256, 1]]
    assert runs["label"].to_list() == ["prefill_first, budget=128", "prefill_first, budget=256"]
    assert runs["experiment"].to_list() == ["low", "low"]
    assert runs.columns[:2].to_list() == ["name", "label"]


def test_seeds_make_one_series_and_separate_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"{seed}", {"overrides": [f"seed={seed}"]}, {"seed": seed, "workload": {"seed": seed}})
    assert load_runs(tmp_path)["label"].to_list() == ["prefill_first, seed=0", "prefill_first, seed=1"]
    assert load_series(tmp_path, "", ())["label"].to_list() == ["prefill_first"] * 2
    assert capsys.readouterr().err == ""


def test_a_measurement_that_was_repeated_is_one_series(tmp_path: Path) -> None:
    for name, speed in (("first", 1), ("second", 2)):
        write_run(tmp_path / name, speed=speed)
    assert load_series(tmp_path, "", ())["label"].to_list() == ["prefill_first"] * 2
    assert load_runs(tmp_path)["label"].to_list() == ["prefill_first, first", "prefill_first, second"]


def test_a_sweep_is_of_the_first_setting_that_has_several_values(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1, 1], "b": [1, 2], "c": [1, 2]})
    assert swept(frame, ("x", "a", "b", "c"), tmp_path, "1,2") == "b"
    with pytest.raises(ConfigError, match=r": needs runs with several values of a; sweep it with -m a=1,2") as caught:
        swept(frame, ("a", "x"), tmp_path, "1,2")
    assert str(caught.value).startswith(str(tmp_path))


def test_rates_need_several_values_of_each_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of `a` two rates were run, of `b` and of `c`, a trace, one."""
    rates = {"a": (1, 4), "b": (1,)}
    for workload, rate in [(name, rate) for name, found in rates.items() for rate in found]:
        write_run(tmp_path / f"{workload}{rate}", {"workload": workload}, {"workload": {"arrivals": {"rate": rate}}})
    write_run(tmp_path / "c", {"workload": "c"}, {"workload": {"speed": 1}})
    assert load_rates(tmp_path, "")["rate"].to_list() == [1, 4]
    assert capsys.readouterr().err == "2 runs not shown: has no rate\n  b1\n  c\n"
    says = r"b: needs runs with several values of workload\.arrivals\.rate; .* -m workload\.arrivals\.rate=1,2,4,8"
    with pytest.raises(ConfigError, match=says.replace("b:", ":")):
        load_rates(tmp_path, "b")


def test_means_of_a_series_stand_by_ascending_x() -> None:
    frame = pd.DataFrame({"label": "a", "x": [4, 1, 4], "y": [3.0, 2.0, 5.0]})
    points = summarize_series(frame, "x", "y")
    assert (points["x"].to_list(), points["mean"].to_list()) == ([1, 4], [2, 4])
    assert points["low"].to_list()[0] == points["high"].to_list()[0] == 2


def test_without_a_text_all_runs_are_shown(tmp_path: Path) -> None:
    for name, batch in (("first", 1), ("second", 2)):
        write_run(tmp_path / name, {"overrides": [f"batch={batch}"]}, {"batch": batch})
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "config.yaml").touch()
    assert [Path(folder).name for folder in load_runs(tmp_path)["folder"]] == ["first", "second"]
    assert [Path(folder).name for folder in load_runs(tmp_path, "batch=2")["folder"]] == ["second"]


def test_a_plot_says_which_code_differs(tmp_path: Path) -> None:
    for digest in "ab":
        write_run(tmp_path / digest, {"code": {"framework": digest, "own": {}}}, {"batch": digest})
    figure, _ = new_figure(1, 1, 2.0)
    add_title(figure, load_runs(tmp_path))
    below = figure.get_supxlabel().splitlines()
    assert below == ["measured on a computer", "made by different versions of cbatch; see about.code in summary.json"]
