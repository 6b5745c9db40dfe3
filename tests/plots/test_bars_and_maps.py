"""Bars over names, heat maps, and texts: a bar or cell is the figure in the results; no texts lie on each other."""

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from commands import largest_file
from hand_made import write_run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from test_plots import SPEED, write_rates, write_ratios
from test_schedule_chart import with_decisions

from cbatch import ConfigError
from experiments.plot import main
from experiments.plots import composition, curves, heatmap, latency_cdf, schedule, service
from experiments.plots.saving import save
from experiments.plots.style import Look, add_heading, line_style, new_figure, print_style

SPEEDS: dict[str, dict[int, tuple[float, ...]]] = {
    "orca": {2: (1000.0, 3000.0), 14: (5000.0,)},
    "sarathi": {2: (4000.0,), 14: (7000.0,)},
}


def bars(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """Returns the middle and the height of each bar, by its label."""
    return {
        str(group.get_label()): [(round(bar.get_x() + bar.get_width() / 2, 9), bar.get_height()) for bar in group]
        for group in axes.containers
        if group.get_label()[:1] != "_"
    }


def test_bars_have_the_heights_and_intervals_of_the_results(tmp_path: Path) -> None:
    """Two policies, two ratios; orca at 2 with two seeds, whose interval reaches 12.7 standard errors of 1000 to each side."""
    [panel] = curves.draw(write_ratios(tmp_path, SPEEDS), x="policy", y=(SPEED,)).axes
    assert [text.get_text() for text in panel.get_xticklabels()] == ["orca", "sarathi"]
    assert bars(panel) == {"pd_ratio=14": [(-0.2, 5000), (0.8, 7000)], "pd_ratio=2": [(0.2, 2000), (1.2, 4000)]}
    spans = [segment[:, 1] for area in panel.collections for segment in area.get_segments() if len(segment)]
    assert [span for span in spans if np.isfinite(span).all()] == [pytest.approx([2000 - 12706.2, 2000 + 12706.2])]
    assert panel.get_ylim()[0] == 0 and panel.get_yscale() == "linear"
    with pytest.raises(ConfigError, match="baseline=orca: x=policy compares policies; leave one of them out"):
        curves.draw(tmp_path, x="policy", y=(SPEED,), baseline="orca")
    with pytest.raises(ConfigError, match="several values of policy; sweep it with -m policy=NAME,NAME"):
        curves.draw(tmp_path, Look(runs="orca"), x="policy", y=(SPEED,))


def test_one_bar_alone_stands_at_its_name_and_may_be_renamed(tmp_path: Path) -> None:
    for eviction, found in (("belady", 0.9), ("lru", 0.5)):
        write_run(tmp_path / eviction, settings={"eviction": eviction}, figures={"prefix_cache": {"hit_share": found}})
    look = Look({"lru": "Ours"})
    [panel] = curves.draw(tmp_path, look, x="eviction", y=("prefix_cache.hit_share",)).axes
    assert sorted(bars(panel).popitem()[1]) == [(0, 90), (1, 50)]
    assert [text.get_text() for text in panel.get_xticklabels()] == ["belady\n(reads the future)", "Ours"]


def test_the_replicas_of_each_role_are_an_axis_of_names(tmp_path: Path) -> None:
    layouts = {0.5: {"p": ("prefill", 1), "d": ("decode", 3)}, 0.75: {"p": ("prefill", 2), "d": ("decode", 2)}}
    for number, (found, layout) in enumerate(layouts.items()):
        pools = {name: {"role": role, "replicas": replicas} for name, (role, replicas) in layout.items()}
        figures = {"prefix_cache": {"hit_share": found}}
        write_run(tmp_path / str(number), {"number": number}, {"backend": {"pools": pools}}, figures=figures)
    [panel] = curves.draw(tmp_path, x="backend.pools", y=("prefix_cache.hit_share",)).axes
    assert [*bars(panel).values()] == [[(0, 50), (1, 75)]]
    texts = [text.get_text() for text in panel.get_xticklabels()]
    assert texts == ["1 prefill + 3 decode", "2 prefill + 2 decode"]


def test_a_setting_may_be_given_by_the_last_part_of_its_key(tmp_path: Path) -> None:
    """The name on the axis is the class; an ambiguous part and an argument of the policy need the whole key, a group one of its keys that vary."""
    for number, router in enumerate(("mine.Aging", "least_loaded")):
        keys = {
            "backend": {"router": router, "pools": {"p": {"replicas": number, "role": "both"}}},
            "policy": {"budget": number},
            "a": {"n": number},
            "b": {"n": number},
        }
        write_run(tmp_path / router, settings=keys, figures={"prefix_cache": {"hit_share": 0.5 * number}})
    for x in ("router", "backend.router"):
        [panel] = curves.draw(tmp_path, x=x, y=("prefix_cache.hit_share",)).axes
        assert {text.get_text() for text in panel.get_xticklabels()} == {"Aging", "least_loaded"}
        assert panel.get_xlabel() == "router"
    with pytest.raises(ConfigError, match=r"did you mean backend.pools.p.replicas\?"):
        curves.draw(tmp_path, x="backend.pools", y=("prefix_cache.hit_share",))
    for x in ("n", "budget"):
        with pytest.raises(ConfigError, match=f"x={x}: no run has this setting"):
            curves.draw(tmp_path, x=x, y=("prefix_cache.hit_share",))


@pytest.mark.parametrize(
    ("key", "axis", "names"),
    [
        ("batch", "largest batch [requests]", {"auto": "auto", 256: "256"}),
        ("prefix_cache", "prefix cache", {True: "on", False: "off"}),
    ],
    ids=["word", "switch"],
)
def test_values_that_are_not_all_numbers_are_names(
    key: str, axis: str, names: dict[object, str], tmp_path: Path
) -> None:
    for value in names:
        write_run(tmp_path / str(value), settings={key: value}, speed=100.0)
    [panel] = curves.draw(tmp_path, x=key, y=(SPEED,)).axes
    assert ({text.get_text() for text in panel.get_xticklabels()}, panel.get_xlabel()) == ({*names.values()}, axis)


def test_a_p99_of_few_requests_is_marked_in_a_heat_map(tmp_path: Path) -> None:
    """Three requests per run."""
    folder = write_ratios(tmp_path, SPEEDS)
    for value, is_marked in (("ttft_seconds.p99", True), ("ttft_seconds.p50", False)):
        figure = heatmap.draw(folder, x="workload.pd_ratio", y="policy", value=value)
        assert ("a P99 of 3 requests" in figure.get_supxlabel()) == is_marked


def test_a_cell_of_a_heat_map_is_the_mean_of_its_runs(tmp_path: Path) -> None:
    """Cells without a run are empty; numbers ascend, names descend in their order; a number stands in each cell; equal maps are one."""
    folder = write_ratios(tmp_path, {**SPEEDS, "vtc": {14: (6000.0,)}})
    figure = heatmap.draw(folder, x="workload.pd_ratio", y="policy", value=SPEED)
    panel, scale = figure.axes
    [image] = panel.images
    cells = np.ma.filled(image.get_array().astype(float), np.nan)
    assert np.array_equal(cells, [[np.nan, 6000], [4000, 7000], [2000, 5000]], equal_nan=True)
    assert [text.get_text() for text in panel.get_yticklabels()] == ["vtc", "sarathi", "orca"]
    assert [text.get_text() for text in panel.get_xticklabels()] == ["2", "14"]
    assert [text.get_text() for text in panel.texts] == ["6,000", "4,000", "7,000", "2,000", "5,000"]
    assert scale.get_ylabel() == "throughput [tokens/s]" and image.get_clim() == (2000, 7000)
    one, two, *_ = heatmap.draw(folder, Look(runs="orca|sarathi"), x="workload.pd_ratio", y="seed", value=SPEED).axes
    assert (one.get_title(loc="left"), two.get_title(loc="left")) == ("orca", "sarathi")
    assert one.images[0].get_clim() == two.images[0].get_clim() == (1000, 7000), "one scale"
    same = write_ratios(tmp_path / "same", dict.fromkeys("ab", SPEEDS["orca"]))
    one, _ = heatmap.draw(same, x="workload.pd_ratio", y="seed", value=SPEED).axes
    assert one.get_title(loc="left") == "a = b"


def test_a_map_of_chunk_and_policy_names_each_once(tmp_path: Path) -> None:
    """The chunk is on x, so y has the names of the policies alone."""
    for number, (name, chunk) in enumerate(product("ab", (256, 512))):
        policy = f"{name}(chunk={chunk})"
        about = {"policy": policy, "overrides": [f"policy={name}", f"chunk={chunk}"], "chunk": chunk}
        write_run(tmp_path / str(number), about, {"policy": policy, "chunk": chunk}, speed=1000.0 * number)
    panel, _ = heatmap.draw(tmp_path, x="chunk", y="policy", value=SPEED).axes
    assert [text.get_text() for text in panel.get_yticklabels()] == ["b", "a"]
    assert panel.images[0].get_array().tolist() == [[2000, 3000], [0, 1000]]


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Returns the visible texts of a figure, and where they are."""
    figure.draw_without_rendering()
    hidden: set[int] = set()
    for axis in (axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)):
        drawn = {id(tick) for tick in axis._update_ticks()}  # type: ignore[union-attr]  # matplotlib has no public name
        others = (tick for tick in (*axis.majorTicks, *axis.minorTicks) if id(tick) not in drawn)
        hidden |= {id(text) for tick in others for text in (tick.label1, tick.label2)}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and id(text) not in hidden]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text().strip()]


def faults(figure: Figure) -> list[str]:
    """Returns the texts that leave the figure, and those that lie on each other, by more than a pixel."""
    inside = figure.bbox.padded(1)
    shown = [(text, box.padded(-0.5)) for text, box in boxes(figure)]
    outside = [text for text, box in shown if not (inside.contains(*box.min) and inside.contains(*box.max))]
    return outside + [f"{one} | {two}" for (one, at), (two, other) in combinations(shown, 2) if at.overlaps(other)]


@pytest.fixture(scope="module")
def plots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[Look], Figure]]:
    """Returns a function for each plot, by its name."""
    root = tmp_path_factory.mktemp("sizes")
    one, ratios = write_run(root / "one"), write_ratios(root / "ratios", SPEEDS)
    rates, small = write_rates(root / "rates", "rate", (1, 2, 40)), with_decisions(root / "small")
    return {
        "bars": lambda look: curves.draw(ratios, look, x="policy", y=(SPEED, "ttft_seconds.p99")),
        "curves": lambda look: curves.throughput_vs_pd(ratios, look, "orca"),
        "rates": lambda look: curves.latency_vs_rate(rates, look),
        "heatmap": lambda look: heatmap.draw(ratios, look, x="workload.pd_ratio", y="policy", value=SPEED),
        "cdf": lambda look: latency_cdf.draw(one, look, tiers=True),
        "composition": lambda look: composition.draw(one, look),
        "schedule": lambda look: schedule.draw(small, look),
        "service": lambda look: service.draw(one, look),
    }


@pytest.mark.long
@pytest.mark.parametrize("size", [None, (7.0, 2.2), (3.5, 3.0)], ids=str)
@pytest.mark.parametrize("name", ["bars", "curves", "rates", "heatmap", "cdf", "composition", "schedule", "service"])
def test_no_text_lies_on_another_or_leaves_the_figure(
    name: str, size: tuple[float, float] | None, plots: dict[str, Callable[[Look], Figure]], tmp_path: Path
) -> None:
    """What `save` accepts; it writes no file here."""
    figure = plots[name](Look(size=size))
    save(figure, tmp_path, "drawn", formats=())
    figure.set_layout_engine("none")  # as `save` has laid it out
    assert faults(figure) == []


@pytest.mark.long
def test_a_size_without_room_is_refused(plots: dict[str, Callable[[Look], Figure]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"size=3.5,2: leaves no room for the panels"):
        save(plots["rates"](Look(size=(3.5, 2.0))), tmp_path, "drawn", formats=())


LONG = "sarathi(chunk=256), kv_tokens=20000, eviction=lru"


@pytest.mark.long
@print_style()
@pytest.mark.parametrize("size", [None, (7.0, 4.0), (3.5, 2.5)], ids=str)
@pytest.mark.parametrize(("number", "label"), [(3, "sarathi"), (16, "sarathi"), (3, LONG), (16, LONG)])
def test_a_legend_takes_at_most_40_percent(number: int, label: str, size: tuple[float, float] | None) -> None:
    figure, [[panel]] = new_figure(1, 1, 2.7)
    handles = [panel.plot([1, index], label=label, **line_style(index))[0] for index in range(number)]
    if size == (3.5, 2.5) and (number, label) == (16, LONG):
        with pytest.raises(ConfigError, match=r"size=3.5,2.5: the legend takes .*% of the height"):
            add_heading(figure, "a heading", ["a note"], handles, size)
        return
    add_heading(figure, "a heading", ["a note"], handles, size)
    texts = [box for text, box in boxes(figure) if text.replace("\n", " ") == label]
    assert (
        len(texts) == number and max(box.y1 for box in texts) - min(box.y0 for box in texts) <= 0.4 * figure.bbox.height
    )
    assert faults(figure) == []


@print_style()
def test_a_figure_without_a_size_grows_with_its_legend() -> None:
    """Sixteen equal lines of nine policies are 16 x 2 lines of a legend, in the smallest type."""
    figure, [[panel]] = new_figure(1, 1, 2.7)
    label = " = ".join(["sarathi_serve"] * 20)
    add_heading(figure, "", (), [panel.plot([1, index], label=label)[0] for index in range(16)], None)
    [legend] = figure.legends
    assert legend.get_texts()[0].get_fontsize() == 5
    assert legend.get_window_extent().height <= 0.4 * figure.bbox.height + 1 and faults(figure) == []


def test_figures_of_two_folders_do_not_meet_in_a_third(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
        assert main(["table", str(tmp_path / name), f"output={tmp_path}"]) == 0
    assert {path.name for path in tmp_path.glob("*.md")} == {"a,table.md", "b,table.md"}


def test_a_disk_that_fills_leaves_the_earlier_figure(tmp_path: Path) -> None:
    """The error is the disk's, with the file's name, and not one of the PDF's writer that it broke."""
    (path := tmp_path / "f.pdf").write_text("earlier")
    with largest_file(5000), pytest.raises(OSError, match="File too large") as error:
        save(new_figure(1, 1, 2.0)[0], tmp_path, "f", ["pdf"])
    assert error.value.filename == str(path) and path.read_text() == "earlier" and len([*tmp_path.iterdir()]) == 1
