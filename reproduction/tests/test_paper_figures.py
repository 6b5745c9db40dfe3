"""The figures of single iterations and pipelines: what is drawn is what the cost model says, counted by hand where one can."""

from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from places import SHARED
from small_cluster import make_cost, make_engine

from cbatch import BatchShape, ModelSpec, Request
from cbatch.model.topology import Topology
from cbatch.sim.cost import ProfileCost
from experiments.settings.presets import load_spec
from policies.orca import Orca
from reproduction.papers.claims import check, read_claims
from reproduction.papers.figures import fig3, fig4, fig5, fig7, fig12, table2
from reproduction.papers.figures.fig5 import Calendar
from reproduction.papers.machines import SINGLE_ITERATIONS, Machines
from reproduction.papers.operations import (
    ORDER,
    attention,
    intensity_by_operation,
    layer_op_counts,
    matmul,
    seconds_by_operation,
)

FIGURES = (fig3, fig4, fig5, fig7, table2)
PROFILES = SHARED / "profiles"


@cache
def machines() -> Machines:
    return Machines()


@cache
def data_of(figure: ModuleType) -> pd.DataFrame:
    data: pd.DataFrame = figure.measure(machines(), print)
    return data


def name_of(figure: ModuleType) -> str:
    return figure.__name__.rpartition(".")[2]


def cost() -> ProfileCost:
    at = machines().get("a6000")
    assert at is not None
    return at.cost


@pytest.mark.parametrize("figure", FIGURES, ids=name_of)
def test_every_drawn_value_is_a_row(figure: ModuleType) -> None:
    data = data_of(figure)
    assert {"hardware", "series", "value"} <= set(data.columns)
    assert np.isfinite(data["value"]).all() and (data["value"] >= 0).all()
    assert "a6000" in set(data["hardware"])


@pytest.mark.parametrize("figure", FIGURES, ids=name_of)
def test_the_claims_hold_or_say_why_not(figure: ModuleType) -> None:
    claims = read_claims(name_of(figure))
    verdicts = list(check(claims, machines(), figure, data_of(figure)))
    assert len(verdicts) >= sum(claim.hardware == "a6000" for claim in claims) > 0
    for verdict in verdicts:
        assert not verdict.failed, f"{verdict.claim.id}: {verdict.claim.asked}, ours {verdict.value:.4g}"
        assert verdict.claim.expected == "held" or (verdict.claim.note and not verdict.holds)


@pytest.mark.parametrize("figure", FIGURES[:-1], ids=name_of)
def test_a_figure_is_drawn_from_its_table_alone(figure: ModuleType, tmp_path: Path) -> None:
    """What the command has written can be drawn again; every axis says what it shows, with its unit."""
    data_of(figure).to_csv(tmp_path / "data.csv", index=False)
    drawn = figure.draw(pd.read_csv(tmp_path / "data.csv"), read_claims(name_of(figure)))
    drawn.canvas.draw()
    for axes in drawn.axes:
        if figure is not fig5:
            assert "[" in axes.get_ylabel()
    assert any("[" in axes.get_xlabel() or "tokens" in axes.get_xlabel() for axes in drawn.axes)


@pytest.mark.parametrize(("figure", "panel"), [(fig3, 1), (fig4, 0), (fig7, 0)], ids=["fig3", "fig4", "fig7"])
def test_printed_values_are_marked_beside_ours(figure: ModuleType, panel: int) -> None:
    axes = figure.draw(data_of(figure), read_claims(name_of(figure))).axes[panel]
    assert "paper" in labels(axes)
    assert "paper" not in labels(figure.draw(data_of(figure), []).axes[panel])


def labels(axes: Axes) -> list[str]:
    return [str(line.get_label()) for line in axes.get_lines()]


# -- operations ---------------------------------------------------------------------------------------------------------


def test_the_work_of_a_product_and_of_attention_by_hand() -> None:
    assert matmul(3, 5, 7, 2) == (2 * 7 * 3 * 5, 2 * (3 * 5 + 7 * 3 + 7 * 5))
    spec = load_spec("llama-3.1-8b")  # 32 heads, 8 key-value heads, 128 values each
    chunk = attention(spec, BatchShape(((2, 10),)))  # 11 + 12 scores; 12 tokens of context read; 2 queries
    assert chunk == (4 * 23 * 32 * 128, 2 * 128 * (2 * 12 * 8 + 2 * 2 * 32))
    decodes = attention(spec, BatchShape((), 3, 60, 5))  # padding attends to nothing
    assert decodes == (4 * 60 * 32 * 128, 2 * 128 * (2 * 60 * 8 + 2 * 3 * 32))


def test_operations_of_a_layer_by_hand() -> None:
    """Three tokens after 4, decodes at contexts of 5 and 6, and a token of padding: 5 + 6 + 7 + 5 + 6 scores over 7 + 5 + 6 tokens."""
    tiny = ModelSpec("tiny", "llama", 1, 8, 4, 2, 3, 16, 100, 64)  # 4 heads and 2 key-value heads of 3, an MLP of 16
    found = layer_op_counts(tiny, BatchShape(((3, 4),), 2, 11, 1))
    assert list(found)[:2] == ["qkv", "attention"]
    assert found["qkv"] == (2 * 6 * 8 * 24, 2 * (8 * 24 + 6 * (8 + 24)))  # 4 + 2 + 2 heads of 3
    of_attention = (
        2 * 2 * 29 * 4 * 3,
        2 * 3 * (2 * 18 * 2 + 2 * 5 * 4),
    )  # keys and values of 2 heads; queries and results of 4
    assert found["attention"] == of_attention
    assert found["attention"].intensity == of_attention[0] / of_attention[1]


def test_a_decode_reads_a_weight_for_each_multiplication() -> None:
    works = layer_op_counts(load_spec("nanogpt-13b"), BatchShape((), 1, 1024))
    assert list(works) == ["qkv", "attention", "o", "gate_up", "down"]
    assert all(work.intensity == pytest.approx(1, rel=1e-2) for work in works.values())


def test_intensity_of_a_prompt_by_hand() -> None:
    """A product of H by n H: 2 T n H^2 operations; 2 bytes for each of n H^2 weights and T (1 + n) H activations."""
    hidden, tokens = 5120, 1024
    found = intensity_by_operation(cost(), BatchShape(((tokens, 0),)))
    assert found["preproj"] == pytest.approx(3 * hidden * tokens / (3 * hidden + 4 * tokens))
    assert found["ffn"] == pytest.approx(4 * hidden * tokens / (4 * hidden + 5 * tokens))


def test_operations_add_up_to_the_iteration_and_products_split_by_weight() -> None:
    shape = BatchShape(((255, 512),), 17, 17 * 1000)
    seconds = seconds_by_operation(cost(), shape)
    assert tuple(seconds) == ORDER
    assert sum(seconds.values()) == pytest.approx(cost().predict(shape))
    assert seconds["preproj"] / seconds["postproj"] == pytest.approx(3)
    assert seconds["ffn"] / seconds["postproj"] == pytest.approx(8)


def test_fig3_stacks_the_whole_iteration() -> None:
    panels = fig3.draw(data_of(fig3), []).axes
    tops = {
        round(bar.get_x() + bar.get_width() / 2): bar.get_y() + bar.get_height()
        for bar in panels[1].patches
        if isinstance(bar, Rectangle)
    }
    for batch in (1, 2, 18):
        assert tops[batch] == pytest.approx(1e3 * cost().predict(BatchShape((), batch, batch * 1024)) / batch)


def test_fig4_lines_end_where_the_profile_does() -> None:
    prompts = data_of(fig4)[lambda data: (data["panel"] == "prefill") & (data["hardware"] == "a6000")]
    longest = prompts.groupby("series")["x"].max()
    assert {name: int(name[4:]) * batch for name, batch in longest.items()} == dict.fromkeys(longest.index, 4096)


def test_fig4_leaves_out_what_was_not_measured() -> None:
    """The H200 was measured with up to 128 decodes: none beyond is drawn, and no claim about more of them is judged."""
    data, notes = data_of(fig4), list[str]()
    decodes = data[(data["panel"] == "decode") & (data["hardware"] == "h200")]
    assert decodes.groupby("series")["x"].max().to_dict() == dict.fromkeys(decodes["series"], 128)
    (claim,) = (claim for claim in read_claims("fig4") if claim.id == "h200-fig4-decode")
    assert not list(check([claim], machines(), fig4, data, notes.append))
    assert notes == ["left out: claim h200-fig4-decode, decodes near B = 256: the measurements do not cover it"]


def test_fig7_jumps_at_the_tiles_alone() -> None:
    """Within a tile an iteration grows by attention and small operations; from 128 to 129, 256 to 257 ... by products."""
    times = data_of(fig7)[lambda data: data["hardware"] == "a6000"].set_index("tokens")["value"]
    jumps = times.diff()[lambda steps: steps > 1.0]
    assert list(jumps.index) == [tile * 128 + 1 for tile in range(1, 8)]


def test_table2_adds_up_as_the_paper_does() -> None:
    def ms(series: str, column: str) -> float:
        return table2.milliseconds(data_of(table2), "a6000", series, column)

    for series in table2.SHAPES:
        assert ms(series, "total") == pytest.approx(ms(series, "linear") + ms(series, "attention"))
    assert ms("decode-only", "decode/token") == pytest.approx(ms("decode-only", "total") / 4)
    marginal = (ms("decode-maximal", "total") - ms("prefill-only", "total")) / 3
    assert ms("decode-maximal", "decode/token") == pytest.approx(marginal)
    lines = table2.draw(data_of(table2), read_claims("table2")).splitlines()
    cells = [cell.strip() for cell in lines[3].split("|")]
    assert cells[2:4] == ["decode-only: 4 decodes at 1,024", "44.28 (44.28)"] and cells[-2] == "12.49 (12.49)"
    assert "(" not in table2.draw(data_of(table2), [])


# -- pipelines ----------------------------------------------------------------------------------------------------------


def test_a_calendar_has_every_second_of_every_stage() -> None:
    executor = Calendar(make_cost(Topology(pipeline_stages=2)))
    engine = make_engine(Orca(), executor)
    engine.submit([Request(index, 5 + 7 * index, 3 + index) for index in range(7)])
    engine.run()
    accounts = executor.accounts()
    for stage in (0, 1):
        intervals = [interval for interval in executor.intervals if interval.stage == stage]
        ends = [interval.begin + interval.milliseconds for interval in intervals]
        assert intervals[0].begin == 0
        assert [interval.begin for interval in intervals[1:]] == pytest.approx(ends[:-1])
        for kind in ("compute", "pb1", "pb2", "pb3"):
            total = sum(interval.milliseconds for interval in intervals if interval.doing == kind)
            assert total == pytest.approx(1e3 * getattr(accounts[stage], kind)), kind


def test_fig5_covers_the_time_shown_on_both_stages() -> None:
    for _, lane in data_of(fig5).groupby(["hardware", "series", "stage"]):
        assert lane["value"].sum() == pytest.approx((lane["begin"] + lane["value"]).max() - lane["begin"].min())


def test_fig5_names_each_bubble_by_what_differs() -> None:
    """Stage 0 waits in PB1 after the 256-token prompt, for the 768-token one is still on stage 1."""
    orca = data_of(fig5)[lambda data: data["series"] == fig5.ORCA]
    first = orca[orca["stage"] == 0].reset_index(drop=True)
    place = int(first.index[first["doing"] == "pb1"][0])
    assert list(first.loc[place - 2 : place - 1, "prompt"]) == [768, 256]
    waited = orca[(orca["stage"] == 1) & (orca["prompt"] == 768) & (orca["doing"] == "compute")].iloc[0]
    assert first.loc[place, "begin"] + first.loc[place, "value"] == pytest.approx(waited["begin"] + waited["value"])


def test_fig12_says_what_it_needs() -> None:
    said: list[str] = []
    assert fig12.measure(Machines(), said.append).empty
    assert said == ["left out: give tables=.../aiconfigurator/a100_sxm and links=.../vidur/network/a100_dgx"]


def test_fig12_draws_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, links = PROFILES / "aiconfigurator" / "a100_sxm", PROFILES / "vidur" / "network" / "a100_dgx"
    if not (tables.exists() and links.exists()):
        pytest.skip(f"the published timings are not in {PROFILES}")
    monkeypatch.setattr(fig12, "NUM_REQUESTS", 300)
    data = fig12.measure(Machines(str(tables), str(links)), print)
    assert set(data.loc[data["panel"] == "bubbles", "series"]) == {"TP8-PP8, Orca", "TP8-PP8, Sarathi"}
    assert data.groupby(["series", "panel"])["value"].apply(lambda values: values.is_monotonic_increasing).all()
    bubbles, ends = fig12.draw(data, read_claims("fig12")).axes
    ends_of = data[data["panel"] == "ends"].groupby("series")["value"].max()
    assert fig12.time_over(data, "tp", "sarathi") == ends_of["8 x TP8, Orca"] / ends_of["TP8-PP8, Sarathi"]
    assert [axes.get_xlabel() for axes in (bubbles, ends)] == ["bubble time of a request [s]", "requests served"]
    assert labels(ends)[:3] == list(fig12.NAMES.values())
    rows = [[float(cell) for cell in line.split()[-7:]] for line in fig12.text(data).splitlines()[2:]]
    assert [sum(shares) for _, *shares in rows] == pytest.approx([100.0] * 3, abs=0.4)


def test_the_h200_is_drawn_beside_the_papers_machine() -> None:
    assert [name for name, _ in machines().available(SINGLE_ITERATIONS)] == ["a6000", "h200"]
    assert list(dict.fromkeys(data_of(fig7)["hardware"])) == ["a6000", "h200"]
