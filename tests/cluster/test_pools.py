"""Unlike replicas: pools with setups of their own, and results that say which pool served what."""

import gzip
import json
import re
from pathlib import Path

import pytest
from commands import summary
from matplotlib.axes import Axes

from cbatch import CbatchError
from cbatch.cluster import ClusterView, Role
from cbatch.request import Request
from cbatch.sim import load_profile
from cbatch.sim.profile_file import PROFILES
from cbatch.sim.roofline import Affine
from experiments.api import Result, simulate
from experiments.plots import composition
from experiments.report.run_text import run_text
from experiments.settings.compose import compose_run
from experiments.settings.groups import CONFIG_FOLDER
from experiments.setup.assemble import assemble
from experiments.setup.moves import moves_of
from experiments.store.tables import read_replicas, read_requests, read_steps

POOLS = {
    "large": {"hardware": "h100", "batch": 8, "tensor_parallel": 2, "policy": {"chunking": {"chunk": 512}}},
    "small": {"replicas": 2, "batch": 2, "kv_tokens": 16 * 200},
}


class LongToLarge:
    """Long prompts to the large replica, the others to the small ones in turn."""

    def choose(self, request: Request, view: ClusterView) -> int:
        pools = [replica.pool for replica in view]
        assert pools == ["large", "small", "small"] and [replica.num_blocks for replica in view][1:] == [200, 200]
        return 0 if request.num_prompt_tokens > 700 else 1 + request.id % 2


def served(folder: Path | None = None, **keys: object) -> Result:
    work = {"workload": "open_loop", "requests": 120, "rate": 120, "batch": 4, "kv_tokens": 16 * 2000, "block_size": 16}
    given = {"pools": POOLS, "router": LongToLarge(), **work, **keys}
    return simulate("sarathi_serve", output=folder, **given)


@pytest.mark.parametrize("network", [None, 50])
def test_a_decoder_admits_ahead_of_copies_within_a_node(network: int | None) -> None:
    """With the profile's times of copied blocks, which lengthen iterations; a network's adapters send alone, at the rate given, and tell the host of the end."""
    pools = "backend.pools={p: {role: prefill}, d: {role: decode}}"
    far = () if network is None else ("backend.gpus_per_node=1", f"backend.network={network}")
    settings = compose_run("model=llama-3.1-8b", "hardware=h200", "backend=sim", "prefix_cache=true", pools, *far)
    links, moves = (
        load_profile("h200").links,
        moves_of(settings, assemble(settings).setups, [Role.PREFILL, Role.DECODE]),
    )
    assert moves is not None and (moves.ahead, moves.delay) == ((False, None) if network else (True, links.delay))
    assert moves.link == (Affine(0.0, 1e-9 / 50) if network else links.kv_blocks)


def test_prefillers_end_no_requests_and_say_what_they_computed(tmp_path: Path) -> None:
    """Six prompts of 100 tokens by turns on two prefillers; the decoder computes 4 after six blocks of 16 again, and the first output token."""
    pools = {"p": {"role": "prefill", "replicas": 2}, "d": {"role": "decode"}}
    work = {"workload": "closed", "workload.num_requests": 6, "workload.length": 125, "workload.pd_ratio": 4}
    run = simulate("sarathi_serve", block_size=16, prefix_cache=True, pools=pools, output=tmp_path / "run", **work)
    lines = dict(re.findall(r"^(pool \w|\w+) +(.*)$", str(run), re.MULTILINE))
    assert lines["pool p"].startswith("600 tokens prefilled by 2 replicas: ")
    assert lines["pool d"].startswith("30 tokens prefilled; 6 requests, 150 output tokens by 1 replica: ")
    assert lines["replicas"] == "6 requests, in d"
    assert "0 preemptions, 24 tokens recomputed (3.1%) after moves" in str(run), "6 x 4 of 630 + 6 x 23"
    sent = (
        6 * 96 * 2 * 32 * 8 * 128 * 2 / 1e9
    )  # six blocks of 16 tokens each: keys and values, 32 layers, 8 heads of 128, 2 bytes
    seen = sum(1e3 * (transfer.ended - transfer.started) for transfer in run.record.transfers) / 6
    assert lines["transfers"] == (
        f"6, together {sent:.3g} GB; on average {seen:.3g} ms left after the prefill, 0.0% of the bytes hidden during prefills"
    )
    assert str(run).count("latencies of 6 requests") == 1 and "pool d: latencies" not in str(run), "those of the run"
    lost = str(
        simulate(
            "sarathi_serve", block_size=16, prefix_cache=True, pools=pools, **work, **{"backend.transfers.lease": 1e-9}
        )
    )
    assert "; 6 leases ended unread, of 576 tokens\n" in lost
    again = "600 tokens recomputed (44.6%): 24 after moves, 576 after lost leases\n"
    assert f"0 preemptions, {again}" in lost, "of 600 + 600 + 6 x 24"
    rows = read_replicas(tmp_path / "run")
    assert rows["requests"].tolist() == [0, 0, 6] and rows["prefill_tokens"].tolist() == [300, 300, 6 * 5]
    assert rows["prompt_tokens"].tolist() == [300, 300, 0] and rows["output_tokens"].tolist() == [0, 0, 150]
    for requests in (read_requests(tmp_path / "run"), run.requests):
        assert requests.sort_values("id")["prefilled_on"].tolist() == [0, 1] * 3 and {*requests["replica"]} == {2}


def test_the_p99_of_a_pool_rests_on_the_requests_of_the_pool() -> None:
    """Below 100 requests it is not printed."""
    summary = served().summary
    run, small = summary["run"] | {"counted_requests": 2000}, summary["pools"]["small"]
    for number, said in ((99, ""), (150, "only 150 requests in pool small;"), (1000, "")):
        pools = {"small": small | {"counted_requests": number}}
        last = run_text(summary | {"run": run, "pools": pools}).split("\n\n")[-1]
        assert said in last and ("unreliable" in last) == bool(said)


@pytest.mark.long
def test_each_pool_serves_by_its_own_setup(tmp_path: Path) -> None:
    run = served(tmp_path / "run")
    requests, steps = run.requests, run.steps
    assert {*requests["pool"]} == {*steps["pool"]} == {"large", "small"}
    assert ((requests["prompt_tokens"] > 700) == (requests["pool"] == "large")).all()
    batches = steps.groupby("pool")
    assert batches["num_requests"].max()["small"] == 2 and batches["num_requests"].max()["large"] > 4
    tokens = steps["num_prefill_tokens"] + steps["num_decode_tokens"]
    assert tokens[steps["pool"] == "large"].max() > 256 >= tokens[steps["pool"] == "small"].max(), "its own chunk"
    about = run.summary["about"]["pools"]
    assert [pool["hardware"].split()[1] for pool in about.values()] == ["H100", "H200,"]
    assert [pool["limits"]["kv_blocks"] for pool in about.values()] == [2000, 200]
    counts = requests.groupby("pool")["output_tokens"].agg(["size", "sum"])
    for pool, replicas in (("large", 1), ("small", 2)):
        size, output = counts.loc[pool].tolist()
        figures = run.summary["pools"][pool]
        assert (figures["replicas"], figures["requests"], figures["output_tokens"]) == (replicas, size, output)
        own = requests[requests["pool"] == pool]
        for name in ("ttft", "tpot", "end_to_end"):
            assert figures[f"{name}_seconds"]["mean"] == pytest.approx(own[f"{name}_seconds"].mean())
        gaps = (own["last_token"] - own["first_token"]).sum() / (own["output_tokens"] - 1).sum()
        assert figures["tbt_seconds"]["mean"] == pytest.approx(gaps), "those of the pool alone"
    blocks = steps["pool"].map({"large": 2000, "small": 200})
    inside = steps["kv_blocks_used"] / blocks
    assert run.summary["iterations"]["kv_use_peak"] == inside.max()
    assert run.summary["iterations"]["kv_use_mean"] == pytest.approx(inside.mean())
    for frame, kept in ((requests, read_requests(tmp_path / "run")), (steps, read_steps(tmp_path / "run"))):
        assert frame["pool"].tolist() == kept["pool"].tolist()
    assert "1 large and 2 small replicas, router" in str(run) and "pool small: latencies of" in str(run)
    assert run.summary["about"]["limits"].keys() == {"block_size", "tokens"}, "what all pools have"
    used = {
        panel.get_title(loc="left"): column for panel, column in zip(*composition_of(tmp_path / "run"), strict=True)
    }
    assert used.keys() == {"replica 0 (large)", "replica 1 (small)", "replica 2 (small)"}
    assert 20 < used["replica 1 (small)"] <= 100 and used["replica 0 (large)"] < 100, "of the pool's own blocks"
    assert run.summary["about"]["policy"] == "sarathi_serve(large: chunk=512; small: chunk=256)"
    assert str(run).startswith("sarathi_serve(large: chunk=512; small: chunk=256) on open_loop")
    assert "pool large" in str(run) and summary(tmp_path / "run")["pools"] == run.summary["pools"]
    lanes = json.loads(gzip.decompress((tmp_path / "run" / "timeline.json.gz").read_bytes()))["traceEvents"]
    names = [lane["args"]["name"] for lane in lanes if lane["name"] == "thread_name" and lane["pid"] == 2]
    assert names == ["replica 0 (large)", "replica 1 (small)", "replica 2 (small)"]


def composition_of(folder: Path) -> tuple[list[Axes], list[float]]:
    """Returns the uppermost panels of the plot, and the largest share of the KV cache in the column of each."""
    panels = composition.draw(folder).axes
    return panels[:3], [max(panel.lines[0].get_ydata()) for panel in panels[6:9]]  # type: ignore[arg-type]


def test_a_setting_of_routers_that_nothing_reads_is_noted() -> None:
    """Staleness ages reports, which one replica does not need and round robin does not read."""
    keys = {"requests": 8, "staleness": 0.5}
    notes = [str(simulate("orca", "open_loop", **keys, **more)) for more in ({}, {"replicas": 2})]
    assert all("backend.staleness has no effect" in text for text in notes)
    read = str(simulate("orca", "open_loop", replicas=2, router="least_loaded", **keys))
    assert "no effect" not in read and "router least_loaded, reports 0.5 s old" in read


def test_a_pool_that_ends_no_request_has_no_price_of_one(tmp_path: Path) -> None:
    """Prompts are the prefillers' work and output the decoder's: each is charged with the tokens that it computed."""
    pools, folder = {"p": {"role": "prefill", "replicas": 2}, "d": {"role": "decode"}}, tmp_path / "run"
    run = simulate("orca", "open_loop", requests=1, pools=pools, price=3, prefix_cache=True, output=folder)
    lines = str(run).splitlines()
    prefill, decode = (next(line for line in lines if line.startswith(f"pool {pool} ")) for pool in pools)
    assert "; $6/h, $" in prefill and prefill.endswith(" per million tokens") and "per request" not in prefill
    assert "; $3/h, $" in decode and decode.endswith(" per million tokens")
    hours, [request] = run.summary["run"]["counted_seconds"] / 3600, run.requests.itertuples()
    for pool, dollars, tokens in (("p", 6 * hours, request.prompt_tokens), ("d", 3 * hours, request.output_tokens)):
        cost = run.summary["pools"][pool]["cost"]
        assert cost["dollars_per_million_tokens"] == pytest.approx(dollars / tokens * 1e6)
    assert run.summary["pools"]["p"]["cost"]["dollars_per_million_prompt_tokens"] > 0
    first, idle, decoder = read_replicas(folder).itertuples()
    assert first.dollars_per_million_tokens == pytest.approx(3 * hours / request.prompt_tokens * 1e6)
    assert idle.prompt_tokens == decoder.prompt_tokens == 0
    assert any(line.endswith(" 1 request, in d; 1 replica computed nothing") for line in lines)


@pytest.mark.long
def test_pools_of_unlike_prices_add_up(tmp_path: Path) -> None:
    """A pool's price is its own key's, else the run's, else its profile's; times tensor parallel GPUs, stages and replicas."""
    priced = tmp_path / "priced.json"
    priced.write_text(json.dumps({**json.loads((PROFILES / "h200.json").read_text()), "price": 4.0}))
    pools = {"large": {"hardware": str(priced), "tensor_parallel": 2}, "small": {"replicas": 3, "price": 1.5}}
    for price, wanted in ((None, 2 * 4.0 + 3 * 1.5), (5.0, 2 * 5.0 + 3 * 1.5)):
        cost = simulate("orca", "open_loop", requests=4, pools=pools, price=price).summary["cost"]
        assert cost["dollars_per_hour"] == wanted
    run = {"pools": pools, "price": 5.0, "router": "least_loaded", "timeout": 0.5, "output": tmp_path / "run"}
    paid = simulate("orca", "open_loop", requests=40, **run)
    seconds, million = paid.summary["run"]["counted_seconds"], 1e6
    assert paid.requests["finish_reason"].iloc[-1] == "cancelled", "the run ends, and is paid for, after the last token"
    rows = read_replicas(tmp_path / "run")
    assert rows["dollars"].sum() == pytest.approx(paid.summary["cost"]["dollars"])
    requests = paid.requests[paid.requests["finish_reason"] == "length"]
    for pool, hourly in (("large", 2 * 5.0), ("small", 3 * 1.5)):
        own, part = requests[requests["pool"] == pool], paid.summary["pools"][pool]["cost"]
        dollars, tokens = hourly * seconds / 3600, own["prompt_tokens"].sum() + own["output_tokens"].sum()
        wanted_parts = {"dollars_per_hour": hourly, "dollars": dollars, "dollars_per_request": dollars / len(own)}
        assert {key: part[key] for key in wanted_parts} == pytest.approx(wanted_parts)
        assert part["dollars_per_million_tokens"] == pytest.approx(dollars / tokens * million)
        assert f"${hourly:.3g}/h" in str(paid)
        counts = rows.loc[rows["pool"] == pool, ["requests", "prompt_tokens", "output_tokens"]].sum().tolist()
        assert counts == [len(own), own["prompt_tokens"].sum(), own["output_tokens"].sum()], "of the served ones"
    pools["small"].pop("price")
    assert "cost" not in simulate("orca", "open_loop", requests=4, pools=pools).summary, "one pool has no price"
    alone = simulate("orca", "open_loop", requests=4, price=5.0, replicas=2, tensor_parallel=2, pipeline_stages=2)
    assert alone.summary["cost"]["dollars_per_hour"] == 8 * 5.0 and "$40/h" in str(alone)


def test_pools_with_one_policy_have_its_plain_text() -> None:
    pools = {"a": {"batch": 2}, "b": {"batch": 4}}
    assert (
        served(pools=pools, router="round_robin", requests=8).summary["about"]["policy"] == "sarathi_serve(chunk=256)"
    )


def test_a_single_pool_is_the_run_itself(tmp_path: Path) -> None:
    """Its text is that of as many replicas, and its iterations can be drawn."""
    keys = {"requests": 8, "batch": 4}
    pool = simulate("orca", "open_loop", pools={"a": {"replicas": 2}}, output=tmp_path / "a", **keys)
    assert run_text(pool.summary) == run_text(simulate("orca", "open_loop", replicas=2, **keys).summary)
    assert composition.draw(tmp_path / "a").axes[1].get_title("left") == "replica 1"


def test_equal_pools_serve_as_replicas_do() -> None:
    keys = {"requests": 60, "rate": 40, "batch": 4, "kv_tokens": 16 * 400, "staleness": 0.01}
    runs = [
        simulate("orca", "open_loop", router="least_loaded", **keys, **how)
        for how in ({"replicas": 3}, {"pools": {"a": {}, "b": {"replicas": 2}}})
    ]
    assert runs[0].record.steps == runs[1].record.steps and runs[0].record.replica_of == runs[1].record.replica_of


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"replicas": 2}, "backend.replicas=2: beside backend.pools, whose replicas are 3; leave it out"),
        ({"pools": {"a": {"batches": 3}}}, "batches"),
        ({"pools": {"a": {"hardware": "h999"}}}, "h999"),
        ({"pools": {"a": {"policy": {"speed": 3}}}}, "policy.speed"),
        ({"bounds": True}, "bounds=true or workload.load: lower bounds hold for equal"),
        ({"kv_tokens": 16 * 20, "pools": {"a": {}, "b": {"kv_tokens": 160}}}, "exceed"),
    ],
)
def test_pools_that_cannot_be_are_refused_in_a_line(keys: dict[str, object], says: str) -> None:
    with pytest.raises(CbatchError, match=says.replace(".", r"\.")) as refused:
        served(**keys)
    assert isinstance(refused.value, CbatchError) and "\n" not in str(refused.value)


EVICTIONS = sorted(path.stem for path in Path(CONFIG_FOLDER / "eviction").glob("*.yaml"))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_each_eviction_serves_requests_that_come_from_a_prefiller(eviction: str) -> None:
    """Two decoders in turn, whose small caches evict: an eviction there has heard of each request before its admission."""
    pools = {"p": {"role": "prefill"}, "d": {"role": "decode", "replicas": 2}}
    lengths = {"min_length": 10, "max_length": 80}
    chats = {"turns": [2, 4], "system": 0, "pause": 0.1, "sessions": 4, "requests": 40, "lengths": lengths}
    cache = {"prefix_cache": True, "eviction": eviction, "kv_tokens": 640, "block_size": 16}
    made = simulate("sarathi_serve", "chat", pools=pools, batch=4, **chats, **cache)
    assert made.summary["run"]["requests"] == made.summary["run"]["counted_requests"] >= 40
    assert made.summary["prefix_cache"]["evicted_blocks"] > 0
