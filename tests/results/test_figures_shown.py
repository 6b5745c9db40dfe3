"""The figures of a run made by hand (`hand_made`), each under its own name in files, frames, reports and tables."""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hand_made import end, make_record, make_summary, write_run
from places import ROOT
from test_figures import FIGURES

from cbatch import SLO, ConfigError, FinishReason, Request
from cbatch.record import Life
from cbatch.results.metrics import collect_served
from cbatch.results.service import service_of
from experiments.api import simulate
from experiments.report import text as texts
from experiments.report import titles
from experiments.report.headings import check_figure
from experiments.report.intervals import Compared, Mean
from experiments.report.run_text import run_text
from experiments.report.text import format_number, format_share
from experiments.store.csv_tables import REQUEST_COLUMNS, has_rows, request_rows
from experiments.store.run_folder import damage, read_finished, read_summary
from experiments.store.runs import read_runs
from experiments.store.tables import read_requests, read_service, read_steps, read_tokens, time_between_tokens
from experiments.workloads import Workload


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("by_hand") / "run")


def test_a_row_of_requests_csv_says_what_was_asked_and_what_came_of_it(folder: Path) -> None:
    with (folder / "requests.csv").open() as file:
        rows = {row["id"]: {key: value for key, value in row.items() if value} for row in csv.DictReader(file)}
    assert list(rows) == ["2", "0", "3", "1"]  # in the order of their ends
    submitted = "id=1 max_new_tokens=2 client=ann tier=gold priority=0 slo_ttft_seconds=4.0 "
    times = "arrival=1.5 admitted=3.25 first_token=11.0 last_token=12.0 ended=12.0 "
    outcome = "prompt_tokens=7 output_tokens=2 finish_reason=length preemptions=1 recomputed_tokens=4 "
    latencies = "scheduling_delay_seconds=1.75 ttft_seconds=9.5 tpot_seconds=1.0 end_to_end_seconds=10.5"
    assert rows["1"] == dict(cell.split("=") for cell in (submitted + times + outcome + latencies).split())
    assert rows["0"]["priority"] == "7"
    single = {"arrival": "5.5", "finish_reason": "stop", "output_tokens": "1", "scheduling_delay_seconds": "0.0"}
    assert single.items() <= rows["3"].items() and "tpot_seconds" not in rows["3"]
    rejected = (
        "id=2 max_new_tokens=9 priority=0 arrival=2.0 ended=5.5 prompt_tokens=9 output_tokens=0 finish_reason=rejected "
    )
    cells = (rejected + "reject_reason=too_long preemptions=0 recomputed_tokens=0").split()
    assert rows["2"] == {key: text.replace("_", " ") for key, text in (cell.split("=") for cell in cells)}


def test_a_request_that_left_after_its_first_token_has_the_times_until_then_and_no_latencies() -> None:
    """It came with iteration 2, which was planned at 5.5 s."""
    record = make_record()
    late = Request(4, 1, 1)
    late.arrive(5.5)
    record.requests = [end(late, 6.0, 9.0, FinishReason.CANCELLED, token_times=(7.0, 8.0))]
    [row] = request_rows(record, collect_served(record))
    shown = dict(zip(REQUEST_COLUMNS, row, strict=True))
    times = {"arrival": 5.5, "admitted": 6.0, "first_token": 7.0, "last_token": 8.0, "ended": 9.0, "ttft_seconds": None}
    assert {key: shown[key] for key in times} == times


def test_a_table_has_its_rows_or_was_cut_off(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    for text, rows in ((b"a\r\n1\r\n2\r\n", 2), (b'a\r\n"1\r\n\xff"\r\n2\r\n', 2), (b"a\r\n", 0)):
        table.write_bytes(text)
        assert [has_rows(table, number) for number in range(3)] == [number == rows for number in range(3)]
        table.write_bytes(text[:-1])
        assert not has_rows(table, rows)


def test_names_of_digits_are_text(tmp_path: Path) -> None:
    table = write_run(tmp_path / "run") / "requests.csv"
    table.write_bytes(table.read_bytes().replace(b",ann,,gold,", b",07,08,NA,"))
    assert read_requests(table.parent)[["client", "session", "tier"]].iloc[-1].to_list() == ["07", "08", "NA"]


def test_the_service_of_a_runs_clients(tmp_path: Path) -> None:
    """Requests 0, 3 and 1 were served and ended in this order; the files and the record give the same service."""
    record = make_record()
    settings = {"metrics": {"client_weights": {"ann": 2.0}}}
    stored = read_service(write_run(tmp_path / "run", settings=settings))
    columns = {"client": ["no client", "no client", "ann"], "arrival": [0.25, 5.5, 1.5], "first_token": [3, 8, 11]}
    columns |= {"last_token": [8, 8, 12], "prompt_tokens": [5, 3, 7], "output_tokens": [3, 1, 2]}
    for service in (stored, service_of(record.requests, collect_served(record), {"ann": 2.0})):
        assert service is not None and service.weights == {"ann": 2}
        assert {name: getattr(service, name).tolist() for name in columns} == columns
    table = tmp_path / "run" / "requests.csv"
    table.write_bytes(table.read_bytes().replace(b"ann", b""))
    assert read_service(tmp_path / "run") is None


def test_the_tables_of_a_run_hold_its_record(folder: Path) -> None:
    steps, requests, tokens = read_steps(folder), read_requests(folder), read_tokens(folder)
    told = {
        name: value
        for name, value in make_record().steps[2]._asdict().items()
        if "draft" not in name and name != "num_accepted"
    }
    assert {name: steps[name].iloc[2] for name in steps} == told, "columns of drafts are those of runs with a drafter"
    assert steps["note"].to_list() == ["", "", "NA", "", ""]  # text, whatever it looks like
    assert requests["ttft_seconds"].dropna().to_list() == [2.75, 2.5, 9.5]
    assert (tokens["request_id"].to_list(), tokens["time"].to_list()) == ([0, 0, 0, 1, 1, 3], [3, 5, 8, 11, 12, 8])
    assert time_between_tokens(folder).to_list() == [2, 3, 1]


def test_tokens_have_the_ids_of_their_requests_however_large(tmp_path: Path) -> None:
    class Own(Workload):
        def requests(self, vocabulary: Any) -> list[Request]:
            return [Request(2**number, 4, 2) for number in (5, 32, 40)]

    simulate("orca", Own(), output=tmp_path / "run")
    tokens, requests = read_tokens(tmp_path / "run"), read_requests(tmp_path / "run")
    assert tokens["request_id"].to_list() == sorted([*requests["id"], *requests["id"]])


REPORT = Path(__file__).with_name("report.txt").read_text().removesuffix("\n")


def _of_many(summary: dict[str, Any], number: int = 100) -> dict[str, Any]:
    """Returns the summary as if this many requests were served and counted, beside the one that was rejected."""
    return summary | {"run": summary["run"] | {"requests": number + 1, "counted_requests": number}}


@pytest.mark.parametrize(("number", "stated"), [(9, 2), (10, 3), (19, 3), (20, 4), (99, 4), (100, 5)])
def test_a_percentile_of_requests_is_printed_if_one_of_them_lies_beyond(number: int, stated: int) -> None:
    *_, to_first_token, _, between, _, _, end_to_end, _ = run_text(
        _of_many(make_summary(make_record()), number)
    ).splitlines()
    assert [line.split()[-5:].count("-") for line in (to_first_token, end_to_end)] == [5 - stated] * 2
    assert "-" not in between.split()


def test_the_printed_report_shows_each_figure_under_its_name() -> None:
    summary = _of_many(make_summary(make_record(), objectives=SLO(ttft=2.75)))
    assert run_text(summary) == REPORT
    named = {"about": summary["about"] | {"objectives": {"": "TTFT 2 s", "gold": "TTFT 1 s"}}}
    assert "attain TTFT 2 s\n" in (text := run_text(summary | named))
    assert "attain theirs (TTFT 2 s); gold 0.0% (TTFT 1 s)\n" in text
    without = [line for line in REPORT.splitlines() if not line.startswith(("goodput", "SLOs"))]
    assert run_text(_of_many(make_summary(make_record(slo=SLO())))).splitlines() == without
    difference, jain = {"mean": 1.5, "max": 4.0}, {"mean": 0.75}
    service = {"clients": {"ann": 5, "bob": 6}, "service_difference": difference, "jain_index": jain}
    text = run_text(make_summary(make_record()) | {"service": service})
    assert "service     2 clients; difference 1.5 per s, at most 4; Jain's index 0.75" in text.splitlines()
    summary = make_summary(make_record())
    cache = {"hit_share": 0.25, "cached_tokens": 12, "cached_again_tokens": 3, "evicted_blocks": 7}
    text = run_text(summary | {"prefix_cache": cache, "run": summary["run"] | {"cancelled_requests": 2}})
    assert "25.0% of prompt tokens found (12), 3 after preemptions; 7 blocks evicted" in text
    assert ", 2 cancelled, 0.571 per second offered\n" in text


def test_printed_lines_say_which_part_of_a_run_they_describe() -> None:
    """Without a warm-up 3 requests in 11.75 s; after request 0, which ended at 8 s, request 1 alone in the 4 s to 12 s."""
    [rate] = [line for line in run_text(make_summary(make_record())).splitlines() if line.startswith("requests/s")]
    assert rate == "requests/s  0.255: 3 served in 11.8 s, 1 rejected, 0.571 per second offered"
    parts = {"service": {"clients": {"ann": 5}, "service_difference": {"mean": 1, "max": 4}, "jain_index": {"mean": 1}}}
    parts |= {"regret": {"latency": 1, "latency_bound": 2, "makespan": 3}}
    parts |= {"prefix_cache": {"cached_tokens": 12, "cached_again_tokens": 3, "hit_share": 0.5, "evicted_blocks": 7}}
    text = run_text(make_summary(make_record(), warmup_requests=1) | parts)
    lines = {line.split()[0]: line for line in text.split("\n\n")[1].splitlines()}
    assert lines["counted"] == "counted     1 of 3 served, 4 of 12.5 s"
    assert lines["requests/s"] == "requests/s  0.25: 1 served in 4 s; whole run: 1 rejected, 0.571 per second offered"
    assert lines["iterations"].endswith("; whole run: 5 iterations")
    assert "; whole run: 1 preemption, 4 tokens recomputed" in lines["KV"]
    assert all(lines[name].split()[1:3] == ["whole", "run:"] for name in ("service", "regret"))
    assert lines["prefixes"].endswith("after preemptions; whole run: 7 blocks evicted")


def test_bounds_and_lines_of_a_run() -> None:
    summary = make_summary(make_record())
    regret = {"latency": 1.5, "latency_bound": 2.0, "makespan": 1.25}
    line = "regret      mean latency 1.5 x its lower bound of 2 s, makespan 1.25 x"
    assert line in run_text(summary | {"regret": regret}).splitlines()
    regret |= {"violations": 3, "violations_bound": 1}
    assert f"{line}; 3 violations over the lower bound of 1" in run_text(summary | {"regret": regret}).splitlines()
    assert texts.run_line("a", summary) == "a: 1.79 tokens/s, TTFT P50 2.75 s (measured)"
    assert texts.run_line("a", make_summary(make_record(), simulated())).endswith(" (simulated)")
    for key in ("workload.path", "workload.lengths.path"):
        title = titles.title_of(summary["about"] | {"identity": {key: "/data/lengths.csv"}})
        assert title == "prefill_first on closed (lengths.csv), llama-13b, async"


def test_a_run_says_which_gpus_it_has_and_what_each_replica_serves() -> None:
    """Replica 1 of three has three of four requests, replica 2 none. A router of one replica chooses nothing."""
    backend = {"replicas": 3, "router": "skew.First", "tensor_parallel": 2, "pipeline_stages": 4}
    record = make_record()
    record.replica_of, record.replicas = {0: 1, 1: 1, 2: 0, 3: 1}, [0, 1, 1, 1, 1]
    summary = make_summary(record, settings={"backend": backend}, num_replicas=3)
    assert summary["replicas"] == {"least_requests": 0, "most_requests": 3, "idle": 1}
    title, *lines = run_text(summary).splitlines()
    assert title.endswith(", async, tensor parallelism 2, 4 pipeline stages, 3 replicas, router First")
    assert "replicas    0 to 3 requests each; 1 replica computed nothing" in lines
    summary["replicas"] = {"least_requests": 3, "most_requests": 3}
    assert "replicas    3 requests each" in run_text(summary).splitlines()
    record.lives = [Life(0, 0.0, 0.0), Life(1, 0.0, 0.0), Life(2, 1.0)]
    scaled = make_summary(record, num_replicas=3)["replicas"]
    assert (scaled["least_requests"], scaled["most_requests"]) == (1, 3), "without one that was never ready"
    assert (
        titles.gpus_texts({"backend.replicas": 1, "backend.router": "round_robin", "backend.tensor_parallel": 1}) == []
    )
    assert titles.gpus_texts({"backend.replicas": 2}) == ["2 replicas"], "of runs with several routers"
    router = {"router": "cache_aware", "router.fallback": "tree", "router.seed": 3}
    given = {f"backend.{key}": value for key, value in router.items()}
    assert titles.gpus_texts({"backend.replicas": 2, **given}) == ["2 replicas", "router cache_aware(fallback=tree)"]
    scaled = {"backend.replicas": 12, "autoscale": "fixed"}
    assert titles.gpus_texts(scaled) == ["at most 12 replicas", "autoscaler fixed"]


@pytest.mark.parametrize(
    ("other", "own", "role", "text"),
    [
        ("prefill", "random", "decode", "routers a: random; b: tree"),
        ("prefill", None, "decode", "router round_robin (b: tree)"),
        ("both", "random", "both", "router round_robin (a: random; b: tree)"),
    ],
)
def test_the_clusters_router_is_named_where_it_is_asked(other: str, own: str | None, role: str, text: str) -> None:
    """One pool prefills and one decodes: with routers of their own the cluster's has nothing to choose."""
    pools = {"a.role": other, "a.router": own, "b.role": role, "b.router": "tree"}
    settings = {f"backend.pools.{key}": value for key, value in pools.items()}
    settings |= {"backend.replicas": 2, "backend.router": "round_robin"}
    assert titles.gpus_texts(settings, {"a": {"replicas": 1}, "b": {"replicas": 1}})[1:] == [text]


@pytest.mark.parametrize(
    ("gpus", "pools", "is_simulated", "noted"),
    [
        (2, {}, True, True),
        (1, {}, True, False),
        (2, {}, False, False),
        (1, {"a": 1, "b": 4}, True, True),
        (2, {"a": 1, "b": 1}, True, False),
    ],
)
def test_joules_of_several_gpus_per_replica_are_not_compared(
    gpus: int, pools: dict[str, int], is_simulated: bool, noted: bool
) -> None:
    """Simulated ones; measured joules need no comparison. Of pools their own GPUs count."""
    about = simulated() if is_simulated else {}
    summary = make_summary(make_record(), about, {"backend": {"tensor_parallel": gpus}})
    if pools:
        summary["about"]["pools"] = {
            name: {"tensor_parallel": own, "pipeline_stages": 1} for name, own in pools.items()
        }
    energy = {"joules_per_token": 0.5, "watts": 300.0}
    text = run_text(summary | {"energy": energy})
    assert text.count("with several GPUs per replica not compared with measurements") == noted


Ends = tuple[float, float, float]
WIDE, NONE = (-0.5, 0.5), (math.nan, math.nan, math.nan)


@pytest.mark.parametrize(
    ("ratio", "difference", "said", "disagreeing"),
    [
        ((1.5, 1.25, 1.75), (0.5, 0.25, 1000.0), ("1.5x [1.25, 1.75]", "+0.5 [0.25, 1,000]"), False),
        ((2 / 3, 0.5, 12345.6), (-2.0, -3.0, -1.0), ("0.6667x [0.5, 1.235e+04]", "-2 [-3, -1]"), True),
        ((1.1, 1.0, 1.2), (0.0, 0.25, 1.0), ("1.1x [1, 1.2]", "0 [0.25, 1]"), True),
        ((0.9, 0.8, 1.0), (-1.0, -2.0, -0.5), ("0.9x [0.8, 1]", "-1 [-2, -0.5]"), True),
        ((1.0006, 1.00004, 1.0012), (1.0, 0.1, 2.0), ("1.0006x [1.00004, 1.0012]", "+1 [0.1, 2]"), False),
        ((1.00002, 0.99998, 1.00006), (1e-9, *WIDE), ("1.00002x [0.99998, 1.00006]", "+1e-09 [-0.5, 0.5]"), False),
        ((1.1, 0.9, 1.2), (0.1, *WIDE), ("1.1x [0.9, 1.2]", "+0.1 [-0.5, 0.5]"), False),
        ((1.1, 1.05, 1.2), (0.1, *WIDE), ("1.1x [1.05, 1.2]", "+0.1 [-0.5, 0.5]"), True),
        ((0.8, 0.7, 0.9), (-0.1, *WIDE), ("0.8x [0.7, 0.9]", "-0.1 [-0.5, 0.5]"), True),
        (NONE, (0.1, *WIDE), ("-", "+0.1 [-0.5, 0.5]"), False),
    ],
)
def test_intervals_of_known_numbers(ratio: Ends, difference: Ends, said: tuple[str, str], disagreeing: bool) -> None:
    compared = Compared(ratio, difference, 5, True)
    assert tuple(texts.intervals_text(compared)[:2]) == said
    assert texts.disagree(compared) == disagreeing


def test_the_difference_of_two_shares_ends_at_100_points() -> None:
    """What is significant, and how many replications would show it, is of the whole interval."""
    for sign, said in ((1, "+78.2 [54.3, 100]"), (-1, "-78.2 [-100, -54.3]")):
        difference = (sign * 78.2, *sorted([sign * 54.3, sign * 102.1]))
        assert texts.intervals_text(Compared(NONE, difference, 2, True), 100.0)[1] == said
    cut, whole = (
        texts.intervals_text(Compared(NONE, (50.0, -150.0, 250.0), 2, True), most) for most in (100, math.inf)
    )
    assert (cut[1], whole[1]) == ("+50 [-100, 100]", "+50 [-150, 250]") and cut[2] == whole[2]


def test_means_of_known_numbers() -> None:
    means = {
        (12.0, 0.0): "12",
        (5.0, math.nan): "5",
        (4.756, 0.123): "4.76 ± 0.12",
        (4.756, 99.4): "4.76 ± 99",
        (5000.0, 1.234): "5,000 ± 1.2",
    }
    means |= {(30960.4, 99.5): "30,960 ± 100", (30960.4, 1234.6): "30,960 ± 1,235"}
    assert {key: texts.format_mean(Mean(*key, 5)) for key in means} == means
    equal = Compared((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), 5, True)
    assert texts.not_significant(equal) == "equal in every replication"


@pytest.mark.parametrize(
    ("name", "content", "read", "says"),
    [
        (
            "steps.csv",
            "iteration,started\n0,1,2\n1,1,2\n2,1,2\n3,1,2\n4,1,2\n",
            read_steps,
            "ValueError: 3 fields below a header of 2",
        ),
        ("steps.csv", "iteration,started\n" + 5 * "0,1\n", read_steps, "KeyError: 'planned_at'"),
        ("requests.csv", "id,x\n" + 4 * "0\n", read_requests, "ValueError: 1 fields below a header of 2"),
        ("requests.csv", "id\n" + 4 * "0\n", read_requests, "KeyError: 'scheduling_delay_seconds'"),
        ("tokens.npz", "nothing", read_tokens, "ValueError: "),
    ],
)
def test_a_file_that_was_changed_is_named(
    name: str, content: str, read: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        read(folder)
    assert str(caught.value).startswith(f"{folder / name}: is damaged ({says}")
    assert str(caught.value).endswith("); run it again")


@pytest.mark.parametrize(
    ("group", "value"), [("ttft_seconds", {"p50": "1"}), ("tpot_seconds", {"p50": []}), ("run", 5)]
)
def test_a_figure_that_is_no_number_is_named(group: str, value: object, tmp_path: Path) -> None:
    """By every reader of a run, which does not count as finished."""
    folder = write_run(tmp_path / "run")
    summary = read_summary(folder)
    assert summary and not damage(folder, summary)
    assert read_finished(folder, summary["about"]["identity"]) == summary
    summary[group] = value if group == "run" else {**summary[group], **value}
    key = group if group == "run" else f"{group}.p50"
    (folder / "summary.json").write_text(json.dumps(summary))
    assert damage(folder, summary).startswith(f"{folder / 'summary.json'}: {key} was changed; remove {folder}")
    assert read_finished(folder, summary["about"]["identity"]) is None
    with pytest.raises(ConfigError, match=r"summary.json: (is damaged|tp?[a-z]*_seconds.p50 was changed)"):
        read_runs(folder)


def test_a_row_of_the_frame_has_every_setting_and_figure(folder: Path) -> None:
    [row] = read_runs(folder).to_dict("records")
    expected = {f"{group}.{name}": value for group, values in FIGURES.items() for name, value in values.items()}
    expected |= {"goodput.requests_per_second": 2 / 11.75, "goodput.attained_share": 2 / 4}
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert (row["attainment.share"], row["attainment.tiers.gold.ttft_share"], row["attainment.requests"]) == (0, 0, 1)
    assert (row["label"], row["workload.length"], row["limits.batch"]) == ("prefill_first", 8, 4)
    assert row["folder"] == str(folder)


def test_the_frame_has_the_hardware_as_it_was_given_and_its_name(tmp_path: Path) -> None:
    for name in ("h100", "h200"):
        keys = {"requests": 2, "hardware": name, "output": tmp_path / name, "tables": False}
        assert simulate("orca", **keys).summary["about"]["hardware"] != name
    runs = read_runs(tmp_path)
    assert [*runs["hardware"]] == ["h100", "h200"]
    assert [*runs["device"]] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200, 141 GB"]


def test_numbers_have_three_digits_or_all_before_the_point() -> None:
    texts = {None: "-", math.nan: "-", 30960.4: "30,960", 1000: "1,000", 999.6: "1,000", 999.5: "1,000", 999.4: "999"}
    texts |= {4.756: "4.76", 0.03841: "0.0384", -1234.5: "-1,234"}
    assert {value: format_number(value) for value in texts} == texts
    assert [format_share(value) for value in (None, math.nan, 0.0384, 1.0)] == ["-", "-", "3.8%", "100.0%"]
    assert [format_share(value) for value in (0.0, 0.0000123, 0.00049)] == ["0.0%", "0.0012%", "0.049%"]


def simulated(outside: int = 0, **execution: object) -> dict[str, Any]:
    execution = {"profile": "h200", "error": "error: 5%", "not_measured": (), **execution}
    counts = {"iterations_outside_measured_range": outside}
    return {"simulated": True, "hardware": "NVIDIA H200", "execution": {**execution, **counts}}


def test_metric_takes_each_figure_that_the_page_describes() -> None:
    """Also those that few runs have, such as `run.lost_tokens`. Rows of other things than figures: terms of MFU, a table of profiles."""
    refused = []
    for section in (ROOT / "docs/metrics.md").read_text().split("\n## ")[1:]:
        groups = re.findall(r"`(\w+)\.`", section.partition("\n")[0]) or ["run"]
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
            for key in re.findall(r"`(\w[\w.]*\w)`", row):
                names = [
                    f"{start}{key}{end}" for start in ("", *(f"{group}." for group in groups)) for end in ("", ".mean")
                ]
                refused += [key] * (not any(is_taken(name) for name in names))
    assert refused == ["num_scores", "num_kv_reads", "h200"]


def is_taken(figure: str) -> bool:
    try:
        check_figure(f"metric={figure}")
    except ConfigError:
        return False
    return True
