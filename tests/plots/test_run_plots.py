"""Plots of one run: distributions, iterations over time, and the service of clients, as they are in its files."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_made import write_run
from test_plots import lines

from cbatch import ConfigError
from experiments.api import simulate
from experiments.plots import composition, latency_cdf, service
from experiments.plots.style import new_figure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("drawn") / "run")


# -- distributions ----------------------------------------------------------------------------------------------------


def test_distributions_of_what_a_client_sees(folder: Path) -> None:
    first, between, whole = latency_cdf.draw(folder).axes
    thirds = pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert lines(first) == {"prefill_first": ([2.5, 2.5, 2.75, 9.5], thirds)}
    assert lines(between) == {"prefill_first": ([1000, 1000, 2000, 3000], thirds)}
    assert lines(whole) == {"prefill_first": ([2.5, 2.5, 7.75, 10.5], thirds)}


def test_distributions_of_a_tier_with_its_objective(folder: Path, tmp_path: Path) -> None:
    """Request 1 alone has a tier, gold, with a TTFT objective of 4 s: its first token comes after 9.5 s, the next 1 s later."""
    panels = latency_cdf.draw(folder, tiers=True).axes
    assert [lines(axes)["prefill_first"][0] for axes in panels] == [[9.5] * 2, [1000] * 2, [10.5] * 2]
    assert [[x for label, (x, _) in lines(axes).items() if label.startswith("_")] for axes in panels] == [
        [[4, 4]],
        [],
        [],
    ]
    run = write_run(tmp_path / "run")
    (run / "requests.csv").write_text((run / "requests.csv").read_text().replace("gold", ""))
    with pytest.raises(ConfigError, match="no request has a tier"):
        latency_cdf.draw(run, tiers=True)


def test_seeds_are_pooled_with_a_band_of_the_single_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second run has one gap of 1 s, the first of 1, 2 and 3 s; then none has a gap, which is said."""
    for seed in (0, 1):
        run = write_run(tmp_path / f"{seed}", settings={"seed": seed}, speed=seed)
    np.savez(run / "tokens.npz", request_id=np.array([0, 0]), time=np.array([1.0, 2.0]))
    panel = latency_cdf.draw(tmp_path).axes[1]
    assert lines(panel)["prefill_first"][0] == [1000, 1000, 1000, 2000, 3000]
    [area] = panel.collections
    assert {x for x, y in area.get_paths()[0].vertices.tolist() if y == 1} == {1000, 3000}
    np.savez(run / "tokens.npz", request_id=np.array([0, 1]), time=np.array([1.0, 2.0]))
    latency_cdf.draw(run)
    assert capsys.readouterr().err == "1 run not shown: has no time between tokens\n  prefill_first\n"


def test_distributions_of_whole_runs_say_what_tables_leave_out(folder: Path, tmp_path: Path) -> None:
    """Three requests are served; tables count two of them, as after a warm-up with one."""
    run = write_run(tmp_path / "run", figures={"run": {"counted_requests": 2}})
    note = "with 1 request before or after the measured part, which tables leave out"
    assert note in latency_cdf.draw(run).get_label()
    assert "measured part" not in latency_cdf.draw(folder).get_label()


# -- one run over time ------------------------------------------------------------------------------------------------


def test_the_only_replica_is_number_0(folder: Path) -> None:
    assert len(composition.draw(folder, replicas=(0,)).axes) == len(composition.draw(folder).axes)
    with pytest.raises(ConfigError, match="replicas=1: no such replica; the run has 1, counted from 0"):
        composition.draw(folder, replicas=(0, 1))


def test_composition_of_iterations_over_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, requests, memory = panels = composition.draw(folder).axes
    assert all(panel.get_yticks()[-1] >= panel.dataLim.y1 for panel in panels), "a tick at or above all that is drawn"
    started = [1.25, 3.5, 6.0, 8.5, 11.5]
    assert [area.get_label() for area in tokens.collections] == ["decode", "prefill", "padding"]
    tops = [max(y for x, y in area.get_paths()[0].vertices if x == 8.5) for area in tokens.collections]
    assert tops == [1, 7, 8]
    assert lines(requests) == {"running": (started, [1, 2, 0, 1, 0]), "waiting": (started, [1, 0, 1, 0, 0])}
    [(_, used)] = lines(memory).values()
    assert used == pytest.approx([10, 25, 30, 15, 15])
    monkeypatch.setattr(composition, "_MOST_STEPS", 4)  # means of the first three iterations, and of two
    means = lines(composition.draw(folder).axes[1])
    assert means["running"] == ([1.25, 8.5], [1.0, 0.5])


def test_composition_has_a_column_for_each_replica(tmp_path: Path) -> None:
    """Replica 0 computes the first two iterations, replica 2 the others, replica 1 none; the columns share their axes."""
    run = write_run(tmp_path / "run", settings={"backend": {"replicas": 3}})
    for name, numbers in (("steps.csv", (0, 0, 2, 2, 2)), ("requests.csv", (0, 0, 2, 2))):
        pd.read_csv(run / name).assign(replica=numbers).to_csv(run / name, index=False)
    panels = composition.draw(run).axes
    assert [panel.get_title(loc="left") for panel in panels[:3]] == ["replica 0", "replica 1, idle", "replica 2"]
    assert [lines(panel).get("running") for panel in panels[3:6]] == [
        *(([1.25, 3.5], [1, 2]), None, ([6.0, 8.5, 11.5], [0, 1, 0]))
    ]
    assert panels[0].get_ylim() == panels[2].get_ylim() and panels[0].get_ylim()[1] >= 8
    assert [panel.get_title(loc="left") for panel in composition.draw(run, replicas=(2,)).axes[:1]] == ["replica 2"]
    with pytest.raises(ConfigError, match="replicas=3: no such replica; the run has 3, counted from 0"):
        composition.draw(run, replicas=(3,))
    many = write_run(tmp_path / "many", settings={"backend": {"replicas": 6}})  # only those that ran
    for name, numbers in (("steps.csv", (0, 0, 5, 5, 5)), ("requests.csv", (0, 0, 5, 5))):
        pd.read_csv(many / name).assign(replica=numbers).to_csv(many / name, index=False)
    assert [panel.get_title(loc="left") for panel in composition.draw(many).axes[:2]] == ["replica 0", "replica 5"]


def test_composition_of_a_prefiller_and_a_decoder(tmp_path: Path) -> None:
    """Power of each, and the prompts at the prefiller. A replica that admitted none has an empty panel."""
    pools: dict[str, Any] = {"p": {"role": "prefill"}, "d": {"role": "decode"}}
    simulate("orca", "open_loop", requests=20, prefix_cache=True, pools=pools, output=tmp_path / "run", hardware="h100")
    panels = composition.draw(tmp_path / "run").axes
    assert [panel.get_ylabel() for panel in panels[::2]][-2:] == ["power\n[W]", "prompts\n[%]"]
    assert panels[-2].collections and not panels[-1].collections
    shown = {text.get_text() for text in panels[1].get_legend().get_texts()}  # type: ignore[union-attr]
    assert shown == {"prefill", "decode", "padding"}, "the prefiller has no decodes"
    assert all(max(panel.get_lines()[0].get_ydata()) > 100 for panel in panels[-4:-2])  # type: ignore[arg-type]
    panel, none = (
        new_figure(1, 1, 1.0)[1][0][0],
        pd.DataFrame(columns=["admitted", "cached_tokens", "recomputed_tokens", "prompt_tokens"], dtype=float),
    )
    composition._draw_prompts(panel, none, 2.0)
    assert not panel.collections


def test_prompts_are_drawn_at_the_replica_that_computed_them(tmp_path: Path) -> None:
    """Replica 0 has the prompts of request 0, which moved to replica 1 (5 tokens, 4 found), and of request 1 (7, and 4 computed again)."""
    run = write_run(tmp_path / "run", settings={"backend": {"replicas": 2}})
    steps, requests = pd.read_csv(run / "steps.csv"), pd.read_csv(run / "requests.csv")
    steps.assign(replica=(0, 0, 1, 1, 1)).to_csv(run / "steps.csv", index=False)
    moved = requests.assign(replica=(1, 1, 1, 0), prefilled_on=(None, 0, None, None), cached_tokens=(0, 4, 3, 0))
    moved.to_csv(run / "requests.csv", index=False)
    panels = composition.draw(run).axes[-2:]
    tops = [
        {str(area.get_label()): max(y for _, y in area.get_paths()[0].vertices) for area in panel.collections}
        for panel in panels
    ]
    assert tops == [{"found": 25, "computed": 75, "recomputed": 100}, {"found": 100}]
    assert list(panels[0].get_yticks()) == [0, 25, 50, 75, 100]


def test_the_drawn_power_is_that_of_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The area below the lines of both replicas is the run's energy: pauses take the idle watts, however many iterations a value covers.

    The host's first and last milliseconds are not drawn.
    """
    keys = {"requests": 20, "rate": 1, "hardware": "h100", "replicas": 2}
    run = simulate("sarathi_serve", "open_loop", **keys, output=tmp_path / "run")
    for most in (400, 10):
        monkeypatch.setattr(composition, "_MOST_STEPS", most)
        area = seconds = 0.0
        for panel in composition.draw(tmp_path / "run").axes[-2:]:
            times, watts = panel.get_lines()[0].get_data()
            area += (watts[:-1] * np.diff(times)).sum()
            seconds = times[-1] - times[0]
            assert most < 400 or min(watts) == pytest.approx(100)
        assert area / seconds == pytest.approx(run.summary["energy"]["watts"], rel=0.002), most


def test_the_drawn_power_is_at_most_the_limit_of_the_card(tmp_path: Path) -> None:
    """Prompts of 4,000 tokens between decodes: those iterations alone take more than 700 W, every 60 ms together at most that."""
    keys = {"length": 4096, "pd_ratio": 40, "requests": 40, "hardware": "h100", "chunk": 2048, "batch": 8}
    run = simulate("sarathi_serve", **keys, output=tmp_path / "run")
    assert run.summary["energy"]["at_limit_share"] > 0.05
    watts = composition.draw(tmp_path / "run").axes[-1].get_lines()[0].get_ydata()
    assert 699 < max(watts) <= 700 * (1 + 1e-9)  # type: ignore[arg-type]


def test_nothing_is_drawn_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is idle from 2 to 9 s, longer than any iteration takes."""
    steps = pd.DataFrame(
        {"started": [0.0, 1.0, 9.0, 10.0], "ended": [1.0, 2.0, 10.0, 11.0], "num_running": [3, 4, 5, 6]}
    )
    for most, expected in ((400, [(0, 3), (1, 4), (2, 0), (9, 5), (10, 6)]), (3, [(0, 3.5), (2, 0), (9, 5.5)])):
        monkeypatch.setattr(composition, "_MOST_STEPS", most)
        drawn, _ = composition._thin_out(steps)
        assert list(zip(drawn["started"], drawn["num_running"], strict=True)) == expected


def test_no_iteration_is_left_over_behind_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven iterations, a pause and nine, the first with a prompt: a mean of few would be too narrow to see, and set the axis."""
    monkeypatch.setattr(composition, "_MOST_STEPS", 12)
    started = np.array([*range(7), *range(20, 29)], float)
    tokens = np.where(started == 20, 256, 1)
    drawn, how = composition._thin_out(pd.DataFrame({"started": started, "ended": started + 1, "tokens": tokens}))
    assert list(zip(drawn["started"], drawn["tokens"], strict=True)) == [
        (0, 1),
        (4, 1),
        (7, 0),
        (20, 86),
        (23, 1),
        (26, 1),
    ]
    assert how == "each bar: up to 4 iterations"


def test_what_prompts_consist_of_with_a_prefix_cache() -> None:
    """Ten requests are admitted in each of two seconds."""
    columns = {"cached_tokens": [20] * 10 + [0] * 10, "recomputed_tokens": [0] * 19 + [100]}
    requests = pd.DataFrame({"admitted": [0.5] * 10 + [1.5] * 10, "prompt_tokens": [40] * 20, **columns})
    panel = new_figure(1, 1, 1.0)[1][0][0]
    composition._draw_prompts(panel, requests, 2.0)
    tops = [
        [y for x, y in area.get_paths()[0].vertices if x == place] for area in panel.collections for place in (0.0, 2.0)
    ]
    assert [area.get_label() for area in panel.collections] == ["found", "computed", "recomputed"]
    assert [max(values) for values in tops] == pytest.approx([50, 0, 100, 80, 100, 100])


def test_service_of_clients_over_time(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ann's request of 7 + 2 * 2 is served from 11 to 12 s; the others', of 5 + 2 * 3 from 3 to 8 s and 3 + 2 at 8 s.

    In the second run, shorter than a window of 60 s, Ann's weight is 2; in the third, all requests arrive at 0.25 s.
    """
    total, rate, unfair = service.draw(folder, window=2.0).axes
    ann, others = {10.9: 0, 11.5: 5.5, 12.0: 11}, {2.9: 0, 5.5: 5.5, 7.9: 10.78, 8.1: 16}
    for name, expected in (("ann", ann), ("no client", others)):
        x, y = lines(total)[name]
        assert np.interp(list(expected), x, y) == pytest.approx([each / 1e3 for each in expected.values()], abs=2e-4)
    x, y = lines(rate)["no client"]
    assert np.interp([1.0, 3.0, 5.5], x, y) == pytest.approx([0, 1.1, 2.2], abs=0.03)
    [(middle, difference)] = lines(
        unfair
    ).values()  # the last windows receive 2.2 per second, of which ann wants nothing yet
    assert middle == pytest.approx([1 + 0.225 * tick for tick in range(1, 20)]) and difference[-1] == pytest.approx(0)
    settings = {"workload": {"length": 8}, "metrics": {"client_weights": {"ann": 2.0}}}
    total, rate, _ = service.draw(run := write_run(tmp_path / "run", settings=settings)).axes
    assert lines(total)["ann"][1][-1] == pytest.approx(11 / 2 / 1e3)
    assert np.interp([2.0, 10.0, 11.6], *lines(rate)["ann"]) == pytest.approx([0, 0, 5.5], abs=0.6), (
        "in windows of 1.2 s"
    )
    requests = pd.read_csv(run / "requests.csv")
    requests.assign(arrival=0.25).to_csv(run / "requests.csv", index=False)
    assert len(service.draw(run).axes) == 2, "no panel without a service difference"
    assert not capsys.readouterr().err
