"""Results that are taken while a run goes on are those of the whole run, and its memory does not grow with its requests."""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import Outcome, outcome
from small_cluster import make_cost
from test_leaps import Choosy, draw_requests

from cbatch import SLO, ConfigError, Limits, Policy, Request, RequestSpec, RunRecord, Server
from cbatch.arrivals import Streamed
from cbatch.kv import KVSize
from cbatch.model.topology import Topology
from cbatch.results.gathered import Gathered
from cbatch.results.metrics import Served, collect_served, counted_statistics, statistics
from cbatch.results.summary import summarize
from cbatch.sim.executor import SimExecutor
from experiments import run
from experiments.store.csv_tables import RunTables
from experiments.store.runs import read_runs
from experiments.store.tables import read_requests, time_between_tokens
from policies.chunking import Fixed
from policies.mlfq import MLFQ
from policies.prefill_first import PrefillFirst
from policies.sarathi_serve import SarathiServe


def make_server(asynchronous: bool = True) -> Server:
    """The KV cache is short, so that requests are preempted."""
    cost = make_cost(Topology())
    return Server(SimExecutor(cost, 1e-5), Limits(4, 130, 120, tile=1), cost, KVSize(40, 4), asynchronous)


def serve_in_pieces(server: Server, policy: Policy, requests: Sequence[Request], folder: Path) -> Gathered:
    engine, gathered = server.engine(policy), Gathered()
    with RunTables(folder) as tables:

        def take(piece: RunRecord) -> None:
            tables.write(piece, gathered.add(piece))

        engine.attach(Streamed(lambda: requests))
        engine.run(lambda engine: take(engine.record.take()) if len(engine.record.steps) > 3 else None)
        take(engine.record.take())
    return gathered


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "policy", [PrefillFirst(), SarathiServe(Fixed(8)), Choosy(), MLFQ()], ids=lambda policy: type(policy).__name__
)
def test_a_stream_gives_the_tables_and_figures_of_a_run(policy: Policy, asynchronous: bool, tmp_path: Path) -> None:
    """Compares runs with hidden lengths, gaps without requests, preemptions and rejections.

    Every figure is the same to the bit but the mean time between tokens, whose terms are added in another order.
    """
    for seed in range(8):
        requests, again = (draw_requests(random.Random(seed)) for _ in range(2))
        if requests.iterations:
            continue
        record = make_server(asynchronous).serve(policy, requests)
        with RunTables(tmp_path) as whole:
            whole.write(record, collect_served(record))
        run_of_pieces = serve_in_pieces(make_server(asynchronous), policy, again.known, tmp_path / "streamed")
        for name in ("steps.csv", "requests.csv"):
            assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / name).read_bytes(), f"workload {seed}"
        for some in ({}, {"warmup_requests": 1, "drain_requests": 1}):
            options: dict[str, Any] = {"num_blocks": 40, "max_batch": 4, "objectives": SLO(ttft=0.05), **some}
            whole, found = summarize(record, **options), summarize(run_of_pieces, **options)
            mean = found["tbt_seconds"].pop("mean")
            assert mean == pytest.approx(whole["tbt_seconds"].pop("mean"), rel=1e-12, nan_ok=True)
            assert repr(found) == repr(whole), f"workload {seed}"  # NaN where there is nothing


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 30)), min_size=1, max_size=12))
def test_counted_values_have_the_percentiles_of_all_values(counted: list[tuple[float, int]]) -> None:
    values, counts = (np.array(column) for column in zip(*counted, strict=True))
    all_values = statistics(np.repeat(values, counts))
    found = counted_statistics(values, counts)
    assert found.pop("mean") == pytest.approx(all_values.pop("mean"), rel=1e-12)
    assert found == all_values


def a_run(folder: Path, *arguments: str) -> Outcome:
    given = {argument.partition("=")[0] for argument in arguments}
    unless_given = {"policy": "orca", "workload.num_requests": 40}
    settings = [f"{key}={value}" for key, value in unless_given.items() if key not in given]
    settings += ["backend=sim", "workload=open_loop", "batch=4", "progress=off"]
    return outcome(run.main, [*settings, *arguments, f"output={folder}"])


@pytest.mark.long
@pytest.mark.parametrize(
    "pools",
    [
        "",
        "{a: {batch: 2, hardware: h100}, b: {replicas: 3, kv_tokens: 8000}}",
        "{p: {role: prefill}, d: {role: decode}}",  # the first piece has first tokens, and no transfer
    ],
)
def test_a_streamed_run_leaves_the_folder_of_a_run_without_tokens_and_timeline(
    pools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of several replicas are in one order, although a replica is ahead of others when they are written."""
    monkeypatch.setattr("experiments.serve.AT_ONCE", 0 if "role" in pools else 40)
    streamed, whole = tmp_path / "streamed", tmp_path / "whole"
    load = ("decisions=on", "workload.arrivals.rate=40", "workload.lengths.pd_ratio=12")
    keys = [*load, *[f"backend.pools={pools}", "prefix_cache=true"] * bool(pools)]
    ended = a_run(streamed, "stream=on", *keys), a_run(whole, "stream=off", *keys)
    assert [each.complaint for each in ended] == ["", ""]
    for name in ("requests.csv", "steps.csv", *["replicas.csv"] * bool(pools)):
        assert (streamed / name).read_bytes() == (whole / name).read_bytes()
    lines = [gzip.decompress((folder / "decisions.jsonl.gz").read_bytes()).splitlines() for folder in (streamed, whole)]
    decisions = [sorted(line for line in found if not line.startswith(b'{"run"')) for found in lines]
    assert decisions[0] == decisions[1], "in another order, as requests are made when they arrive"
    figures = [json.loads((folder / "summary.json").read_text()) for folder in (streamed, whole)]
    parts = [[found, *found.get("pools", {}).values()] for found in figures]
    means = [[part["tbt_seconds"].pop("mean") or 0.0 for part in of_run] for of_run in parts]
    assert means[0] == pytest.approx(means[1], rel=1e-12)
    assert {**figures[0], "about": 0} == {**figures[1], "about": 0}
    lacking = {path.name for path in whole.iterdir()} - {path.name for path in streamed.iterdir()}
    assert lacking == {"tokens.npz", "timeline.json.gz"}
    assert read_runs(streamed).label.tolist() == read_runs(whole).label.tolist()
    with pytest.raises(ConfigError, match="a streamed run writes no tokens; run it again with stream=off"):
        time_between_tokens(streamed)


@pytest.mark.long
def test_a_streamed_run_holds_only_requests_that_are_about_to_arrive_or_have_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is about to arrive, a few run, and those that end within 40 iterations are not written yet."""
    made, held, begin, add = WeakSet[Request](), list[int](), Request._begin, Gathered.add

    def note_made(request: Request, spec: RequestSpec) -> None:
        begin(request, spec)
        made.add(request)

    def note_held(gathered: Gathered, piece: RunRecord) -> Served:
        held.append(len(made))
        return add(gathered, piece)

    monkeypatch.setattr(Request, "_begin", note_made)
    monkeypatch.setattr(Gathered, "add", note_held)
    monkeypatch.setattr("experiments.serve.AT_ONCE", 40)
    short = ("workload.lengths.min_length=30", "workload.lengths.max_length=60", "workload.arrivals.rate=20")
    done = a_run(tmp_path / "run", *short, "stream=on", "workload.num_requests=800")
    assert done.complaint == "" and len(read_requests(tmp_path / "run")) == 800
    assert len(held) > 5 and max(held) < 200
