"""MFU and MBU, recomputed from steps.csv, printed shapes and data sheets, and from sums over requests that no schedule changes."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from commands import command, summary

from cbatch.cost import BatchShape
from cbatch.results.utilisation import device_seconds, limit_power
from cbatch.sim import load_profile
from experiments.api import Result, serve, simulate
from experiments.plots import composition
from experiments.serve import serve as serve_settings
from experiments.settings.compose import compose_run
from experiments.store.tables import read_steps

WEIGHTS = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
HEAD = 4096 * 128256
FLOPS, BYTES = 989.4e12, 4.8e12
"""Llama-3.1-8B: 32 layers, grouped queries of 32 and 8 heads, gated; data sheet of the H200 SXM."""


def by_hand(steps: pd.DataFrame) -> tuple["pd.Series[float]", "pd.Series[float]"]:
    """Returns operations and bytes of each iteration."""
    tokens = steps["num_prefill_tokens"] + steps["num_decode_tokens"]
    flops = 2.0 * WEIGHTS * tokens + 2.0 * HEAD * steps["num_sampled"] + 32 * 32 * 128 * 4.0 * steps["num_scores"]
    kv = 2 * 32 * 8 * 128 * 2.0
    return flops, 2.0 * (WEIGHTS + HEAD) + 2 * 4096.0 * tokens + kv * (tokens + steps["num_kv_reads"])


def check_counts(run: Result) -> None:
    """Sums of all iterations: token i of a request attends to i tokens, however the request is cut into chunks."""
    requests, steps = run.requests, run.steps
    tokens = requests["prompt_tokens"] + requests["output_tokens"] - 1
    assert steps["num_scores"].sum() == (tokens * (tokens + 1) // 2).sum()
    decodes = steps[steps["num_prefill_tokens"] == 0]
    assert (decodes["num_scores"] == decodes["num_kv_reads"]).all() and len(decodes)
    assert steps["num_kv_reads"].sum() < steps["num_scores"].sum(), "a chunk reads the context once for all its tokens"


@pytest.mark.long
@pytest.mark.parametrize("gpus", [{}, {"tensor_parallel": 2, "pipeline_stages": 2}])
def test_utilisation_is_recomputed_from_the_table_of_iterations(tmp_path: Path, gpus: dict[str, int]) -> None:
    run = simulate("sarathi", "open_loop", requests=60, rate=30, batch=16, output=tmp_path / "run", **gpus)
    check_counts(run)
    steps = read_steps(tmp_path / "run")
    seconds = steps["ended"] - np.maximum(steps["started"], steps["ended"].shift(fill_value=0.0))
    prompts, decodes = steps["num_prefill_tokens"] > 0, steps["num_decode_tokens"] > 0
    phases = {"prefill": ~decodes, "decode": ~prompts, "mixed": prompts & decodes}
    assert sum(chosen.sum() for chosen in phases.values()) == len(steps)
    for name, done, peak in zip(("mfu", "mbu"), by_hand(steps), (FLOPS, BYTES), strict=True):
        peak *= 4 if gpus else 1
        figures = {phase: done[chosen].sum() / (seconds[chosen].sum() * peak) for phase, chosen in phases.items()}
        figures["run"] = done.sum() / (run.summary["run"]["counted_seconds"] * peak)
        assert run.summary[name] == pytest.approx(figures) and all(0 < value < 1 for value in figures.values())
        assert figures["run"] == pytest.approx(summary(tmp_path / "run")[name]["run"])
    mfu, mbu = run.summary["mfu"], run.summary["mbu"]
    if not gpus:
        assert mfu["decode"] < 0.2 * mfu["prefill"] and mfu["mixed"] > 0.6 * mfu["prefill"], "SARATHI's argument"
        assert mbu["decode"] > mbu["mixed"], "compute and bandwidth are complementary"
    for table in (steps, steps.drop(columns=["num_scores", "num_kv_reads"])):  # of this version, of an earlier one
        table.to_csv(tmp_path / "run" / "steps.csv", index=False, lineterminator="\r\n")
        assert read_steps(tmp_path / "run").columns.tolist() == table.columns.tolist()
    drawn = command("plot", "composition", "run", "format=png", cwd=tmp_path)
    assert (drawn.returncode, drawn.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_energy_is_recomputed_from_the_table_of_iterations(replicas: int, tmp_path: Path) -> None:
    """Busy watts, bytes and operations, at most the limit in each 60 ms; pauses at the idle watts. h200-vllm states no power."""
    keys = {"requests": 60, "rate": 30, "batch": 16, "hardware": "h100", "replicas": replicas}
    run = simulate("sarathi", "open_loop", **keys, output=tmp_path / "run")
    watts, idle = load_profile("h100").watts, 0.0
    assert watts is not None and "energy" not in simulate("orca", requests=5, hardware="h200-vllm").summary
    joules, limited, computing, whole = 0.0, 0.0, 0.0, run.summary["run"]["counted_seconds"]
    for _, steps in run.steps.groupby("replica") if replicas > 1 else [(0, run.steps)]:
        seconds = steps["ended"] - np.maximum(steps["started"], steps["ended"].shift(fill_value=0.0))
        flops, moved = by_hand(steps)
        unlimited = watts.busy * seconds + watts.joules_per_byte * moved + watts.joules_per_flop * flops
        parts = pd.DataFrame({"taken": unlimited, "seconds": seconds}).groupby(seconds.cumsum() // 0.06).sum()
        at_limit = parts["taken"] >= watts.limit * parts["seconds"]
        assert at_limit.any() and not at_limit.all()
        joules += np.minimum(parts["taken"], watts.limit * parts["seconds"]).sum()
        limited += parts["seconds"][at_limit].sum()
        computing += seconds.sum()
        idle += watts.idle * (whole - seconds.sum())
    energy = run.summary["energy"]
    assert energy["at_limit_share"] == pytest.approx(limited / computing) and 0 < limited < computing
    assert energy["joules"] == pytest.approx(joules + idle) and energy["watts"] == pytest.approx(
        (joules + idle) / whole
    )
    assert energy["joules_per_token"] == pytest.approx((joules + idle) / run.requests["output_tokens"].sum(), rel=1e-3)
    [panel] = (panel for panel in composition.draw(tmp_path / "run").axes if panel.get_ylabel().startswith("power"))
    drawn = panel.get_lines()[0].get_ydata()
    assert np.nanmax(drawn) > watts.limit and np.nanmin(drawn) > watts.idle, "prompts after decodes, at full clock"


def test_power_is_limited_over_60_ms() -> None:
    """By hand: 25 ms each, at most 17.5 J; 25 + 5 J of the first two fit together, 25 + 25 J of the next two do not. Replicas are apart."""
    joules, seconds, most = np.array([25.0, 5.0, 25.0, 25.0]), np.full(4, 0.025), np.full(4, 17.5)
    taken, limited = limit_power(joules, seconds, most, np.zeros(4, int))
    assert taken.tolist() == [25, 5, 17.5, 17.5] and limited.tolist() == [False, False, True, True]
    pairs = np.repeat(joules, 2)  # two replicas in turn
    taken, limited = limit_power(pairs, np.full(8, 0.025), np.full(8, 17.5), np.tile([0, 1], 4))
    assert taken.reshape(4, 2)[:, 0].tolist() == [25, 5, 17.5, 17.5]


@pytest.mark.long
@pytest.mark.parametrize(("drafter", "parallel"), [("glm_mtp", False), ("glm_dspark", True)])
def test_passes_of_a_drafter_are_counted(drafter: str, parallel: bool) -> None:
    """Its layer and the output head are read in each pass, beside 512 tokens of context per request; a rejected draft has an output, too."""
    load = ("workload=equal_outputs", "workload.num_requests=24", "hardware=h100", "backend=sim", "batch=8")
    run = serve_settings(compose_run("policy=sarathi_serve", f"drafter={drafter}", "drafting=adaptive", *load), log=str)
    steps, watts = run.steps, load_profile("h100").watts
    assert watts is not None and (steps["num_drafts"] < steps["num_drafted"] * steps["most_drafts"]).any()
    seconds = steps["ended"] - np.maximum(steps["started"], steps["ended"].shift(fill_value=0.0))
    passes = (steps["most_drafts"] > 0) * 1 if parallel else steps["most_drafts"]
    tokens = steps["num_drafted"] * steps["most_drafts"] if parallel else steps["num_drafts"]
    contexts = steps["num_drafted"] if parallel else steps["num_drafts"]
    kv, layer = 2 * 8 * 128 * 2.0, WEIGHTS / 32
    flops, moved = by_hand(steps)
    flops += 2.0 * HEAD * (steps["num_drafts"] - steps["num_accepted"]) + tokens * (
        2.0 * (layer + HEAD) + 4.0 * 4096 * 512
    )
    moved += 2 * (layer + HEAD) * passes + tokens * (2 * 4096.0 + kv) + kv * 512 * contexts
    whole = run.summary["run"]["counted_seconds"]
    assert run.summary["mbu"]["run"] == pytest.approx(moved.sum() / (whole * 3.35e12))
    assert run.summary["mfu"]["run"] == pytest.approx(flops.sum() / (whole * FLOPS))
    taken = watts.busy * seconds + watts.joules_per_byte * moved + watts.joules_per_flop * flops
    parts = pd.DataFrame({"taken": taken, "seconds": seconds}).groupby(seconds.cumsum() // 0.06).sum()
    joules = np.minimum(parts["taken"], watts.limit * parts["seconds"]).sum() + watts.idle * (whole - seconds.sum())
    assert run.summary["energy"]["joules"] == pytest.approx(joules)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("k", [0, 3])
def test_a_draft_model_reads_all_that_the_model_reads(k: int, gpus: int) -> None:
    """A model that drafts for itself computes each token twice, and samples each draft; each GPU holds the drafter whole."""
    load = ("workload=equal_outputs", "workload.num_requests=24", "hardware=h100", "backend=sim", "batch=8")
    drafter = ("drafter=model", "drafter.model=llama-3.1-8b", "drafter.alpha=0.8", "drafting=fixed", f"drafting.k={k}")
    settings = ("policy=sarathi_serve", "model=llama-3.1-8b", f"backend.tensor_parallel={gpus}", *drafter, *load)
    run = serve_settings(compose_run(*settings), log=str)
    steps, watts = run.steps, load_profile("h100").watts
    assert watts is not None
    drafts = steps.get("num_drafts", 0 * steps["num_sampled"])
    passes = 1 + steps.get("most_drafts", 0 * drafts)
    flops, moved = by_hand(steps)
    more = flops + 2.0 * HEAD * (drafts - steps["num_sampled"])
    kv = 2 * 32 * 8 * 128 * 2.0
    reads = moved + 2.0 * (WEIGHTS + HEAD) * (passes - 1) + kv * 512 * drafts
    flops += 2.0 * HEAD * (drafts - steps.get("num_accepted", 0 * drafts))
    whole = run.summary["run"]["counted_seconds"]
    assert run.summary["mbu"]["run"] == pytest.approx((moved + reads).sum() / (whole * gpus * 3.35e12))
    assert run.summary["mfu"]["run"] == pytest.approx((flops + more).sum() / (whole * gpus * FLOPS))
    seconds = steps["ended"] - np.maximum(steps["started"], steps["ended"].shift(fill_value=0.0))
    taken = gpus * watts.busy * seconds + watts.joules_per_byte * (moved + gpus * reads)
    taken += watts.joules_per_flop * (flops + gpus * more)
    parts = pd.DataFrame({"taken": taken, "seconds": seconds}).groupby(seconds.cumsum() // 0.06).sum()
    joules = np.minimum(parts["taken"], gpus * watts.limit * parts["seconds"]).sum()
    joules += gpus * watts.idle * (whole - seconds.sum())
    assert run.summary["energy"]["joules"] == pytest.approx(joules)


@pytest.mark.long
def test_peaks_of_unlike_replicas_add_up() -> None:
    """Each replica's time counts at its own peak; the whole run's seconds at the sum of all."""
    pools = {"large": {"hardware": "h100", "tensor_parallel": 2}, "small": {"replicas": 2}}
    run = simulate("orca", "open_loop", requests=60, rate=60, batch=4, pools=pools)
    steps, rate = run.steps, {"large": 2 * 3.35e12, "small": BYTES}
    moved, busy = by_hand(steps)[1], 0.0
    decodes = steps["num_prefill_tokens"] == 0
    for replica, part in steps.groupby("replica"):
        seconds = part["ended"] - np.maximum(part["started"], part["ended"].shift(fill_value=0.0))
        busy += seconds[decodes].sum() * rate["large" if replica == 0 else "small"]
    assert run.summary["mbu"]["decode"] == pytest.approx(moved[decodes].sum() / busy)
    seconds = run.summary["run"]["counted_seconds"]
    assert run.summary["mbu"]["run"] == pytest.approx(moved.sum() / (seconds * (2 * 3.35e12 + 2 * BYTES)))


def test_replicas_that_were_never_asked_for_have_no_peak() -> None:
    """One of three replicas serves all requests, as one alone does."""
    load = ("policy=orca", "backend=sim", "hardware=h200", "workload=open_loop", "workload.num_requests=20")
    three = ("backend.replicas=3", "autoscale=fixed", "autoscale.replicas=1", "backend.scaling.least=1")
    alone, scaled = (serve_settings(compose_run(*load, *more), log=str).summary for more in ((), three))
    for name in ("mfu", "mbu"):
        assert scaled[name] == pytest.approx(alone[name], nan_ok=True)


def test_time_in_a_pipeline_is_not_counted_twice() -> None:
    steps = {"started": np.array([0.0, 1.0, 9.0, 2.0]), "ended": np.array([4.0, 6.0, 10.0, 5.0])}
    assert device_seconds(steps, np.array([0, 0, 0, 1])).tolist() == [4, 2, 1, 3]


def test_real_tokens_are_counted_and_a_cpu_has_no_peak() -> None:
    run = serve("sarathi", backend="cpu", chunk=16, model="tiny", requests=6, length=48, pd_ratio=3, batch=4)
    check_counts(run)
    assert "mfu" not in run.summary and run.summary["about"]["utilisation"] == {"unknown": "a CPU has no stated peak"}


def test_shared_blocks_are_read_once() -> None:
    """A chunk of 3 after 5, and two decodes at 8 and 12 that share 4."""
    shape = BatchShape(((3, 5),), 2, 20, 0, 4)
    assert (shape.num_scores, shape.num_kv_reads) == (6 + 7 + 8 + 20, 8 + 20 - 4)


def test_a_profile_without_data_sheet_stands_for_itself(tmp_path: Path) -> None:
    """Without `peak` the ceilings stand for it; without a rate of the model's numbers there is none."""
    ceilings = {"bandwidth_bytes_per_second": 1e12, "flops_per_second": 1e14, "tile": 128}
    profile = {
        "name": "own",
        "hardware": "own",
        "source": "assumed",
        "memory_bytes": 48e9,
        "ceilings": ceilings,
        "models": {},
    }
    path = tmp_path / "own.json"
    path.write_text(json.dumps(profile))
    about = simulate("orca", hardware=str(path), requests=4).summary["about"]["utilisation"]
    assert (about["peaks"], about["from"]) == ([(1e14, 1e12)], "assumed")
