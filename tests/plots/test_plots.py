"""`experiments.plot`: what is on the axes is what is in the results, and each plot is written for print."""

import inspect
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from commands import command, summary
from hand_made import write_run
from test_schedule_chart import with_decisions

from cbatch import ConfigError
from cbatch.sim.profile_file import load_profile
from experiments.plot import NAMES, main
from experiments.plots import composition, latency_cdf, series, table, throughput_vs_pd
from experiments.plots.series import load_runs
from experiments.store import selection
from experiments.store.runs import read_runs
from experiments.store.tables import load, load_requests, load_steps


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three policies at two P:D ratios; orca is run twice, as it takes no chunk."""
    folder = tmp_path_factory.mktemp("sweep")
    done = command(
        "run",
        "-m",
        "sweep=small",
        "policy=request_level,orca,sarathi",
        "chunk=128,256",
        "workload.pd_ratio=2,14",
        "workload.num_requests=36",
        "timeline=off",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder / "multirun" / "small"


@pytest.fixture(scope="module")
def one(sweep: Path) -> Path:
    return sweep / "chunk=256,policy=sarathi,workload.num_requests=36,workload.pd_ratio=2"


def test_throughput_has_a_line_for_each_policy_and_chunk(sweep: Path) -> None:
    speeds, gains = throughput_vs_pd.draw(sweep).axes
    drawn = {str(line.get_label()): line for line in speeds.get_lines()}
    assert list(drawn) == ["request_level", "orca", "sarathi 128", "sarathi 256"]  # the baseline first
    frame = load(sweep)
    for name, line in drawn.items():
        rows = frame[frame["name"] == name].drop_duplicates("workload.pd_ratio").sort_values("workload.pd_ratio")
        assert list(line.get_xdata()) == rows["workload.pd_ratio"].to_list() == [2, 14]
        assert np.allclose(line.get_ydata(), rows["throughput.total_tokens_per_second"] / 1e3)
    assert speeds.get_xscale() == gains.get_xscale() == "log"
    baseline = gains.get_lines()[0]
    assert list(baseline.get_ydata()) == [1.0, 1.0]


def test_without_the_baseline_only_throughput_is_shown(sweep: Path) -> None:
    assert len(throughput_vs_pd.draw(sweep, runs="sarathi").axes) == 1
    assert throughput_vs_pd.draw(sweep, baseline="orca").axes[1].get_ylabel() == "throughput over orca"


def test_distributions_run_from_the_least_to_the_greatest(one: Path) -> None:
    first, between, whole = latency_cdf.draw(one).axes
    requests = load_requests(one)
    for axes, values in ((first, requests["ttft_seconds"]), (whole, requests["end_to_end_seconds"])):
        [line] = axes.get_lines()
        assert (min(line.get_xdata()), max(line.get_xdata())) == pytest.approx((values.min(), values.max()))
        assert list(line.get_ydata()) == sorted(line.get_ydata())
    assert between.get_xlabel() == "time between tokens [ms]"


def test_composition_shows_one_run_over_time(one: Path) -> None:
    tokens, requests, memory = composition.draw(one).axes
    steps = load_steps(one)
    assert tokens.dataLim.y1 == steps[["num_prefill_tokens", "num_decode_tokens"]].sum(axis=1).max()
    assert max(requests.get_lines()[0].get_ydata()) == steps["num_running"].max()
    share = steps["kv_blocks_used"].max() / summary(one)["about"]["limits"]["kv_blocks"]
    assert max(memory.get_lines()[0].get_ydata()) == pytest.approx(share)
    assert memory.get_xlabel() == "time [s]"
    early = composition.draw(one, end=float(steps["started"].iloc[3])).axes[1].get_lines()[0]
    assert len(early.get_xdata()) == 4


def test_long_runs_are_drawn_as_means(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "_MOST_STEPS", 10)
    figure = composition.draw(one)
    assert len(figure.axes[1].get_lines()[0].get_xdata()) <= 10
    assert "means over" in figure.get_suptitle()


def test_the_table_is_markdown(sweep: Path) -> None:
    lines = table.text(sweep, runs="ratio=14").splitlines()
    head, rule, *rows = lines[: lines.index("")]
    assert head.startswith("| run")
    assert set(rule) <= set("|-: ")
    assert [row.split("|")[1].strip() for row in rows] == ["orca", "request_level", "sarathi 128", "sarathi 256"]
    assert [line for line in lines if "not shown" in line] == [
        f"1 run not shown: each differs from another run only in chunk, which {policy} does not read"
        for policy in ("orca", "request_level")
    ]
    assert sum(line.startswith("SIMULATED with profile h200") for line in lines) == 1


def test_every_plot_says_that_it_is_simulated(sweep: Path, one: Path) -> None:
    drawn = [throughput_vs_pd.draw(sweep), latency_cdf.draw(one), composition.draw(one)]
    compared = load_profile("h200").compared["async"]
    for figure in drawn:
        assert figure.get_supxlabel().startswith(f"SIMULATED with profile h200 ({compared.brief}; ")
        assert "llama-3.1-8b, closed, length 1024, batch 18" in (
            figure.get_suptitle() or figure.legends[0].get_title().get_text()
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_files(
    name: str, sweep: Path, one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate in (1, 2):
        write_run(tmp_path / f"{rate}", settings={"workload": {"arrivals": {"rate": rate}}})
    if name == "schedule":
        with_decisions(tmp_path / "small")
    of_rates = {"latency_vs_rate": tmp_path, "attainment": tmp_path, "service": tmp_path / "1"}
    of_rates |= {"schedule": tmp_path / "small"}
    folder = {"throughput_vs_pd": sweep, "table": sweep, **of_rates}.get(name, one)
    assert main([name, str(folder)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines() if line.startswith(str(folder))]
    assert [path.suffix for path in written] == ([".md"] if name == "table" else [".pdf", ".png"])
    assert all(path.stat().st_size > 500 for path in written)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["thruput", "."], "plot thruput: no such plot; did you mean throughput_vs_pd?"),
        (["{one}", "table"], "is a folder; give the plot first: python -m experiments.plot NAME"),
        (["table"], "plot table: needs a run's or sweep's folder"),
        (["table", "runs=3"], "plot table: needs a run's or sweep's folder"),
        (["table", "/no/such/folder"], "/no/such/folder: no such folder"),
        (["table", "{empty}"], "holds no finished run"),
        (["composition", "{sweep}"], "this plot shows one run, the folder holds 8"),
        (["composition", "{one}", "begin=1e9"], "no iteration starts in these seconds"),
        (["throughput_vs_pd", "{one}"], "needs runs with several values of workload.pd_ratio"),
        (["latency_vs_rate", "{one}"], "needs runs with several values of workload.arrivals.rate; sweep it with -m"),
        (["latency_vs_rate", "{one}", "percentiles=98"], "percentiles=98: choose among 50, 90, 95, 99"),
        (["attainment", "{one}"], "needs runs with several values of workload.arrivals.rate; sweep it with -m"),
        (["attainment", "{one}", "objective=tpot"], "objective=tpot: choose among joint, ttft, tbt, total"),
        (["attainment", "{one}", "goal=90"], "goal=90: give a share above 0, at most 1"),
        (["schedule", "{one}"], "decisions.jsonl.gz: no such file; record a run's decisions with decisions=true"),
        (["service", "{one}"], "no request names its client; choose a workload with clients"),
        (["table", "{sweep}", "runs=vllm"], "runs=vllm: no folder name contains this"),
    ],
)
def test_bad_requests_are_one_line(
    arguments: list[str], message: str, sweep: Path, one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(sweep=sweep, one=one, empty=tmp_path) for argument in arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_too_many_runs_are_refused(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [run, *_] = read_runs(sweep)
    found = [run._replace(settings={**run.settings, "batch": batch}) for batch in range(9)]
    monkeypatch.setattr(selection, "read_runs", lambda folder: found)
    with pytest.raises(ConfigError, match="shows at most 8 runs, the folder holds 9"):
        load_runs(sweep)


def test_a_sweep_without_rates_is_refused_for_that_and_not_for_its_many_series(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer series, as the other complaint advises, would not help."""
    monkeypatch.setattr(series, "MOST_SERIES", 1)
    with pytest.raises(ConfigError, match=r"needs runs with several values of workload\.arrivals\.rate"):
        series.load_rates(sweep, "")


@pytest.mark.parametrize("name", NAMES)
def test_help_lists_the_keys_of_each_plot(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out.partition(f"\n  {name} ")[2]
    described = takewhile(lambda line: line.startswith("      "), usage.splitlines()[1:])
    keys = {key for line in described for key in line.partition(":")[0].strip().split(", ")}
    module = import_module(f"experiments.plots.{name}")
    _, *parameters = inspect.signature(module.text if name == "table" else module.draw).parameters
    assert parameters and set(parameters) <= keys
