"""Figures that stand in sentences of the documents: each is that of the stored results, with their date and commit."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.tables import stamp
from experiments.paper.closure import closure_claims

ROOT = Path(__file__).parents[1]
Json = dict[str, Any]


def stored(path: str) -> Json:
    return dict(json.loads((ROOT / "results" / path).read_text()))


def simulator_speed() -> str:
    file = stored("cpu/sim.json")
    speeds, batches = (
        sorted(found)
        for found in zip(
            *((way["iterations_per_second"]["median"], way["mean_batch"]) for way in file["figures"].values()),
            strict=True,
        )
    )
    low, high = (round(speed, -2) for speed in (speeds[0], speeds[-1]))
    where = f"running requests on one core of an AMD EPYC ({stamp(file)};"
    return f"{low:,.0f} to {high:,.0f} iterations per second at {batches[0]:.0f} to {batches[-1]:.0f} {where}"


def whole_process() -> str:
    file = stored("cpu/vidur.json")
    assert stamp(file) == stamp(stored("cpu/sim.json")), "the same day, says the sentence"
    run, vidur = file["figures"]["tables"], file["vidur"]
    ours = f"{run['wall_seconds']['median']:.1f} s and {run['peak_memory_mb']['median']:.0f} MB, result tables included"
    theirs = f"Vidur, entered by hand: {vidur['seconds']['process, every output off']} s without any output, 1.4 GB)"
    return f"is one process of {ours} (the same day and machine, `python -m experiments.bench vidur`; {theirs}"


def checks() -> str:
    file, gpu = stored("cpu/checks.json"), stored("h200/checks.json")
    cost = [found["wall"]["races over off"]["median"] - 1 for found in file["figures"].values()]
    [on_gpu] = [found["wall"]["races over off"]["median"] - 1 for found in gpu["figures"].values()]
    small = f"{min(cost):.0%} to {max(cost):.0%} of an iteration of the smallest model on a CPU".replace("% to", " to")
    large = f"{on_gpu:.1%} on an H200 with Llama-3.1-8B and 32 requests ({stamp(gpu)})"
    return f"{small}, depending on the batch ({stamp(file)}), and {large}"


def fidelity() -> str:
    file = stored("h200/fidelity.json")
    median, most = file["median_error"], file["largest_error"]
    first = f"the median error is {median['total time']:.1%} of the total time"
    middles = f"{median['TTFT P50']:.1%} and {median['TBT P50']:.1%} of the median TTFT and TBT"
    last = f"and {median['TTFT P99']:.1%} and {median['TBT P99']:.1%} of their P99."
    largest = f"{most['total time']:.1%}, {most['TTFT P50']:.1%} and {most['TBT P50']:.1%}"
    return f"{first}, {middles}, {last} The largest errors of total time and medians are {largest}."


def asynchronous_loop() -> str:
    loops = stored("h200/async.json")["figures"]["2048 new"]
    sync, asynchronous = (loops[name]["ms_per_iteration"]["median"] for name in ("sync", "async"))
    return f"| iteration time, 2,048 output tokens | {sync:.2f} ms | {asynchronous:.2f} ms |"


def host_work() -> str:
    loops = stored("h200/async.json")["figures"]["2048 new"]
    sync, asynchronous = (loops[name]["host_ms_per_iteration"]["median"] for name in ("sync", "async"))
    return f"| host work per iteration, 2,048 output tokens | {sync:.2f} ms | {asynchronous:.2f} ms |"


def busy() -> str:
    loops = stored("h200/async.json")["figures"]["2048 new"]
    sync, asynchronous = (loops[name]["kernel_share"] for name in ("sync", "async"))
    return f"| share of a profiled window with a kernel or copy running | {sync:.1%} | {asynchronous:.1%} |"


def long_runs() -> str:
    loops = stored("h200/async.json")["figures"]["8192 new"]
    sync, asynchronous = (loops[name]["seconds"]["median"] for name in ("sync", "async"))
    return f"| whole run, 8,192 output tokens | {sync:.1f} s | {asynchronous:.1f} s |"


def claims() -> str:
    """Without those of `closure`, which judges the same ones again from other inputs, and of `fig12_systems`."""
    paths = (ROOT / "results" / "paper").glob("*.json")
    files = [json.loads(path.read_text()) for path in paths if path.stem not in ("closure", "fig12_systems")]
    counts = Counter(claim["outcome"] for file in files for claim in file.get("claims", []))
    tested = sum(counts[outcome] for outcome in ("held", "same direction", "missed"))
    return f"So {tested} independent claims were tested, and {counts['held']} held"


def one_number_for_all_gains() -> str:
    gains = [claim for claim in closure_claims() if claim.gain is not None]
    passed = sum(claim.holds(1.27) for claim in gains)
    return f"A simulator that answered 1.27 to everything would pass {passed} of the {len(gains)} claims of gains"


SENTENCES = {
    simulator_speed: "hardware-profiles",
    whole_process: "hardware-profiles",
    fidelity: "hardware-profiles",
    checks: "trust",
    asynchronous_loop: "asynchronous-loop",
    host_work: "asynchronous-loop",
    busy: "asynchronous-loop",
    long_runs: "asynchronous-loop",
    claims: "papers",
    one_number_for_all_gains: "papers",
}


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.__name__)
def test_a_figure_in_a_sentence_is_that_of_the_results(sentence: Any) -> None:
    document = (ROOT / "docs" / f"{SENTENCES[sentence]}.md").read_text()
    assert sentence() in " ".join(document.split())
