"""`experiments.plot`: each plot is drawn and written, with the looks that are asked for; what cannot be drawn is one line."""

from pathlib import Path

import pytest
from hand_made import write_run
from PIL import Image
from test_plots import SPEED, write_rates, write_ratios
from test_schedule_chart import with_decisions

from experiments.api import simulate
from experiments.plot import NAMES, main
from experiments.plots import curves
from experiments.plots.parts import label_log
from experiments.plots.style import Look, new_figure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("drawn") / "run")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    """Returns a folder for each plot."""
    root = tmp_path_factory.mktemp("command")
    rates = write_rates(root / "rates", "rate", (1, 2))
    ratios = write_ratios(root / "ratios", {"orca": {2: (1.0,), 14: (2.0,)}, "sarathi": {2: (1.5,), 14: (3.0,)}})
    others = dict.fromkeys(("throughput_vs_pd", "curves", "heatmap"), ratios) | {
        "schedule": with_decisions(root / "small"),
        "replicas": root / "replicas",
        "tradeoff": ratios,
    }
    keys = {"replicas": 2, "requests": 20, "output": root / "replicas", "timeline": False}
    simulate("orca", "open_loop", autoscale="fixed(replicas=1)", **keys)
    return {name: rates if "rate" in name or name == "attainment" else folder for name in NAMES} | others


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_files(name: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    curve, cells = (
        [f"y={SPEED}", "x=workload.pd_ratio"],
        ["x=workload.pd_ratio", "y=policy", f"value={SPEED}", "format=png"],
    )
    both = [f"x={SPEED}", "y=run.seconds", "format=png"]
    options = {"table": [], "curves": curve, "heatmap": cells, "tradeoff": both}.get(name, ["format=png"])
    formats = {"table": ["md"], "curves": ["pdf", "png"]}.get(name, ["png"])
    assert main([name, str(folders[name]), *options]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines() if line.startswith(str(folders[name]))]
    stem = ",".join([name, *(option for option in options if "format" not in option)])
    assert written == [folders[name] / "plots" / f"{stem}.{suffix}" for suffix in formats], (
        "another figure, another file"
    )
    assert all(path.stat().st_size > 500 for path in written)
    assert not any(b"/Type3" in path.read_bytes() for path in written), "fonts that publishers refuse"


@pytest.mark.long
def test_every_plot_takes_its_looks(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels that begin with _ are in the legend, and $ is no mathematics."""
    folder = folders["latency_vs_rate"]
    options = ["labels=prefill_first=_$1", "size=3.5,2", "title=$_$", "notes=false", f"output={tmp_path}/a.1.svg"]
    assert main(["latency_vs_rate", str(folder), *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/a.1.svg"
    assert (
        main(["table", str(folder), f"output={tmp_path}"]) == 0
        and "offered" in (tmp_path / "rates,table.md").read_text()
    )
    assert main(["table", str(folder), f"output={tmp_path}/new/"]) == 0 and [*(tmp_path / "new").glob("rates,table.md")]
    look = Look({"prefill_first": "_$1"}, size=(3.5, 2.0), title="My $x$", notes=False)
    figure = curves.latency_vs_rate(folder, look)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["_$1"] and legend.get_title().get_text() == "My $x$"
    assert not legend.get_title().get_parse_math()
    assert figure.get_size_inches().tolist() == [3.5, 2.0] and figure.get_supxlabel() == ""


@pytest.mark.long
def test_a_file_has_the_size_that_is_chosen_with_all_texts_inside(tmp_path: Path) -> None:
    """Six policies make a legend of three rows; 3.5 x 2.5 inches are 252 x 180 points."""
    write_ratios(
        tmp_path, {name: {2: (1.0,), 14: (2.0,)} for name in ("fcfs", "mlfq", "orca", "sarathi", "sjf", "vtc")}
    )
    assert main(["throughput_vs_pd", str(tmp_path), "size=3.5,2.5", "format=svg"]) == 0
    assert 'width="252pt" height="180pt"' in (tmp_path / "plots" / "throughput_vs_pd.svg").read_text()
    figure = curves.throughput_vs_pd(tmp_path, Look(size=(3.5, 2.5)))
    figure.draw_without_rendering()
    left, bottom, right, top = figure.get_tightbbox().extents
    assert min(left, bottom) >= 0 and right <= 3.5 and top <= 2.5


def test_an_axis_without_ticks_has_no_labels() -> None:
    _, [[panel]] = new_figure(1, 1, 2.0)
    panel.plot([1e-3, 1e3], [1, 2])
    panel.set_xscale("log")
    label_log(panel.xaxis)
    assert panel.xaxis.get_major_formatter().format_ticks([]) == []


OWN = """
from experiments.store.runs import read_runs
from matplotlib.figure import Figure
def draw(folder, look, column: str = "label"):
    return Figure(label=read_runs(folder)[column].iloc[0])
def fails(folder, look):
    return 1 / 0
def nothing(folder, look):
    pass
def few(folder):
    pass
def untyped(folder, look, size_of_it=3):
    pass
"""


def test_an_own_function_draws_a_plot(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_plots.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["own_plots.draw", str(folder), "column=model", f"output={tmp_path}/a.png"]) == 0
    with Image.open(tmp_path / "a.png") as drawn:
        assert drawn.info["Description"].splitlines()[1:] == ["llama-13b"]
    for name, message in {
        "draw": "colum: no such key; did you mean column?",
        "fails": "plot own_plots.fails: fails() raised ZeroDivisionError: division by zero (own_plots.py:7)",
        "nothing": "plot own_plots.nothing: returned a NoneType; return a matplotlib figure",
        "few": "plot own_plots.few: takes no (folder, look); see docs/adding.md",
        "untyped": "size_of_it has no type; annotate it",
        "drew": "did you mean own_plots.draw?",
    }.items():
        assert main([f"own_plots.{name}", str(folder), *["colum=model"] * (name == "draw")]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    """Returns folders of runs that some plots cannot draw."""
    root = tmp_path_factory.mktemp("bad")
    clientless = write_run(root / "clientless")
    (clientless / "requests.csv").write_text((clientless / "requests.csv").read_text().replace("ann", ""))
    (root / "empty").mkdir()
    unserved = write_run(root / "unserved", figures={"run": {"requests": 0, "iterations": 0}})
    for table in (unserved / "requests.csv", unserved / "steps.csv"):
        table.write_text(table.read_text().splitlines(keepends=True)[0])
    for speed in (1, 2):
        together = {"run": {"offered_requests_per_second": None}}
        of_speed = write_run(root / "together" / str(speed), {}, {"workload": {"speed": speed}}, figures=together)
        (of_speed / "requests.csv").unlink()
    (root / "together" / "errors.log").write_text("bad: no memory\n")  # a run that is not shown
    return {"one": folder, "clientless": clientless} | {name: root / name for name in ("empty", "unserved", "together")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["thruput", "."], "plot thruput: no such plot; did you mean throughput_vs_pd?"),
        (["{one}", "schedule"], "is a folder; give the plot first: python -m experiments.plot NAME"),
        (["schedule"], "plot schedule: needs a run's or sweep's folder"),
        (["table", "{empty}"], "holds no finished run"),
        (["schedule", "{one}", "frist=3"], "plot schedule: frist: no such key; did you mean first?"),
        (["latency_cdf", "{one}", "sise=3,2"], "plot latency_cdf: sise: no such key; did you mean size?"),
        (["schedule", "{one}"], "decisions.jsonl.gz: no such file; record a run's decisions with decisions=true"),
        (["composition", "{one}", "size=3"], "size=3: give width and height in inches"),
        (
            ["composition", "{one}", "size=3,1"],
            "size=3,1: leaves no room for the panels; give a larger one, or leave out",
        ),
        (["composition", "{one}", "labels=a"], "labels=a: give LABEL=TEXT"),
        (["composition", "{one}", "order=a"], "order: a: no such key; known: prefill_first"),
        (["composition", "{one}", "format=doc"], "format=doc: no such format; choose among "),
        (["throughput_vs_pd", "{one}"], "needs runs with several values of workload.pd_ratio; sweep it with -m "),
        (["latency_vs_rate", "{one}"], "sweep it with -m workload=open_loop workload.arrivals.rate=1,2,4,8"),
        (
            ["latency_vs_rate", "{together}", "percentiles=98"],
            "figure=ttft_seconds.p98: summary.json has no such number; did you mean ttft_seconds.p9",
        ),
        (["attainment", "{one}", "goal=90"], "goal=90: give a share above 0, at most 1"),
        (["curves", "{one}", "x=batch"], "plot curves needs y="),
        (["curves", "{one}", "x=label_", "y=run.iterations"], "x=label_: no run has this setting; did you mean label"),
        (["curves", "{together}", "x=rate", "y=run.iterations,run.preemption"], "did you mean run.preemptions"),
        (
            ["curves", "{one}", "x=policy", f"y={SPEED}"],
            "needs runs with several values of policy; sweep it with -m policy=",
        ),
        (["heatmap", "{together}", "x=batch", "y=seed", f"value={SPEED}"], "x=batch: no run has this setting"),
        (
            ["heatmap", "{together}", "x=batch", "y=seed", f"value={SPEED}", "xlim=1,2"],
            "plot heatmap: xlim: no such key",
        ),
        (["service", "{one}", "window=0"], "window=0: give a finite number above 0 (seconds)"),
        (["service", "{clientless}"], "no request names its client; choose a workload with clients"),
        (["latency_cdf", "{unserved}"], "no request was served, so there is no latency to draw; choose another run"),
        (["latency_cdf", "{together}"], "requests.csv: this run has no tables; run it again with tables=true"),
        (["composition", "{unserved}"], "the run has no iterations to draw; choose another run"),
        (["latency_vs_rate", "{together}"], "x=rate: requests arrive together, without a rate"),
        (["table", "{one}", "runs=vllm"], "runs=vllm: no folder name contains this"),
    ],
)
def test_bad_requests_are_one_line(
    arguments: list[str], message: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(**places) for argument in arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
