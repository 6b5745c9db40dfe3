"""Figures and claims: the contract of a figure, every claim as it is stored, and what a figure leaves, simulated and with real tokens."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pandas as pd
import pytest
from matplotlib.figure import Figure
from places import RESULTS

from cbatch import BatchShape, ConfigError
from cbatch.sim import PROFILES
from experiments.settings.presets import load_spec
from reproduction.papers import __main__ as command
from reproduction.papers import a6000, claims, gallery, panels, quantities
from reproduction.papers.claims import Claim, Verdict, check, quantity_of, read_claims
from reproduction.papers.closure import closure_claims, error_of_gains
from reproduction.papers.figures import fig9, fig11
from reproduction.papers.machines import Machines, origin_of
from reproduction.papers.panels import Panel
from reproduction.papers.real import RealSteadyState, on_cpu
from reproduction.papers.steady import Load, Scheme
from reproduction.papers.verdicts import conclusion

CLAIMS = read_claims()
QUICK = ("fig5", "fig7", "fig8", "fig10", "table2", "table4", "graph_gain", "tile_curve")
"""Figures that are made within seconds, simulated or of stored measurements."""


@cache
def machines() -> Machines:
    return Machines()


def silent(text: str) -> None:
    """Progress is not shown."""


def stored(name: str) -> dict[str, float]:
    """Our value of each claim, by its id, in the results file of a figure."""
    file = json.loads((RESULTS / "paper" / f"{name}.json").read_text())
    return {row["id"]: row["ours"] for row in file["claims"]}


@pytest.mark.parametrize("name", [*gallery.names(), *gallery.landscape()])
def test_a_figure_keeps_the_contract(name: str) -> None:
    """`measure` and `draw`, perhaps `text`; every other public function of the module is a quantity of its data."""
    module = gallery.module_of(name)
    assert list(inspect.signature(module.measure).parameters) == ["machines", "say"]
    assert list(inspect.signature(module.draw).parameters) == ["data", "printed"]
    assert gallery.about(name), "the docstring's first line says what is shown"
    for other, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__ and not other.startswith("_"):
            assert function.__doc__ or "data" in inspect.signature(function).parameters, f"{other} says what it is"


class Immediate:
    """A machine that answers at once, with any number; it takes what a machine takes and nothing else."""

    @property
    def cost(self) -> "Immediate":
        return self

    def gain(self, scheme: str, load: Load, chunk: int) -> float:
        assert scheme in get_args(Scheme) and chunk > 0 and min(load.length, load.batch, load.pd_ratio) > 0
        return 2.0 + chunk

    def predict(self, shape: BatchShape) -> float:
        return 1.0 + shape.num_tokens + shape.num_decodes

    def parts(self, shape: BatchShape) -> Any:
        return SimpleNamespace(linear=self.predict(shape), attention=self.predict(shape))


def ask(claim: Claim) -> None:
    """Whether the quantity takes the claim's settings."""
    function, from_data = quantity_of(claim, gallery.module_of(claim.figure))
    if from_data:
        known = {"hardware": claim.hardware} if "hardware" in inspect.signature(function).parameters else {}
        inspect.signature(function).bind(None, **{**known, **claim.setting})
    else:
        assert isinstance(function(Immediate(), **claim.setting), float)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_can_be_checked(claim: Claim) -> None:
    ask(claim)
    for name, value in claim.setting.items():
        mistyped = {**claim.setting, f"{name}s": value}
        del mistyped[name]
        with pytest.raises(TypeError, match=f"{name}s?'"):
            ask(replace(claim, setting=mistyped))
    assert claim.expected == "held" or claim.note, "what is expected to fail says why"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the command has made the quick figures."""
    folder = tmp_path_factory.mktemp("results")
    assert command.main([*QUICK, f"folder={folder}"]) == 0
    return folder / "paper"


@pytest.mark.parametrize("name", QUICK)
def test_a_figure_leaves_its_files_and_its_claims_are_those_stored(made: Path, name: str) -> None:
    drawn = ("md",) if name.startswith("table") else ("png", "pdf")
    assert {path.name for path in made.glob(f"{name}.*")} == {f"{name}.{ending}" for ending in (*drawn, "csv", "json")}
    left = json.loads((made / f"{name}.json").read_text())
    assert left["command"].startswith("python -m reproduction.papers") and left["date"] and left["versions"]
    ours = {row["id"]: row["ours"] for row in left["claims"]}
    of_a100 = {claim.id for claim in read_claims(name) if claim.hardware == "a100"}
    assert ours == pytest.approx({id_: value for id_, value in stored(name).items() if id_ not in of_a100}, rel=1e-4)
    assert not any(row["outcome"] == "missed" and not row["note"] for row in left["claims"])


@pytest.mark.parametrize("name", QUICK)
def test_a_figure_is_drawn_from_its_table_alone(made: Path, name: str) -> None:
    """Every axis says what it shows."""
    data = pd.read_csv(made / f"{name}.csv")
    drawn: Figure | str = gallery.module_of(name).draw(data, read_claims(name))
    if isinstance(drawn, str):
        table, origin = (made / f"{name}.md").read_text().split("\n\n")
        assert table == drawn and "SIMULATED with profile" in origin
        return
    for axes in drawn.axes:
        assert axes.get_ylabel() or axes.get_shared_y_axes().get_siblings(axes) != [axes] or name == "fig5"


def test_sarathis_end_results_follow_from_its_single_iterations() -> None:
    """All claims of SARATHI on the A6000, as stored, and the error that its profile states."""
    chosen = [claim for claim in closure_claims() if claim.hardware == "a6000"]
    verdicts = list(check(chosen, machines(), quantities, pd.DataFrame()))
    assert not any(verdict.failed for verdict in verdicts)
    ours = {verdict.claim.id: verdict.value for verdict in verdicts}
    assert ours == pytest.approx({id_: value for id_, value in stored("closure").items() if id_ in ours}, rel=1e-4)
    assert len({claim.id for claim in chosen if claim.gain is not None}) == 11
    file = json.loads((PROFILES / f"{a6000.NAME}.json").read_text())
    assert file["error"] == error_of_gains(verdicts)[0]
    assert file == json.loads(json.dumps(a6000.profile(file["error"], file["compared"]["sync"]["brief"])))


def test_what_is_absent_is_left_out_and_said(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = "a100 is left out: give tables=.../aiconfigurator/a100_sxm"
    assert json.loads((made / "table4.json").read_text())["left_out"] == [missing]
    monkeypatch.setattr("reproduction.papers.frames.read_benchmark", lambda name: None)
    assert command.main(["graph_gain", f"folder={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: graph_gain: left out: reproduction/results/h200/graphs.json ")
    assert told.count("\n") == 1 and not list(tmp_path.iterdir())


def test_an_interrupted_figure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(machines: Machines, say: object) -> pd.DataFrame:
        raise KeyboardInterrupt

    monkeypatch.setattr(gallery.module_of("fig8"), "measure", interrupt)
    assert command.main(["fig8", f"folder={tmp_path}"]) == 130
    assert not list(tmp_path.rglob("*"))


def test_a_claim_that_fails_is_explained_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    claim = Claim(id="c", figure="fig8", where="Fig 8", quantity="largest", at_least=20, note="because of this")
    module = gallery.module_of("fig8")
    data = pd.DataFrame({"hardware": ["a6000"], "series": [1024], "batch": [2], "value": [9.8]})
    assert not list(check([Claim(**{**vars(claim), "hardware": "a100"})], Machines(), module, data)), "no data of it"
    (verdict,) = check([Claim(**{**vars(claim), "hardware": "a6000"})], Machines(), module, data)
    assert verdict.value == 9.8 and verdict.failed
    held = Verdict(Claim(id="d", figure="fig8", where="", quantity="largest", at_least=1), 9.8)
    text = gallery.totals([gallery.Shown("fig8", [verdict, held], 1.0, [], "")])
    assert text.startswith("2 independent claims tested: 1 held, 1 missed")
    assert "missed: c, Fig 8: >= 20, ours 9.8: because of this" in text


@pytest.mark.parametrize(
    ("demand", "value", "outcome"),
    [
        ({"printed": 1.20, "gain": 0.15}, 1.229, "held"),  # 15% of a gain of 0.20 is 0.03
        ({"printed": 1.20, "gain": 0.15}, 1.24, "missed"),
        ({"printed": 1.20, "gain": 0.15}, 1.16, "missed"),
        ({"printed": 6.29, "share": 0.15, "at_least": 1}, 7.0, "held"),
        ({"printed": 6.29, "share": 0.15, "at_least": 1}, 36.8, "same direction"),
        ({"printed": 6.29, "share": 0.15, "at_least": 1}, 0.9, "missed"),
        ({"at_least": 1.05}, 1.06, "held"),
        ({"at_least": 1.05}, 1.04, "missed"),
        ({"printed": 55.0, "within": 1.0, "derived_from": "the profile"}, 55.5, "derived"),
        ({"printed": 55.0, "within": 1.0, "derived_from": "the profile"}, 57.0, "missed"),
        ({"printed": 30, "share": 0.1, "expected": "not comparable", "note": "another GPU"}, 30, "not comparable"),
    ],
)
def test_the_outcome_of_a_claim(demand: dict[str, Any], value: float, outcome: str) -> None:
    verdict = Verdict(Claim(id="c", figure="fig9", where="", quantity="gain", **demand), value)
    assert verdict.outcome == outcome
    assert verdict.failed == (outcome == "missed")


@pytest.mark.parametrize(
    ("peak", "holds"), [(7.0, True), (9.0, True), (15.0, False), (4.0, False), (31.0, False), (3.0, False)]
)
def test_a_peak_may_be_one_step_of_the_grid_away(peak: float, holds: bool) -> None:
    """Outputs 256 to 32 of 1,024 tokens are P:D 3, 4, 7, 9, 15 and 31; printed is 8.0, between 7 and 9."""
    outputs = [256, 204.8, 128, 102.4, 64, 32]
    setting = {"length": 1024, "outputs": outputs}
    claim = Claim(id="c", figure="fig9", where="", quantity="peak_pd_ratio", printed=8.0, steps=1, setting=setting)
    assert claim.holds(peak) == holds, "a peak at an end of the grid is not found: it may lie beyond"


def test_outcomes_are_counted_apart() -> None:
    """A claim that follows from inputs is no evidence, and one that cannot be compared is not tested."""

    def verdict(value: float, **demand: Any) -> Verdict:
        return Verdict(Claim(id="c", figure="fig9", where="", quantity="gain", **demand), value)

    verdicts = [
        verdict(2, at_least=1),
        verdict(2, at_least=1, derived_from="inputs"),
        verdict(2, at_least=3, expected="missed", note="why"),
        verdict(2, printed=9, share=0.1, at_least=1),
        verdict(2, printed=9, share=0.1, expected="not comparable", note="why"),
    ]
    assert conclusion(verdicts) == (
        "3 independent claims tested: 1 held, 1 in the same direction but not reproduced, 1 missed; "
        "1 not comparable, 1 derived from inputs or other claims"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fig99"], "'fig99' is not a figure, a command or an option key=value; did you mean fig9?"),
        (["fig8", "hardware=tpu"], "hardware=tpu: give sim, or gpu for this machine's GPU"),
        (["fig8", "table=x"], "table: no such key; did you mean tables?"),
        (["fig8", "tables=/nowhere"], "/nowhere: no tables known here"),
        (["clousre"], "'clousre' is not a figure, a command or an option key=value; did you mean closure?"),
        (["closure", "table=x"], "closure: table: no such key; did you mean tables?"),
        (["served"], "served needs tables=..."),
        (["closure", "tables"], "'tables' is not a figure, a command or an option key=value"),
        (["fig12", "tables=/nowhere", "links=/nowhere"], "/nowhere: no tables known here"),
        (
            ["fig12_sensitivity", "tables=x", "links=y", "num_requests=0"],
            "num_requests=0: give a whole number, at least 1",
        ),
        (["served", "tables=/nowhere"], "requests.jsonl.gz: cannot read the run"),
    ],
)
def test_wrong_commands_are_answered_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("id: x, figure: fig9, where: y, quantity: gain", "claim x: give printed with one of within"),
        ("id: x, figure: fig9, where: y, quantity: gain, within: 0.1", "claim x: give printed with one of within"),
        (
            "id: x, figure: fig9, where: y, quantity: gain, atleast: 1",
            "claim x: atleast: no such key; did you mean at_least",
        ),
        ("id: x, where: y, quantity: gain, at_least: 1", "claim x: .*missing.*figure"),
        (
            "id: x, figure: fig9, where: y, quantity: gain, at_least: 1}\n- {id: x, figure: fig9, where: y, quantity: gain, at_least: 1",
            "claim x: this id is taken",
        ),
    ],
)
def test_claims_that_cannot_be_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, says: str
) -> None:
    monkeypatch.setattr(claims, "FOLDER", tmp_path)
    (tmp_path / "c.yaml").write_text(f"- {{{entry}}}")
    with pytest.raises(ConfigError, match=says):
        read_claims()


@pytest.fixture(scope="module")
def real() -> Iterator[RealSteadyState]:
    """A small model, whose tokens are computed on this machine."""
    state = on_cpu(load_spec("tiny"), Load(64, 4, 3))
    yield state
    state.close()


def test_loads_are_served_with_real_tokens(real: RealSteadyState) -> None:
    """One executor serves several loads and schemes; a load that was served is known."""
    first = real.seconds("sarathi", Load(64, 4, 3), 16)
    assert first > 0 and real.seconds("sarathi", Load(64, 4, 3), 16) == first
    assert real.seconds("orca_best", Load(32, 2, 3)) > 0 and real.gain("orca_worst", Load(64, 4, 3)) > 0


def test_figures_are_made_with_real_tokens(
    real: RealSteadyState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same code as with hardware=gpu: figures that serve, with small requests."""
    for module in (fig9, fig11, panels):
        monkeypatch.setattr(module, "PANELS", (Panel(64, 4), Panel(48, 3)))
    for module in (fig9, fig11):
        monkeypatch.setattr(module, "CHUNK" if module is fig11 else "CHUNKS", 16 if module is fig11 else (16,))
        monkeypatch.setattr(module, "read_claims", lambda name: [], raising=False)
    monkeypatch.setattr(gallery, "read_claims", lambda name: [])
    monkeypatch.setattr(panels, "FEW", (2, 5))
    monkeypatch.setattr(panels, "FEWER", (2,))
    machines = Machines(real=real)
    shown = gallery.show("fig11", machines, tmp_path, silent)
    data = pd.read_csv(tmp_path / "paper" / "fig11.csv")
    assert set(data["hardware"]) == {"gpu"} and set(data["pd_ratio"]) == {2, 5} and shown.notes == []
    left = json.loads((tmp_path / "paper" / "fig11.json").read_text())
    assert (
        left["machines"]["gpu"]["model"] == "tiny" and left["machines"]["gpu"]["single_iterations"]["profile"] == "h200"
    )
    assert "served with real tokens" in origin_of(machines.provenance().values())
    assert machines.get("a6000") is None, "nothing else is there beside it"
