"""A later summary of chunked prefills, row by row: what it prints, ours at the same shapes, and which rows can hold at all.

Secondary and unverified: its rows are checked, not reproduced. Its "vLLM" computes whole prompts before decodes (`prefill_first`), its
"Sarathi" chunks of 512 tokens beside decodes (`sarathi_serve`). It states neither GPU nor load nor lengths of outputs: ours are a simulated
H100, and an A100 from published tables, 256 output tokens, and for queueing Poisson arrivals at 85% of the highest rate that any policy can
sustain. 34B runs on two GPUs, 70B on four.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import isnan, sqrt
from pathlib import Path
from typing import Any

import pandas as pd
from tabulate import tabulate

from cbatch.model.topology import Topology
from cbatch.sim import ProfileCost, load_profile
from cbatch.sim.profile_file import profile_text
from experiments.setup.presets import load_spec
from reproduction.papers.claims import Claim, Outcome, Verdict
from reproduction.papers.jobs import Figures, run_jobs, summary_of
from reproduction.papers.machines import Machines
from reproduction.papers.quantities import sum_of_chunks, value
from reproduction.profiles import convert

OUTPUT, LOAD, CHUNK = 256, 0.85, 512
CHUNKS, SIZES, PROMPTS = (128, 256, 512, 1024, 2048), (128, 256, 384, 512, 768, 1024), (512, 1024, 2048)
GPUS = {"mistral-7b": 1, "llama-2-7b": 1, "llama-13b": 1, "yi-34b": 2, "llama-2-70b": 4}
"""Models of the summary by size, and the GPUs that each runs on; LLaMA-13B has LLaMA-2-13B's shape."""

BATCHES = (("mistral-7b", 16), ("mistral-7b", 32), ("mistral-7b", 64), ("llama-2-70b", 8))
KEYS = {
    "ttft": ("ttft_seconds", "mean"),
    "total": ("end_to_end_seconds", "mean"),
    **{rank: ("end_to_end_seconds", rank) for rank in ("p50", "p95", "p99")},
    "decode": ("throughput", "decode_tokens_per_second"),
    "tokens": ("throughput", "total_tokens_per_second"),
    **{f"mfu_{phase}": ("mfu", phase) for phase in ("prefill", "decode", "mixed")},
}
WORDS: Mapping[Outcome, str] = {
    "held": "holds",
    "derived": "holds",
    "same direction": "another size",
    "missed": "does not hold",
}
STATED = ("contradicts itself", "only under queueing")
"""Verdicts that a claim's note begins with."""


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, study, model, chunk (0: whole prompts), batch, prompt, and the figures of `KEYS`."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"h100": "h100"}
        if machines.tables is not None:
            profile = convert(Path(machines.tables), [load_spec(model) for model in GPUS])
            files["a100"] = f"{folder}/a100.json"
            Path(files["a100"]).write_text(profile_text(profile), encoding="utf-8")
        jobs = [
            {"hardware": name, "file": file, **job} for name, file in files.items() for job in _jobs(machines.traces)
        ]
        say(f"{len(jobs)} runs on {' and '.join(files)}")
        data = run_jobs(run, jobs)
        idle = [row for name, file in files.items() for row in _alone(name, file)]
        for name, file in files.items():
            cost = _cost(file, "mistral-7b")
            machines.note(name, {"model": cost.spec.name, **cost.provenance()})
    return pd.concat([data, pd.DataFrame(idle)]).drop(columns=["file", "traces"])


def _jobs(traces: str | None) -> Iterator[dict[str, Any]]:
    """Yields the runs of one GPU."""

    def job(study: str, model: str, chunk: int, batch: int | str, prompt: int = 2048) -> dict[str, Any]:
        return {"study": study, "model": model, "chunk": chunk, "batch": batch, "prompt": prompt, "traces": traces}

    yield from (job("chunk", "mistral-7b", chunk, 16) for chunk in CHUNKS)
    yield from (job("batch", model, chunk, batch) for (model, batch), chunk in product(BATCHES, (0, CHUNK)))
    yield from (job("size", model, chunk, 32) for model, chunk in product(GPUS, SIZES) if model != "llama-2-7b")
    yield from (
        job("heads", model, chunk, "auto") for model, chunk in product(("mistral-7b", "llama-2-7b"), (0, CHUNK))
    )
    of_prompts = product(("mistral-7b", "llama-2-7b", "llama-2-70b"), PROMPTS, (0, CHUNK))
    yield from (job("queued", model, chunk, 64, prompt) for model, prompt, chunk in of_prompts)
    if traces is not None:
        yield from (
            job("sharegpt", model, chunk, 64) for model, chunk in product(("mistral-7b", "llama-13b"), (0, CHUNK))
        )


def run(
    hardware: str, file: str, study: str, model: str, chunk: int, batch: int | str, prompt: int, traces: str | None
) -> Figures:
    """One run. chunk: 0 computes whole prompts, before decodes."""
    length, ratio = prompt + OUTPUT, prompt / OUTPUT
    lengths = (
        f"workload.lengths.min_length={length} workload.lengths.max_length={length} workload.lengths.pd_ratio={ratio}"
    )
    workload = {
        "queued": f"workload=open_loop workload.num_requests=600 workload.load={LOAD} {lengths}",
        "sharegpt": f"workload=traces/sharegpt traces={traces} workload.num_requests=1000 workload.load={LOAD} model.max_positions=8192",
    }.get(study, f"workload=queued workload.num_requests={600 if batch == 'auto' else 6 * int(batch)} {lengths}")
    policy = f"policy=sarathi_serve chunk={chunk} chunking=fixed" if chunk else "policy=prefill_first"
    gpus = f"hardware={file} model={model} backend.tensor_parallel={GPUS[model]} batch={batch}"
    summary = summary_of(*f"{workload} {policy} {gpus}".split())
    return {name: summary[group][figure] for name, (group, figure) in KEYS.items()}


def _alone(hardware: str, file: str) -> Iterator[dict[str, Any]]:
    """Yields the seconds of single prompts on an idle server."""
    for model, prompt in product(("mistral-7b", "llama-2-7b", "llama-2-70b"), PROMPTS):
        cost = _cost(file, model)
        for chunk in (0, *CHUNKS):
            seconds = sum_of_chunks(cost.predict, chunk or prompt, prompt)
            at = {"hardware": hardware, "study": "idle", "model": model, "batch": 1}
            yield {**at, "prompt": prompt, "chunk": chunk, "ttft": seconds}


def _cost(file: str, model: str) -> ProfileCost:
    return ProfileCost(load_profile(file), load_spec(model), Topology(GPUS[model]))


def over_whole(data: pd.DataFrame, hardware: str, of: str, **rows: Any) -> float:
    """A figure of whole prompts over that of chunks: above 1 where chunks are faster. Of throughputs the inverse."""
    whole, chunked = (value(data, of, hardware=hardware, chunk=chunk, **rows) for chunk in (0, CHUNK))
    return chunked / whole if of in ("decode", "tokens") else whole / chunked


def over_best(data: pd.DataFrame, hardware: str, of: str, chunk: int, **rows: Any) -> float:
    """A figure of a chunk over that of chunks of 512 tokens."""
    return value(data, of, hardware=hardware, chunk=chunk, **rows) / value(
        data, of, hardware=hardware, chunk=CHUNK, **rows
    )


def best_chunk(data: pd.DataFrame, hardware: str, model: str) -> float:
    """The chunk with the highest throughput at a batch of 32, 2,048 prompt and 256 output tokens."""
    rows = data[(data["hardware"] == hardware) & (data["study"] == "size") & (data["model"] == model)]
    return float(rows.sort_values("tokens")["chunk"].iloc[-1])


def heads_gain(data: pd.DataFrame, hardware: str) -> float:
    """The gain of grouped-query attention over that of multi-head attention, at the batch that fits the memory of each."""
    grouped, multi = (
        over_whole(data, hardware, "tokens", study="heads", model=model) for model in ("mistral-7b", "llama-2-7b")
    )
    return grouped / multi


def mfu_over_prefill(data: pd.DataFrame, hardware: str, phase: str) -> float:
    """MFU of a phase over that of prompts alone, of a run in chunks with a batch of 16."""
    at: dict[str, Any] = {"hardware": hardware, "study": "batch", "model": "mistral-7b", "batch": 16, "chunk": CHUNK}
    return value(data, f"mfu_{phase}", **at) / value(data, "mfu_prefill", **at)


def optimum(data: pd.DataFrame, prompt: int, overhead: float) -> float:
    """C* = sqrt(P T_o / tau), in tokens, of the objective (P / C) T_o + t0 + tau C. overhead: T_o / tau."""
    return sqrt(prompt * overhead)


def objective(data: pd.DataFrame, prompt: int, overhead: float, chunk: int) -> float:
    """The objective less t0, in units of tau."""
    return prompt / chunk * overhead + chunk


def quotient(data: pd.DataFrame, of: float, over: float) -> float:
    """A ratio of two printed values."""
    return of / over


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> str:
    """A line for each row: what is printed, ours, whether it holds, and why."""
    rows = []
    for claim in printed:
        function: Any = globals()[claim.quantity]
        if claim.hardware and claim.hardware not in set(data["hardware"]):
            continue
        of = {"hardware": claim.hardware} if claim.hardware else {}
        verdict = Verdict(claim, float(function(data, **of, **claim.setting)))
        if not isnan(verdict.value):
            rows.append(
                [
                    claim.where,
                    claim.hardware,
                    claim.asked if claim.printed is None else claim.printed,
                    f"{verdict.value:.3g}",
                    word_of(verdict),
                    claim.note,
                ]
            )
    return tabulate(rows, ["row", "on", "printed", "ours", "verdict", "why"], tablefmt="github", disable_numparse=True)


def word_of(verdict: Verdict) -> str:
    """The verdict in words; that of the note, unless a row said to hold only under queueing does not hold there either."""
    stated = next((word for word in STATED if verdict.claim.note.startswith(word)), "")
    if stated and (verdict.outcome != "missed" or stated == STATED[0]):
        return stated
    return WORDS.get(verdict.outcome, verdict.outcome)
