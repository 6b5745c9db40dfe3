"""`simulate`, `serve` and `compare` of `experiments.api`: what they return is what the commands write and print."""

import json
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from commands import command

from cbatch import CachedBlock, CbatchError, Eviction, Plan, Request, View
from cbatch.cluster import LeastLoaded
from experiments.api import capacity, compare, plot, serve, simulate
from experiments.compare import pairs_of, table_of
from experiments.settings.keywords import check_read, settings_of
from experiments.setup.earlier_runs import EarlierRuns
from experiments.store.replications import read_replications
from experiments.store.tables import read_requests, read_steps
from experiments.workloads import GammaArrivals, OpenLoop, UniformLengths
from policies.autoscalers import Fixed as Scaled
from policies.chunking import Fixed, TileAligned
from policies.evictions import LFU, SoftTTL
from policies.sarathi_serve import SarathiServe

SHORT = "workload.lengths.pd_ratio"
LOADED = {"rate": 60, "requests": 40, "batch": 8, SHORT: 12}
WORDS = ["workload=open_loop", "workload.arrivals.rate=60", "workload.num_requests=40", "batch=8", "backend=sim"]
WORDS += [f"{SHORT}=12"]
CACHED = {"requests": 40, "batch": 8, "prefix_cache": True, "kv_tokens": 6000, "replicas": 2, SHORT: 20}


class Cycle:
    """What a run leaves behind: objects that refer to each other, which only the collector frees."""

    def __init__(self, number: int) -> None:
        self.parts: list[object] = [self, *(object() for _ in range(number))]


def test_what_earlier_runs_have_left_is_freed_once_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """By as much as there was, not by a hundredth; the next limit is that of the memory then. There is less than all that tests import."""
    imported, blocks = sys.getallocatedblocks() - 100_000, sys.getallocatedblocks
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: blocks() - imported)
    earlier = EarlierRuns()
    earlier.collect()
    for size, is_left in ((0.01, True), (1.0, False), (0.01, True)):
        left = weakref.ref(Cycle(int(size * sys.getallocatedblocks())))
        earlier.collect()
        assert (left() is not None) == is_left


class Failing:
    def plan(self, view: View) -> Plan:
        raise ValueError("two\nlines")


class Tiring:
    """Serves whole prompts, at most as many requests as it has energy; each end takes energy, until none is left to lose."""

    def __init__(self, energy: int = 8) -> None:
        self.energy = energy

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        for request in [*view.waiting]:
            if len(view.running) + 1 > self.energy or not plan.add(request, reserve=request.max_tokens):
                break
        return plan.build()

    def on_finish(self, request: Request) -> None:
        self.energy = max(1, self.energy - 1)


class Reading(LFU):
    """Reads its keys from a generator, which cannot be copied."""

    def __init__(self) -> None:
        self.lines = (line for line in "abc")


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """The figures of a summary, as JSON has them."""
    return json.loads(
        json.dumps({key: value for key, value in summary.items() if key != "about"}).replace("NaN", "null")
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "words", "keys"),
    [
        (SarathiServe(TileAligned(512)), ["policy=sarathi_serve", "chunk=512"], {}),
        ("vllm_v1", ["policy=vllm_v1", "policy.budget=300", "seed=3"], {"budget": 300, "seed": 3}),
        (
            "vtc",
            ["policy=vtc", "metrics.warmup_requests=5", "workload.slo={ttft:0.5}", "backend.replicas=2", "bounds=true"],
            {"metrics": {"warmup_requests": 5}, "slo": {"ttft": 0.5}, "replicas": 2, "bounds": True},
        ),
    ],
)
def test_a_simulation_is_that_of_the_command_line(
    policy: Any, words: list[str], keys: dict[str, Any], tmp_path: Path
) -> None:
    assert command("run", *WORDS, *words, "output=run", cwd=tmp_path).returncode == 0
    result = simulate(policy, "open_loop", **LOADED, **keys)
    pd.testing.assert_frame_equal(result.requests, read_requests(tmp_path / "run"))
    pd.testing.assert_frame_equal(result.steps, read_steps(tmp_path / "run"))
    assert figures(result.summary) == figures(json.loads((tmp_path / "run" / "summary.json").read_text()))
    written = simulate(policy, "open_loop", **LOADED, **keys, output=tmp_path / "again", tables=True)
    pd.testing.assert_frame_equal(written.requests, read_requests(tmp_path / "again"))


def test_nothing_is_written_and_an_object_is_a_workload_as_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = simulate("orca", "open_loop", rate=60, requests=40, batch=8, seed=2)
    made = simulate("orca", OpenLoop(arrivals=GammaArrivals(rate=60), num_requests=40), batch=8, seed=2)
    pd.testing.assert_frame_equal(named.requests, made.requests)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_eviction_and_a_router_are_objects_as_their_names_are() -> None:
    named = simulate("orca", "chat", eviction="soft_ttl", ttl=5.0, router="least_loaded", **CACHED)
    made = simulate("orca", "chat", eviction=SoftTTL(5.0), router=LeastLoaded(), **CACHED)
    pd.testing.assert_frame_equal(named.requests, made.requests)
    assert named.about["identity"] == made.about["identity"]
    assert made.summary["prefix_cache"]["evicted_blocks"] > 0


class Counting(Eviction):
    dynamic = True  # keys are requested before each eviction
    evictions: ClassVar = Counter[int]()  # by replica

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[Any]:
        self.evictions[id(self)] += 1
        return super().keys(blocks, now)


@pytest.mark.long
def test_evicted_blocks_are_those_of_all_replicas() -> None:
    found = simulate("orca", "chat", eviction=Counting(), **CACHED).summary["prefix_cache"]["evicted_blocks"]
    assert found == Counting.evictions.total() and len(Counting.evictions) == 2


def test_a_policy_keeps_nothing_of_a_run() -> None:
    policy = Tiring()
    first, second = (simulate(policy, "open_loop", **LOADED) for _ in range(2))
    pd.testing.assert_frame_equal(first.requests, second.requests)
    assert policy.energy == 8 and first.about["policy"] == "Tiring"
    assert first.summary["ttft_seconds"] != simulate(Tiring(4), "open_loop", **LOADED).summary["ttft_seconds"]


def test_real_tokens_are_in_the_record() -> None:
    result = serve(Tiring(), model="tiny", backend="cpu", requests=3, length=40)
    lengths = [len(request.output) for request in result.record.requests]
    assert lengths == result.requests["output_tokens"].tolist() and not result.summary["about"]["simulated"]


@pytest.mark.parametrize(
    ("policy", "keys", "named"),
    [
        ("orca", {"rat": 20}, ["rat: ", "did you mean rate?"]),
        ("orca", {"requests": 3, "num_requests": 4}, ["num_requests: ", "requests"]),
        ("orca", {"workload": "open_lop"}, ["workload=open_lop", "open_loop"]),
        ("orca", {"rate": -1}, ["workload.arrivals.rate=-1"]),
        ("orca", {"seeds": 2, "seed": [1, 2]}, ["seed=[1, 2]", "at least 0"]),
        ("orca", {"seeds": "2"}, ["seeds='2'", "at least 1"]),
        ("orca", {"seeds": True}, ["seeds=True", "at least 1"]),
        ("orca", {"chunk": "256"}, ["chunk='256'"]),
        ("orca", {"tiers": object()}, ["tiers=<object"]),
        ("orca", {"metrics": {"warm": 1}}, ["metrics.warm", "warmup_requests"]),
        ("orca", {"decisions": True}, ["decisions", "output="]),
        ("orca", {"backend": "cpu"}, ["backend=cpu", "serve"]),
        ("orca", {"output": 5}, ["output=5", "path"]),
        ("orca", {"model": 5}, ["model=5", "conf/model"]),
        ("orcs", {}, ["policy=orcs", "orca"]),
        (Tiring, {}, ["policy=Tiring: is a class", "Tiring()"]),
        (Tiring(), {"chunk": 256}, ["chunk=256", "policy object"]),
        ("orca", {"chunk": 512}, ["chunk=512", "no policy here reads it"]),
        ("tgi", {"predictor": "noisy", "share": 0.5}, ["predictor=noisy", "no policy here reads it"]),
        ("orca", {"autoscale": Scaled(replicas=1)}, ["autoscale: needs several replicas"]),
        (
            "orca",
            {"router": LeastLoaded(), "backend.router": "round_robin", "replicas": 2},
            ["is the same key as router"],
        ),
        (Tiring(), {"energy": 3}, ["energy: no such keyword", "of the policy are given to the object"]),
        ("orca", {"eviction": LFU()}, ["eviction=LFU", "give prefix_cache=true"]),
        ("orca", {"eviction": LFU, "prefix_cache": True}, ["eviction=LFU: is a class", "LFU()"]),
        ("orca", {"eviction": {}, "prefix_cache": True}, ["eviction=dict", "cbatch.Eviction"]),
        ("orca", {"router": Tiring()}, ["router=<", "choose()"]),
        ("orca", {"eviction": Reading(), "prefix_cache": True, "requests": 3}, ["eviction Reading cannot be copied"]),
        ("orca", {"seds": 3}, ["did you mean seeds? known: arrivals, ", " autoscale,", " drafting,", " output,"]),
        (
            Tiring(),
            {"predictor.share": 3},
            ["predictor.share: no such keyword", "of the policy are given to the object"],
        ),
        (Failing(), {}, ["policy Failing, iteration 0: plan() raised ValueError: two lines (test_python.py:"]),
        (Tiring(), {"bacth": 3}, ["bacth: no such keyword", "did you mean batch?"]),
        (
            Tiring(),
            {"workload": OpenLoop(arrivals=GammaArrivals(rate=1)), "rate": 2},
            ["rate: no ", "workload are given to the object itself; "],
        ),
    ],
)
def test_a_mistake_is_a_line(policy: Any, keys: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(CbatchError) as error:
        simulate(policy, **{"workload": "open_loop", **keys})
    assert "\n" not in str(error.value) and all(part in str(error.value) for part in named), str(error.value)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"drafter": "survivals", "alpha": 0.7}, "drafter"),
        ({"drafter": "survivals", "drafter.alpha": 0.7}, "drafter"),
        ({"drafter": "glm_mtp", "drafting": "fixed", "drafting.k": 7}, "policy"),
        ({"predictor": "noisy", "share": 0.7}, "policy"),
        ({"chunking": "pd_aware", "chunking.pd_ratio": 0.7}, "policy"),
        ({"autoscale": "arrivals", "replicas": 2, "capacity": 0.7}, "autoscale"),
    ],
)
def test_every_group_has_keywords(keys: dict[str, Any], part: str) -> None:
    settings = settings_of("srpt" if "predictor" in keys else "sarathi_serve", "open_loop", {"backend": "sim", **keys})
    assert [*keys.values()][-1] in [value for key, value in settings.identity.items() if key.startswith(part)]


def test_a_keyword_is_read_by_one_of_the_compared_policies() -> None:
    orca, sarathi = (settings_of(policy, "open_loop", {"chunk": 64}) for policy in ("orca", "sarathi"))
    check_read([orca, sarathi])
    with pytest.raises(CbatchError, match=r"^chunk=64: has no effect"):
        check_read([orca, orca])


def test_one_seed_is_refused_before_a_run() -> None:
    """The policies do not exist, so that a run would fail otherwise."""
    with pytest.raises(CbatchError, match=r"^seeds=1: one seed gives no interval; give more, as in seeds=3$"):
        compare(["a", "b"], seeds=1)


def test_serve_refuses_to_simulate() -> None:
    for backend in ("sim", "auto"):
        with pytest.raises(CbatchError, match=f"^backend={backend}: simulate predicts times; serve gives real tokens"):
            serve("orca", backend=backend)


@pytest.mark.long
def test_seeds_are_replications_with_the_means_of_a_sweep(tmp_path: Path) -> None:
    several = simulate(Tiring(), "open_loop", **LOADED, seed=3, seeds=2, output=tmp_path / "out")
    alone = [simulate(Tiring(), "open_loop", **LOADED, seed=seed).summary["ttft_seconds"] for seed in (3, 4)]
    assert [result.summary["ttft_seconds"] for result in several.results] == alone
    assert several.runs["ttft_seconds.p50"].mean() == pytest.approx(sum(each["p50"] for each in alone) / 2)
    assert "over 2 runs" in str(several) and "over 2 runs" in several._repr_html_()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["seed=3", "seed=4"]

    figure = plot("latency_cdf", tmp_path / "out", size=(3.5, 2.9), labels={"Tiring": "Tired & slow"}, notes=False)
    assert figure.get_size_inches().tolist() == [3.5, 2.9]
    assert "Tired & slow" in [text.get_text() for text in figure.legends[0].get_texts()]
    for name, keys, said in (("table", {}, "is a text"), ("latency_cdf", {"sise": 3}, "did you mean size?")):
        with pytest.raises(CbatchError, match=said):
            plot(name, tmp_path / "out", **keys)


@pytest.mark.long
def test_a_capacity_is_that_of_the_command(tmp_path: Path) -> None:
    few = {"model": "tiny", "batch": 2, "requests": 100, "replications": 3, "accuracy": 0.9, "cores": 1}
    short = OpenLoop(arrivals=GammaArrivals(rate=60), lengths=UniformLengths(min_length=16, max_length=24, pd_ratio=10))
    words = ["workload.lengths={min_length:16,max_length:24,pd_ratio:10}", "slo.ttft=0.003", "output=out"]
    words += [f"{key}={value}" for key, value in few.items()]
    ended = command("capacity", "policy=orca", "workload=open_loop", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads((tmp_path / "out" / "capacity.json").read_text())["capacity"]
    found = capacity("orca", short, slo={"ttft": 0.003}, **few)  # type: ignore[arg-type]
    assert (found.value, found.low, found.high) == tuple(figures[key] for key in ("requests_per_second", "low", "high"))
    assert "requests/s" in str(found) and str(found).splitlines()[0] in ended.stdout
    with pytest.raises(CbatchError, match="no objective is set"):
        capacity("orca", short, **few)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (partial(compare, ["orca", "sarathi"], metric=5), "^metric=5: "),
        (
            partial(compare, ["orca", "sarathi"], metric=["ttft_seconds.p50", "prefix_cache.hit_share"]),
            "^metric=prefix_",
        ),
        (partial(compare, [Failing(), "trail(c=-1)"]), "c=-1"),  # before the first run, which would fail
        (partial(capacity, "orca", slo={"ttft": 1}, output=5), "^output=5: give the path"),
        (partial(plot, 5, "out"), "^plot 5: no such plot"),
        (partial(plot, "curves", None), "^folder=None: give the path"),
    ],
)
def test_an_argument_that_cannot_be_used_is_a_line(call: Any, said: str) -> None:
    with pytest.raises(CbatchError, match=said):
        call()


@pytest.mark.parametrize("policies", ["orca", ["orca"], None], ids=["a name", "one", "none"])
def test_a_comparison_is_of_two_policies(policies: Any) -> None:
    with pytest.raises(CbatchError, match="at least two policies"):
        compare(policies, "open_loop", rate=1)


@pytest.mark.long
def test_a_comparison_has_the_intervals_of_the_command(tmp_path: Path) -> None:
    policies = ["policy=sarathi_serve,sarathi_serve(chunking=fixed),tiring.Tiring"]
    metrics = ["ttft_seconds.p50", "throughput.total_tokens_per_second"]
    (tmp_path / "tiring.py").write_text("from test_python import Tiring as Made\n\n\nclass Tiring(Made):\n    pass\n")
    swept = command("run", "-m", "sweep=it", *policies, *WORDS, "seeds=2", cwd=tmp_path)
    assert swept.returncode == 0, swept.stderr
    rows = read_replications([tmp_path / "multirun" / "it"])
    expected = table_of(pairs_of(rows, metrics, rows["label"].iloc[0]))
    compared = compare(
        [SarathiServe(TileAligned(256)), SarathiServe(Fixed(256)), Tiring()],
        "open_loop",
        seeds=2,
        metric=metrics,
        **LOADED,
    )
    pd.testing.assert_frame_equal(
        compared.table.drop(columns=["label", "over"]), expected.drop(columns=["label", "over"])
    )
    assert compared.table["label"].unique().tolist() == ["sarathi_serve(chunking=fixed(chunk=256))", "Tiring"]
    assert "paired, on the same requests" in str(compared) and len(compared.runs) == 6
    with pytest.raises(CbatchError, match="1 labels"):
        compare([Tiring(), Tiring()], "open_loop", seeds=2, **LOADED)
