"""Which runs of a folder are shown, under which labels: whatever varies tells runs apart, and what is left out is named."""

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hand_made import ABOUT, write_run

from cbatch import ConfigError
from cbatch.described import merge_orders
from experiments.plots import series
from experiments.plots.series import check_few, describe_points, load_runs, load_series, points_of
from experiments.plots.style import Look
from experiments.report.labels import is_baseline, label_runs, merge_equal
from experiments.store.claim import UNFINISHED
from experiments.store.runs import (
    Omitted,
    choose_runs,
    drop_repeats,
    find_unfinished,
    frame_of,
    omitted_text,
    read_runs,
    select_runs,
)
from experiments.sweep import table_of_sweep

Result = tuple[Path, dict[str, Any]]
SPEED = "throughput.total_tokens_per_second"


def run(policy: str = "orca", *given: str, tokens: float = 1.0, **settings: Any) -> Result:
    """Makes a result. given: overrides. settings: by key, with __ for the dots."""
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    about = {**ABOUT, "policy": policy, "overrides": list(given), "identity": {"policy": policy, **keys}}
    return Path("sweep") / ",".join([policy, *given]), {
        "about": about,
        "throughput": {"total_tokens_per_second": tokens},
    }


def labels(*runs: Result, shown: tuple[str, ...] = (), apart: bool = False) -> list[str]:
    return label_runs(frame_of(runs), shown, apart=apart).to_list()


def test_a_label_is_the_policy_and_what_varies() -> None:
    """Not `b`, which is the same in all, nor what is on an axis, nor a seed."""
    runs = [run("orca", f"w.a={value}", w__a=value, b=1, seed=value) for value in (0.5, 2.0)]
    assert labels(*runs) == ["orca, a=0.5", "orca, a=2"]
    assert labels(*runs, shown=("w.a",)) == ["orca", "orca"]
    chunks = [run(f"sarathi(chunk={chunk})", policy__chunking__chunk=chunk) for chunk in (1, 2)]
    assert labels(*chunks) == ["sarathi(chunk=1)", "sarathi(chunk=2)"]
    assert labels(*chunks, shown=("policy.chunking.chunk",)) == ["sarathi", "sarathi"]
    assert labels(*[run(backend__pools__a__batch=size) for size in (4, 8)]) == ["orca, a.batch=4", "orca, a.batch=8"]
    assert labels(run(w__sizes=[1, 2]), run(w__sizes=[1, 3])) == ["orca, sizes=[1, 2]", "orca, sizes=[1, 3]"]
    assert labels(run("orca"), run("Mine", policy__size=1), run("Mine", policy__size=2)) == [
        *("orca", "Mine(size=1)", "Mine(size=2)")
    ]


def test_a_policy_has_the_arguments_that_vary_or_were_given_also_their_defaults() -> None:
    """The policy's own text lacks those equal to a default, here tbt=0.02, budget=512, k=3 and low; none was given for `fcfs`."""
    slow = run("Timed", "policy='mine.Timed(tbt=0.02)'", policy__tbt=0.02, policy__seed=1)
    fast = run("Timed(tbt=0.01)", "policy='mine.Timed(tbt=0.01)'", policy__tbt=0.01, policy__seed=2)
    urgent = run("urgent", "+policy.budget=512", policy__budget=512, policy__victim="last")
    drafts = run("orca(drafting=fixed)", "policy='orca(drafting=fixed(k=3))'", policy__drafting__k=3)
    chosen = run("orca(drafting=ema(low=1))", "drafting=ema(low=1,high=2)", policy__drafting__high=2)
    plain = run("fcfs", "policy=fcfs", policy__victim="last")
    assert labels(slow, fast, urgent, drafts, chosen, run("orca", "drafting=none"), plain) == [
        *("Timed(tbt=0.02)", "Timed(tbt=0.01)", "urgent(budget=512)", "orca(drafting=fixed(k=3))"),
        *("orca(drafting=ema(low=1, high=2))", "orca(drafting=none)", "fcfs"),
    ]
    assert labels(run("a text, of (its", "policy=x(a=1)", policy__a=1)) == ["a text, of (its"]


def test_the_labels_of_a_policy_have_their_arguments_in_one_order() -> None:
    """Defaults, age=200 and tpot=0.03, are where the other labels have them; `most`, the default of all, was given and follows."""
    texts = {(0.02, 0): "A(tpot=0.02, age=0, p=x)", (0.03, 0): "A(age=0, p=x)", (0.02, 200): "A(tpot=0.02, p=x)"}
    runs = [run(text, "policy.most=9", policy__tpot=t, policy__age=a, policy__most=9) for (t, a), text in texts.items()]
    assert labels(*runs) == [
        *("A(tpot=0.02, age=0, p=x, most=9)", "A(tpot=0.03, age=0, p=x, most=9)", "A(tpot=0.02, age=200, p=x, most=9)")
    ]
    assert merge_orders(["A(b=1, d=1)", "A(a=1, d=1)", "A(a=1, b=1)", "A"]) == ["a", "b", "d"]
    assert merge_orders(["A(a=1, b=1)", "A(b=1, a=1)"]) == [], "a user's text may have any order"


@pytest.mark.parametrize(
    ("given", "label"),
    [
        (["chunk=64"], "vllm_v1(chunk=64)"),
        (["policy='vllm_v1(chunk=64)'"], "vllm_v1(chunk=64)"),
        (["policy='vllm_v1(budget=64)'", "chunk=64"], "vllm_v1(budget=64)"),
        (["+policy.budget=64"], "vllm_v1(budget=64)"),
        ([], "vllm_v1(chunk=64)"),
    ],
)
def test_an_argument_that_follows_the_chunk_is_called_so_unless_it_was_given(given: list[str], label: str) -> None:
    settings = {"policy__budget": 64, "policy__k": 8, "policy__lone": True}
    folder, result = run("vllm_v1(budget=64)", *given, **settings)
    other = run("vllm_v1(budget=640)", "chunk=640", **settings | {"policy__budget": 640})
    for about, size in ((result["about"], 64), (other[1]["about"], 640)):
        about["chunk"] = size
    frame = frame_of([(folder, result), other])
    assert frame["label"].to_list() == [label, "vllm_v1(chunk=640)"]
    both = run("Mine(budget=64, chunk=64)", "chunk=64", policy__budget=64, policy__chunking__chunk=64)
    both[1]["about"]["chunk"] = 64
    assert frame_of([both])["label"].to_list() == ["Mine(budget=64, chunk=64)"]
    assert is_baseline(frame, "vllm_v1(budget=64)").to_list() == is_baseline(frame, label).to_list() == [True, False]


def test_an_object_has_its_arguments_with_it_not_behind_the_policy() -> None:
    """Arguments that tell runs of the same object apart, or that were given; on an axis the argument is not in the label."""
    ages = [run("sarathi", backend__router="mine.Aging", backend__router__free=free) for free in (0.1, 0.2)]
    other = run("sarathi", backend__router="least_loaded")
    assert labels(*ages, other) == [
        "sarathi, router=Aging(free=0.1)",
        "sarathi, router=Aging(free=0.2)",
        "sarathi, router=least_loaded",
    ]
    assert labels(ages[0], other) == ["sarathi, router=Aging", "sarathi, router=least_loaded"]
    assert labels(*ages, shown=("backend.router.free",)) == ["sarathi", "sarathi"]
    weights = [run("orca", eviction="marconi", eviction__alpha=alpha) for alpha in (0.5, 2.0)]
    assert labels(*weights) == ["orca, eviction=marconi(alpha=0.5)", "orca, eviction=marconi(alpha=2)"]
    scalers = [
        run("orca", f"autoscale='fixed(replicas={number})'", autoscale="fixed", autoscale__replicas=number)
        for number in (4, 5)
    ]
    needs = run("orca", "autoscale=needs(window=9)", autoscale="needs", autoscale__window=9, autoscale__up=2)
    assert labels(scalers[0], needs) == ["orca, autoscale=fixed(replicas=4)", "orca, autoscale=needs(window=9)"], (
        "as given"
    )
    assert labels(*scalers) == ["orca, autoscale=fixed(replicas=4)", "orca, autoscale=fixed(replicas=5)"]
    assert labels(needs, run("orca")) == ["orca, autoscale=needs(window=9)", "orca"]
    assert labels(run(backend__router="a.Mine"), run(backend__router="b.Mine"))[0] == "orca, router=a.Mine"


def test_runs_with_a_seed_and_runs_without_are_no_replications_of_each_other() -> None:
    """Three of `noisy` with its seed and three without, of a policy that does not print its predictor: two rows, not one of six."""
    noisy = [run("R", seed=seed, policy__predictor__seed=seed) for seed in range(3)]
    assert labels(*noisy, *(run("R", seed=seed) for seed in range(3))) == ["R, seed=any"] * 3 + ["R, seed=none"] * 3
    assert labels(*noisy) == ["R"] * 3


def test_what_follows_from_settings_that_are_named_is_left_out() -> None:
    """Settings of the command line come first: here `batch`, from which `tokens` follows."""
    runs = [run("orca", f"batch={size}", a_tokens=8 * size, batch=size) for size in (4, 18)]
    assert labels(*runs) == ["orca, batch=4", "orca, batch=18"]
    workloads = [run("orca", f"workload={name}", w__path=name) for name in "xy"]
    for each, name in zip(workloads, "xy", strict=True):
        each[1]["about"]["workload"] = name
    assert labels(*workloads) == ["orca, workload=x", "orca, workload=y"]
    assert labels(*workloads, shown=("workload",)) == ["orca", "orca"]


def test_a_label_names_what_tells_the_run_from_others_and_always_the_workload() -> None:
    """The size of the cache tells runs of `orca` apart, and not those of `sarathi`."""
    runs = [("orca", 8, "lru", "chat"), ("orca", 9, "lru", "chat"), ("sarathi", 9, "lru", "chat")]
    runs += [("sarathi", 9, "lfu", "chat"), ("vtc", 9, "lru", "queued")]
    made = [run(name, f"workload={workload}", kv=kv, eviction=eviction) for name, kv, eviction, workload in runs]
    for each, (*_, workload) in zip(made, runs, strict=True):
        each[1]["about"]["workload"] = workload
    assert [text.replace(", workload=", " on ") for text in labels(*made)] == [
        *("orca on chat, kv=8", "orca on chat, kv=9", "sarathi on chat, eviction=lru", "sarathi on chat, eviction=lfu"),
        "vtc on queued",
    ]


def test_runs_that_differ_in_code_alone_or_in_nothing_can_be_told_apart() -> None:
    runs = [run("Mine"), run("Mine"), run("Mine")]
    for own, each in zip(({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "3"}), runs, strict=True):
        each[1]["about"]["code"] = {"framework": "f", "own": own}
    assert frame_of(runs)["code.framework"].to_list() == ["f"] * 3
    first, again, edited = labels(*runs)
    assert first == again != edited and first.startswith("Mine, code=")
    assert labels(run(seed=0), run(seed=1), apart=True) == ["orca, seed=0", "orca, seed=1"]
    twice = [(Path(f"runs/{name}"), run(tokens=tokens)[1]) for name, tokens in (("a", 1), ("b", 2))]
    assert labels(*twice, apart=True) == ["orca, a", "orca, b"] and labels(*twice) == ["orca", "orca"]


def test_keys_and_paths_are_as_long_as_it_takes_to_tell_them_apart() -> None:
    runs = [run("orca", f"a.n={a}", f"b.n={b}", a__n=a, b__n=b) for a in (1, 2) for b in (1, 2)]
    assert labels(*runs)[1] == "orca, a.n=1, b.n=2"
    assert labels(run(path="/a/x.csv"), run(path="/a/y.csv")) == ["orca, path=x.csv", "orca, path=y.csv"]
    assert labels(run(path="/a/x.csv"), run(path="/b/x.csv")) == ["orca, path=/a/x.csv", "orca, path=/b/x.csv"]
    assert labels(*(run(p__lengths___target_=f"a.b.{name}") for name in "XY")) == ["orca, lengths=X", "orca, lengths=Y"]
    assert labels(run(share=0.1234567), run(share=0.1234568)) == ["orca, share=0.1234567", "orca, share=0.1234568"]


def test_a_text_names_runs_by_label_or_policy_with_or_without_arguments() -> None:
    runs = frame_of([run("orca"), run("Two(a=1)"), run("Two(a=2)"), run("orca", batch=8)])
    named = {text: [*is_baseline(runs, text)] for text in ("orca", "Two", "Two(a=2)", "orca, batch=8")}
    assert named == {
        "orca": [True, False, False, True],
        "Two": [False, True, True, False],
        "Two(a=2)": [False, False, True, False],
        "orca, batch=8": [False, False, False, True],
    }


# -- frames of runs ---------------------------------------------------------------------------------------------------


def test_the_frame_has_the_settings_as_they_were(tmp_path: Path) -> None:
    """Lists too; rows as in the sweep. A policy that does not print a parameter has those that vary in its label."""
    for number, chunk in enumerate((256, 128)):
        settings = {"policy": {"budget": chunk, "sizes": [chunk, 1]}}
        write_run(tmp_path / f"{chunk}", {"overrides": [f"chunk={chunk}"], "number": number}, settings)
    runs = read_runs(tmp_path)
    assert runs["policy"].to_list() == [f"prefill_first(budget={size}, sizes=[{size},1])" for size in (256, 128)]
    assert runs["policy.budget"].to_list() == [256, 128]
    assert runs["policy.sizes"].to_list() == [[256, 1], [128, 1]]
    assert runs["label"].to_list() == runs["policy"].to_list()


def test_labels_pool_seeds_and_repeated_runs_are_shown_once(tmp_path: Path) -> None:
    """Orca's runs do not depend on `chunk`: the frame has both, the table one."""
    for policy, chunk in (("orca", 256), ("orca", 512), ("sarathi", 256)):
        about = {"policy": policy, "chunk": chunk, "overrides": [f"chunk={chunk}"]}
        write_run(tmp_path / f"{policy}{chunk}", about, {"workload": {"length": 8, "seed": 0}})
    write_run(tmp_path / "seed", about, {"workload": {"length": 8, "seed": 1}}, speed=1.0)
    assert read_runs(tmp_path)["label"].to_list() == ["orca", "orca", "sarathi", "sarathi"]
    lines = table_of_sweep(tmp_path).splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["orca", "sarathi"]
    assert "1 run not shown: each repeats another run: orca does not read what differs" in lines


def test_runs_that_are_chosen_are_labelled_by_what_differs_among_them(tmp_path: Path) -> None:
    for batch in (1, 2):
        write_run(tmp_path / f"batch={batch}", {"policy": "orca"}, {"batch": batch})
    assert select_runs(tmp_path, "")[0]["label"].to_list() == ["orca, batch=1", "orca, batch=2"]
    assert select_runs(tmp_path, "batch=1")[0]["label"].to_list() == ["orca"]


# -- runs that are not shown ------------------------------------------------------------------------------------------


def test_a_run_that_repeats_another_is_left_out() -> None:
    runs = [run("orca", f"chunk={size}", batch=1) for size in (1, 2)]
    kept, omitted = drop_repeats(frame_of([*runs, run("orca", "chunk=2,batch=2", batch=2)]))
    assert kept["folder"].to_list() == ["sweep/orca,chunk=1", "sweep/orca,chunk=2,batch=2"]
    assert [reason for _, reason in omitted] == ["each repeats another run: orca does not read what differs"]
    measured = frame_of([run(tokens=1), run(tokens=2), run(day=date(2026, 1, 1)), run(day=date(2026, 1, 2))])
    assert len(drop_repeats(measured)[0]) == 4


def test_the_reasons_are_listed_with_the_names() -> None:
    omitted = [Omitted("a", "x"), Omitted("b", "y"), Omitted("c", "x")]
    assert omitted_text(omitted) == "2 runs not shown: x\n  a\n  c\n1 run not shown: y\n  b"
    assert omitted_text([]) == ""


def test_unfinished_runs_are_named_with_the_reason(tmp_path: Path) -> None:
    """Failed before or after its folder was made, still running or killed, without a report, unreadable, and run again since."""
    write_run(tmp_path / "whole")
    for name, report in {"failed": {"error": "no memory"}, "running": {"status": "begun"}, "lost": None}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
        if report is not None:
            (tmp_path / name / UNFINISHED).write_text(json.dumps(report))
    (tmp_path / "damaged").mkdir()
    for name, text in {"config.yaml": "", "summary.json": "garbage"}.items():
        (tmp_path / "damaged" / name).write_text(text)
    (tmp_path / "errors.log").write_bytes(b"chunk=0: chunk=0: give 1 or more\nwhole: failed\nx: p\xe9 is no path\n")
    assert find_unfinished(tmp_path) == [
        Omitted("chunk=0", "chunk=0: give 1 or more"),
        Omitted("x", "p\ufffd is no path"),
        Omitted("damaged", "summary.json is damaged; run it again"),
        Omitted("failed", "no memory"),
        Omitted("lost", "did not finish"),
        Omitted("running", "is running, or was killed"),
    ]
    assert [each.name for each in select_runs(tmp_path, "l")[1]] == ["failed", "lost"]


def test_runs_are_chosen_by_the_names_of_their_folders_or_by_their_overrides() -> None:
    hashed = run("vtc", "rate=4.5,policy='vtc(a=1)',~12ab34cd")
    runs = frame_of([run("orca", "rate=4"), (Path("sweep/x"), run("orca", "rate=40")[1]), hashed])

    def chosen(text: str) -> list[int]:
        return choose_runs(runs, text).index.to_list()

    texts = {"rate=4": [0], "x": [1], "rate=40|vtc": [1, 2], "": [0, 1, 2], "rate=": [0, 1, 2], "policy=vtc": [2]}
    texts |= {"vtc(a=1)": [2], "orca": [0, 1]}  # as labels name them
    assert {text: chosen(text) for text in texts} == texts
    for text in ("*", "sweep", "policy=vt", "ab34"):  # no pattern, no name of a run, no whole value, a hash
        whole = ", as values after = are compared whole" * (text == "policy=vt")
        parts = r"known: orca, rate=4, rate=4\.5, vtc, x$"  # in which the names differ, but for what is cut off before a hash
        with pytest.raises(ConfigError, match=f"no folder name contains this{whole}; .*{parts}"):
            chosen(text)


# -- what plots make of them ------------------------------------------------------------------------------------------


def test_a_plot_shows_as_many_series_and_runs_as_it_can_and_says_which_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy in "ab":
        write_run(tmp_path / policy, {"policy": policy})
    (tmp_path / "errors.log").write_text("bad: no memory\n")
    monkeypatch.setattr(series, "MOST_SERIES", 2)
    assert load_series(tmp_path)["label"].to_list() == ["a", "b"]
    assert load_runs(tmp_path, Look(runs="b"), most=1)["label"].to_list() == ["b"]
    assert capsys.readouterr().err == 2 * "1 run not shown: no memory\n  bad\n"
    with pytest.raises(ConfigError, match="at most 1 run, the folder holds 2"):
        load_runs(tmp_path, most=1)
    monkeypatch.setattr(series, "MOST_SERIES", 1)
    with pytest.raises(ConfigError, match="shows at most 1 series, the folder holds 2"):
        check_few(load_series(tmp_path))


def test_labels_are_replaced_and_ordered_by_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in "abc":
        write_run(tmp_path / policy, {"policy": policy})
    look = Look({"c": "Ours"}, ["c", "b"])
    assert load_series(tmp_path, look)["label"].to_list() == ["Ours", "b", "a"]
    for batch in (2, 24):
        write_run(tmp_path / "parts" / f"{batch}", {"policy": "sarathi_serve(chunk=2)"}, {"batch": batch})
        write_run(tmp_path / "parts" / f"a{batch}", {"policy": "sarathi"}, {"batch": batch})
    parts = Look({"sarathi": r"\1", "batch=2": "small", "sarathi_serve(chunk=2)": "Serve"})
    assert {*load_series(tmp_path / "parts", parts)["label"]} == {
        *("Serve, small", "Serve, batch=24", r"\1, small", r"\1, batch=24")
    }
    for unknown in (Look({"d": "Ours"}), Look(order=["d"])):
        with pytest.raises(ConfigError, match="d: no such key"):
            load_series(tmp_path, unknown)
    monkeypatch.setattr(series, "select_runs", lambda *_: (many, []))
    many = frame_of([run("orca", f"seed={seed}", seed=seed) for seed in range(40)])
    chosen = Look(order=["orca, seed=30"])
    assert load_runs(tmp_path, chosen, 40)["seed"].to_list() == [30, *(seed for seed in range(40) if seed != 30)]
    assert load_series(tmp_path)["seed"].to_list() == [*range(40)], "equal labels stay in the order of the sweep"


def test_lines_that_coincide_are_one() -> None:
    """a and c are equal at both x; b has the same values at another x."""
    xs = {"a": (1, 2), "b": (1, 3), "c": (1, 2)}
    rows = [(label, x, y) for label in xs for x, y in zip(xs[label], (5, 6), strict=True)]
    frame = pd.DataFrame(rows, columns=["label", "x", "y"])
    assert merge_equal(frame, ["x", "y"])["label"].to_list() == ["a = c", "a = c", "b", "b"]
    assert merge_equal(frame.assign(y=range(6)), ["x", "y"])["label"].to_list() == frame["label"].to_list()
    assert merge_equal(frame[::-1], ["x", "y"])["label"].to_list() == ["c = a"] * 2 + ["b"] * 2, "in the lines' order"


def test_points_are_means_with_intervals_by_ascending_x() -> None:
    """The values 1 and 3 have a standard error of 1: the interval is 12.706 to either side. Labels keep the order of the frame."""
    frame = pd.DataFrame({"label": list("qppp"), "x": [2, 4, 4, 1], "y": [4.0, 1.0, 3.0, 2.0]})
    points = points_of(frame, "x", "y")
    assert points[["label", "x", "mean"]].to_numpy().tolist() == [["q", 2, 4], ["p", 1, 2], ["p", 4, 2]]
    assert points["low"].to_list() == pytest.approx([math.nan, math.nan, 2 - 12.706], rel=1e-4, nan_ok=True)
    assert points["high"].to_list() == pytest.approx([math.nan, math.nan, 2 + 12.706], rel=1e-4, nan_ok=True)
    assert describe_points(frame_of([run(), run("vtc")]).assign(x=1), "x") == ""
    pair = frame_of([run(), run(tokens=2), run("vtc")]).assign(x=1)
    for runs, text in (
        (pair, "mean and 95% interval of up to 2 runs per point"),
        (pair[:2], "mean and 95% interval of 2 runs per point"),
        (pair[[True, False, True]].assign(label="a"), "2 equal runs per point: the seed changes nothing"),
    ):
        assert describe_points(runs, "x") == text
    shares = points_of(
        frame.assign(y=[0.5, 0.9, 1.0, 0.5]).rename(columns={"y": "attainment.share"}), "x", "attainment.share"
    )
    interval = [95 - 5 * 12.706, 100]  # 158.5 is no share
    assert shares.iloc[2][["low", "high"]].to_list() == pytest.approx(interval, rel=1e-4)
    latencies = points_of(frame.rename(columns={"y": "tbt_seconds.p50"}), "x", "tbt_seconds.p50")
    assert latencies["mean"].to_list() == [4000, 2000, 2000]
    assert latencies["low"].iloc[2] == pytest.approx(2000 - 12706, rel=1e-4), (
        "that of the table, on a logarithmic axis too"
    )
