"""The plots of replicas that come and go: counts by hand, and means with intervals in both directions."""

import re
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import write_run
from matplotlib.container import ErrorbarContainer

from cbatch import ConfigError
from experiments.api import simulate
from experiments.plots import replicas, tradeoff
from experiments.plots.saving import save

BOTH = {"replicas": {"seconds": 100.0}, "goodput": {"attained_share": 0.5}}


class Steps:
    """One replica until 20 s, then two, from 60 s on one."""

    def wanted(self, view: object) -> int:
        return 2 if 20 <= view.now < 60 else 1  # type: ignore[attr-defined]


@pytest.mark.long
def test_replicas_are_drawn_as_they_came_and_went(tmp_path: Path) -> None:
    """Asked for at 20 s, ready at 30 s, draining at 60 s; paid until its last request has ended."""
    keys = {"replicas": 3, "requests": 400, "rate": 4, "scaling": {"tick": 10, "start_seconds": 10, "down_after": 0}}
    simulate("orca", "open_loop", autoscale=Steps(), output=tmp_path / "run", timeline=False, **keys)
    above, below = replicas.draw(tmp_path / "run").axes
    ready, paid = ([*map(list, zip(*line.get_data(), strict=True))] for line in above.get_lines())
    assert ready[:4] == [[0, 1], [30, 2], [60, 1], ready[3]] and paid[:2] == [[0, 1], [20, 2]]
    assert 60 <= paid[2][0] < 62 and paid[2][1] == 1 and paid[-1][0] == ready[-1][0] > 80
    assert [line.get_label() for line in above.get_lines()] == ["ready", "paid"] and not below.get_lines()
    assert above.get_ylim()[1] > 2 and all(tick.is_integer() for tick in above.get_yticks())
    heading = re.sub(r"\s+", " ", above.figure.legends[0].get_title().get_text())  # type: ignore[union-attr]
    assert "at most 3 replicas, router round_robin, autoscaler Steps, decisions every 10 s, 10 s to start" in heading
    with pytest.raises(ConfigError, match="its number of replicas never changes"):
        replicas.draw(write_run(tmp_path / "other"))


def test_a_heading_names_what_autoscaled_runs_share(tmp_path: Path) -> None:
    """The autoscaler with its arguments, and the times of the scaling; of unlike autoscalers the times, of runs without one nothing."""

    def heading(*scalers: dict[str, Any]) -> str:
        folder = tmp_path / str(scalers)
        for number, keys in enumerate(scalers):
            settings = {"backend": {"replicas": 8, "scaling": {"tick": 15.0, "start_seconds": 60.0}}, **keys}
            write_run(folder / f"{number}", settings=settings, figures=BOTH)
        (panel,) = tradeoff.draw(folder).axes
        return re.sub(r"\s+", " ", panel.figure.legends[0].get_title().get_text())  # type: ignore[union-attr]

    one = {"autoscale": "mine.Waits", "autoscale.most": 4}
    assert "at most 8 replicas, autoscaler Waits(most=4), decisions every 15 s, 60 s to start" in heading(one)
    assert "at most 8 replicas, decisions every 15 s, 60 s to start" in heading(one, {"autoscale": "own.B"})
    assert heading({}).endswith("requests/s, 8 replicas")


def test_a_point_has_the_means_and_intervals_of_both_figures(tmp_path: Path) -> None:
    """Replica-seconds 100 and 120: mean 110, half of the interval 12.7 x 10; shares 80 and 90%."""
    for policy, seconds, share in (("orca", (100.0, 120.0), (0.8, 0.9)), ("vtc", (60.0, 60.0), (0.5, 0.7))):
        for seed in range(2):
            settings = {"policy": {"_target_": policy}, "workload": {"seed": seed}}
            figures = {"replicas": {"seconds": seconds[seed]}, "goodput": {"attained_share": share[seed]}}
            figures["ttft_seconds"] = {"p99": seconds[seed]}
            write_run(tmp_path / f"{policy}{seed}", {"policy": policy}, settings, figures=figures)
    (panel,) = tradeoff.draw(tmp_path).axes
    drawn = {part.get_label(): part for part in panel.containers if isinstance(part, ErrorbarContainer)}
    assert drawn.keys() == {"orca", "vtc"}
    assert [*drawn["orca"].lines[0].get_xydata()[0]] == pytest.approx([110, 85])  # type: ignore[index]
    across, up = (bars.get_segments()[0] for bars in drawn["orca"].lines[2])
    assert across[:, 0] == pytest.approx([0, 110 + 127.06], abs=0.01), "cut at 0"
    assert up[:, 1] == pytest.approx([85 - 63.53, 100], abs=0.01), "cut at 100%"
    title = panel.figure.legends[0].get_title().get_text()  # type: ignore[union-attr]
    assert "of 2 runs per point" in re.sub(r"\s+", " ", title)
    assert "P99" not in str(panel.figure.get_label())
    assert "a P99 of" in str(tradeoff.draw(tmp_path, x="ttft_seconds.p99").get_label())
    with pytest.raises(ConfigError, match=r"cost.dollars: no run in .* has this figure; .* y=ttft_seconds.p99$"):
        tradeoff.draw(tmp_path, x="cost.dollars")


def test_a_line_joins_the_points_of_a_policy_in_the_order_of_the_swept_number(tmp_path: Path) -> None:
    """Rates 4, 8 and 16, not in this order in the folder; a and b are equal at each; orca without chunks has one point beside two of sarathi."""
    seconds = {"a": {8: 3.0, 16: 5.0, 4: 2.0}, "b": {8: 3.0, 16: 5.0, 4: 2.0}, "c": {4: 3.0, 16: 4.0, 8: 3.5}}
    for number, (policy, rate) in enumerate((name, rate) for name, of_rates in seconds.items() for rate in of_rates):
        settings = {"policy": {"_target_": policy}, "workload": {"arrivals": {"rate": rate}}}
        figures = {"replicas": {"seconds": seconds[policy][rate]}, "goodput": {"attained_share": 1 - rate / 40}}
        about = {"policy": f"{policy}(size=2)" if policy == "c" else policy, "number": number}
        write_run(tmp_path / "rates" / str(number), about, settings, figures=figures)
    (panel,) = tradeoff.draw(tmp_path / "rates").axes
    drawn = {str(part.get_label()): part.lines[0] for part in panel.containers if isinstance(part, ErrorbarContainer)}
    assert drawn.keys() == {"a = b", "c(size=2)"}
    assert [*drawn["a = b"].get_xdata()] == [2, 3, 5] and [*drawn["c(size=2)"].get_xdata()] == [3, 3.5, 4]  # type: ignore[union-attr]
    assert drawn["a = b"].get_linestyle() == "-", "joined"  # type: ignore[union-attr]
    assert "lines join rate of arrivals, as set [1/s]: 4, 8, 16" in str(panel.figure.get_label())
    assert not any(part.has_xerr or part.has_yerr for part in panel.containers)  # type: ignore[attr-defined]
    assert panel.get_xlim()[0] == 0 and panel.get_ylim() == pytest.approx((57.6, 92.4)), "of 60 to 90%, all above half"
    for policy, chunk, share in (("orca", None, 0.9), ("sarathi", 128, 0.8), ("sarathi", 256, 0.7)):
        keys = {"policy": {"_target_": policy} | ({"chunking": {"chunk": chunk}} if chunk else {})}
        about = {"policy": policy + f"(chunk={chunk})" * bool(chunk), "chunk": chunk}
        figures = {"replicas": {"seconds": 1.0}, "goodput": {"attained_share": share}}
        write_run(tmp_path / "chunks" / f"{policy}{chunk}", about, keys, figures=figures)
    (panel,) = tradeoff.draw(tmp_path / "chunks").axes
    drawn = {str(part.get_label()): part.lines[0] for part in panel.containers if isinstance(part, ErrorbarContainer)}
    assert {label: len(line.get_xdata()) for label, line in drawn.items()} == {"orca": 1, "sarathi": 2}  # type: ignore[union-attr]
    assert "lines join chunk [tokens]: 128, 256" in str(panel.figure.get_label())
    for number, (policy, chunk, rate) in enumerate(product(("a", "b"), (256, 512), (8, 4))):
        keys = {"policy": {"_target_": policy, "chunk": chunk}, "workload": {"arrivals": {"rate": rate}}}
        figures = {"replicas": {"seconds": chunk + rate}, "goodput": {"attained_share": 1 / rate + chunk / 1e4}}
        about = {"policy": f"{policy}(chunk={chunk})", "chunk": chunk}
        figures["replicas"]["seconds"] += 1000.0 * (policy == "b")
        write_run(tmp_path / "both" / str(number), about, keys, figures=figures)
    (panel,) = tradeoff.draw(tmp_path / "both").axes
    drawn = {str(part.get_label()): part.lines[0] for part in panel.containers if isinstance(part, ErrorbarContainer)}
    along = {f"{policy}(chunk={chunk})": chunk + 1000 * (policy == "b") for policy in "ab" for chunk in (256, 512)}
    assert {label: [*line.get_xdata()] for label, line in drawn.items()} == {  # type: ignore[union-attr]
        label: [seconds + 4, seconds + 8] for label, seconds in along.items()
    }


@pytest.mark.parametrize(
    ("figures", "axes"),
    [  # of two runs: replica-seconds, attained shares, offered rates
        (((90, 0.5, 4.0), (80, 0.9, 4.0)), ("replica-seconds", "attained [%]")),
        (((90, None, 4.0), (80, None, 4.0)), ("replica-seconds", "TTFT P99 [s]")),
        (((None, 0.5, 4.0), (None, 0.5, 8.0)), ("throughput [tokens/s]", "TTFT P99 [s]")),
        (((None, None, 4.0), (None, None, 4.0)), ("TBT P99 [ms]", "TTFT P99 [s]")),
        (((None, None, None), (None, None, None)), ("throughput [tokens/s]", "TBT P99 [ms]")),
    ],
)
def test_axes_fit_the_sweep(figures: Any, axes: tuple[str, str], tmp_path: Path) -> None:
    for number, (seconds, attained, rate) in enumerate(figures):
        groups: dict[str, Any] = {"replicas": {"seconds": seconds}} if seconds else {}
        groups |= {"goodput": {"attained_share": attained}}
        groups |= {"run": {"offered_requests_per_second": rate}}
        write_run(tmp_path / str(number), {"policy": "ab"[number]}, figures=groups)
    (panel,) = tradeoff.draw(tmp_path).axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == axes


def test_a_wide_latency_has_a_logarithmic_axis(tmp_path: Path) -> None:
    """Means of 1.15 and 11.5 s; a chunk swept for two policies of which one calls it by another name: a line for each."""
    for number, (policy, chunk, seed) in enumerate(product(("sarathi", "vllm_v1"), (128, 512), (0, 1))):
        own = {"budget": chunk} if policy == "vllm_v1" else {"chunking": {"chunk": chunk}}
        keys = {"policy": {"_target_": policy, **own}, "workload": {"seed": seed}}
        seconds = (10.0 if chunk == 128 else 1.0) * (1 + seed * 0.3)
        figures = {"ttft_seconds": {"p99": seconds}, "tbt_seconds": {"p99": 0.01 + number / 1e3}}
        about = {"policy": f"{policy}(chunk={chunk})", "chunk": chunk}
        write_run(tmp_path / str(number), about, keys, figures=figures)
    (panel,) = tradeoff.draw(tmp_path, x="tbt_seconds.p99", y="ttft_seconds.p99").axes
    drawn = {str(part.get_label()): part.lines[0] for part in panel.containers if isinstance(part, ErrorbarContainer)}
    assert {label: len(line.get_xdata()) for label, line in drawn.items()} == {"sarathi": 2, "vllm_v1": 2}  # type: ignore[union-attr]
    assert (panel.get_xscale(), panel.get_yscale(), panel.get_ylabel()) == ("linear", "log", "TTFT P99 [s] (log)")
    assert panel.get_ylim() == pytest.approx((1.15 / 3 / 1.1, 1.1 * (11.5 + 12.7062 * 1.5))), "cut at a third of 1.15"
    texts = [text.get_text() for text in panel.texts]
    assert texts == ["chunk=128", "512", "128", "512"], "at the ends of each line; the first says what they are"
    boxes = [text.get_window_extent() for text in panel.texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    places = [place for line in drawn.values() for place in panel.transData.transform(line.get_xydata())]  # type: ignore[union-attr]
    assert not any(box.contains(*place) for box, place in product(boxes, places))
    assert save(panel.figure, tmp_path, "wide.png"), "intervals down to 0 leave room for the panel"  # type: ignore[arg-type]


def test_a_number_beside_a_line_does_not_cover_it(tmp_path: Path) -> None:
    """The place below and right of the first marker, the preferred one, lies on a line that falls."""
    for chunk, seconds in ((128, 4.0), (256, 2.0), (512, 1.9)):
        keys = {"policy": {"_target_": "sarathi", "chunking": {"chunk": chunk}}}
        figures = {"ttft_seconds": {"p99": seconds}, "tbt_seconds": {"p99": 0.02 - seconds / 1e3}}
        write_run(tmp_path / str(chunk), {"policy": f"sarathi(chunk={chunk})", "chunk": chunk}, keys, figures=figures)
    (panel,) = tradeoff.draw(tmp_path, x="tbt_seconds.p99", y="ttft_seconds.p99").axes
    (line,) = (part.lines[0] for part in panel.containers if isinstance(part, ErrorbarContainer))
    points = panel.transData.transform(line.get_xydata())  # type: ignore[union-attr]
    shares = np.linspace(0, 1, 500)[:, None]
    drawn = np.concatenate([first + shares * (last - first) for first, last in pairwise(points)])
    assert [text.get_text() for text in panel.texts] == ["chunk=128", "512"]
    assert not any(text.get_window_extent().count_contains(drawn) for text in panel.texts)
