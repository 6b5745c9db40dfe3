"""Runs of vLLM that others recorded, simulated from published tables, beside what their simulators predicted.

    python -m reproduction.validation rivals shared=FOLDER           # FOLDER has measured/ and profiles/
    python -m reproduction.validation rivals shared=FOLDER fit=on    # what the tables lack of the engine, fitted again

Nothing is fitted to the runs that are judged: what the tables lack of the engine comes from runs of another model. The load generator draws
exponential intervals and scales them to the duration of a stage (inference-perf v0.4.0, `ConstantLoadTimer`). Its users send in turn, each
always the same prompt, of which all but the last block comes from the prefix cache.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from cbatch import KVSize, Limits, ModelSpec, Request, Server
from cbatch.errors import ProfileError
from cbatch.model.topology import Topology
from cbatch.results.metrics import Served, collect_served, statistics
from cbatch.sim import Profile, ProfileCost, SimExecutor
from cbatch.validation import Switch
from experiments.settings.compose import compose_run
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.profiles import convert

KNOWN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
BATCH, MAX_TOKENS, BLOCK = 128, 2048, 16
STAGES = "measured/vllm_0.15.1_llama-3.1-8b_stages.csv"
JUDGED = [f"{kind}_{rank}_ms" for kind in ("ttft", "e2e") for rank in ("mean", "p90", "p99")]
SETTINGS = ("gpu", "gpus", "token_limit", "prompt_tokens", "output_tokens", "requests_per_s", "seconds")
RIVALS = {"BLIS": "blis_", "AIConfigurator": "aiconfigurator_"}
"""Each one's prefix of the columns that it predicts."""

FIELDS = {"input_toks": "prompt", "output_toks": "output", "queued_ts": "arrival", "first_token_ts": "first"}
FIELDS |= {"last_token_ts": "last"}
"""Our name of each column that LLMServingSim published."""

Stage = Mapping[str, Any]
"""A row of the recorded stages."""


def main(shared: str, fit: Switch = False, folder: str = RESULTS) -> None:
    """Simulates the recorded runs, prints and writes errors beside those of rivals; or fits and prints the engine's numbers in rivals.yaml."""
    kernels, layers = (Path(shared) / "profiles" / name for name in ("aiconfigurator", "llmservingsim"))
    if fit:
        print(fitted(kernels))
        return
    recorded = pd.read_csv(Path(shared) / STAGES)
    recorded = recorded[recorded["gpu"].isin(KNOWN["gpus"])].reset_index(drop=True)
    stages: list[Any] = recorded.to_dict("records")
    found = errors(recorded, pd.DataFrame(predicted(stages, load_spec("llama-3.1-8b"), kernels, **KNOWN["engine"])))
    of_one_gpu = (recorded["gpu"] == "H100") & (recorded["gpus"] == 1)
    print("Stages of one H100:")
    summary = summarize({rival: of[of_one_gpu] for rival, of in found.items()})
    each = pd.concat(
        [recorded[["run", "stage", *SETTINGS[:3], "requests_per_s"]], found["cbatch"].map("{:+.1%}".format)], axis=1
    )
    print(f"\ncbatch, each stage:\n{each.to_string()}")
    runs = {path.parent.name: replayed(path) for path in sorted(layers.glob("*/*_tp1"))}
    for device, of_run in runs.items():
        print(f"\n{device}:\n{pd.DataFrame(of_run).dropna().map('{:+.1%}'.format).to_string()}")
    result = {
        "engine": KNOWN["engine"],
        "summary": {rival: of.to_dict("index") for rival, of in summary.items()},
        "stages": {rival: of.to_dict("index") for rival, of in found.items()},
        "llmservingsim": runs,
    }
    print(f"written: {write_benchmark('rivals', 'cpu', result, folder, VALIDATION)}")


def summarize(found: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Prints and returns the median and the largest size of errors; before them, in which of these each simulator beats the first one.

    found: relative errors of each simulator, a row for each run and a column for each figure that it predicts.
    """
    sizes = {name: of.abs() for name, of in found.items()}
    summary = {name: pd.DataFrame({"median": of.median(), "largest": of.max()}) for name, of in sizes.items()}
    ours, *others = summary
    for name in others:
        smaller: Any = (summary[name] < summary[ours].reindex(summary[name].index)).stack()
        which = ", ".join(" ".join(figure) for figure in smaller[smaller].index)
        print(f"Smaller errors of {name} than of {ours}: {which or 'none'}")
    print(f"\n{pd.concat(summary, axis=1).map('{:.1%}'.format).to_string()}")
    return summary


def errors(recorded: pd.DataFrame, ours: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns the relative errors of each simulator, a row for each stage and a column for each figure that it predicts."""
    found = {"cbatch": ours}
    for rival, before in RIVALS.items():
        columns = {name: name.removeprefix(before) for name in map(str, recorded) if name.startswith(before)}
        found[rival] = recorded[[*columns]].rename(columns=columns)
    return {rival: of / recorded[[*of]] - 1 for rival, of in found.items()}


def predicted(
    stages: Iterable[Stage], spec: ModelSpec, tables: Path, server_ms: float, **host: float
) -> list[dict[str, float]]:
    """Returns `JUDGED` of each stage, simulated. The stages of a run follow each other on one server; runs of equal settings are simulated once."""
    found, simulated = list[dict[str, float]](), dict[Any, list[dict[str, float]]]()
    for _, of_run in groupby(stages, lambda stage: stage["run"]):
        run = [*of_run]
        settings = tuple(stage[key] for stage in run for key in SETTINGS)
        if settings not in simulated:
            profile = convert(tables / KNOWN["gpus"][run[0]["gpu"]], [spec], **host)
            requests, ends = asked(run)
            server = {"gpus": run[0]["gpus"], "max_tokens": run[0]["token_limit"], "server_seconds": server_ms * 1e-3}
            served = serve(profile, spec, requests, **server)
            parts = [(begin <= served.id) & (served.id < end) for begin, end in pairwise([0, *ends])]
            simulated[settings] = [judged(served, part) for part in parts]
        found += simulated[settings]
    return found


def judged(served: Served, part: NDArray[np.bool_]) -> dict[str, float]:
    """Returns `JUDGED` of a part of the requests."""
    values = {"ttft": statistics(served.ttft[part]), "e2e": statistics(served.end_to_end[part])}
    ranks = {f"{kind}_{rank}_ms": value for kind, of in values.items() for rank, value in of.items()}
    return {name: ranks[name] * 1e3 for name in JUDGED}


def asked(run: Sequence[Stage]) -> tuple[list[Request], list[int]]:
    """Returns the requests of a run, and how many there are up to the end of each stage."""
    numbers, begin, times, ends = np.random.default_rng(0), 0.0, list[float](), list[int]()
    for stage in run:
        intervals = numbers.exponential(size=int(stage["requests_per_s"] * stage["seconds"]))
        times += (begin + np.cumsum(intervals) * stage["seconds"] / intervals.sum()).tolist()
        begin += stage["seconds"]
        ends.append(len(times))
    prompt, output = run[0]["prompt_tokens"], run[0]["output_tokens"]
    users, blocks = KNOWN["users"][prompt], prompt // BLOCK
    names = [tuple(range(user * blocks, (user + 1) * blocks)) for user in range(users)]
    return [
        Request(id_, prompt, output, arrival_time=time, prefix_hashes=names[id_ % users], hash_block=BLOCK)
        for id_, time in enumerate(times)
    ], ends


def serve(
    profile: Profile,
    spec: ModelSpec,
    requests: Sequence[Request],
    *,
    gpus: int = 1,
    max_tokens: int = MAX_TOKENS,
    batch: int = BATCH,
    num_blocks: int | None = None,
    server_seconds: float = 0.0,
) -> Served:
    """Simulates vLLM: a token budget shared by decodes and prompts, a prefix cache, the asynchronous loop."""
    topology = Topology(tensor_parallel=gpus)
    cost = ProfileCost(profile, spec, topology, max_batch=batch)
    kv = KVSize(num_blocks or profile.kv_tokens(spec, max_tokens, topology) // BLOCK, BLOCK)
    limits = Limits(batch, max_tokens, max(request.max_tokens for request in requests))
    chosen = compose_run("policy=vllm_v1", f"chunk={max_tokens}", "prefix_cache=true")
    server = Server(SimExecutor(cost, server_seconds=server_seconds), limits, cost, kv, prefix_cache=chosen.eviction)
    return collect_served(server.serve(chosen.policy(), requests))


def fitted(tables: Path) -> dict[str, float]:
    """Returns the numbers of the engine: of iterations by least squares of the time after the first token, then the server's from what TTFT lacks."""
    spec = replace(load_spec("qwen3-8b"), **KNOWN["fitted_model"])
    names, steps = ("ttft_mean_ms", "e2e_mean_ms"), {"host_ms": 0.2, "host_us_per_request": 5.0}

    def times(rows: Iterable[Stage]) -> NDArray[np.float64]:
        first, whole = np.array([[row[name] for name in names] for row in rows]).T
        return np.stack([first, whole - first])  # before and after the first token, [2, stages]

    def simulated(**host: float) -> NDArray[np.float64]:
        return times(predicted(KNOWN["fitted"], spec, tables, server_ms=0.0, **host))

    at = {name: KNOWN["engine"][name] for name in steps}
    real, base = times(KNOWN["fitted"]), simulated(**at)
    slopes = [(simulated(**{**at, name: at[name] + step}) - base) / step for name, step in steps.items()]
    weighted = np.stack([after / real[1] for _, after in slopes], axis=1)
    moved = np.linalg.lstsq(weighted, 1 - base[1] / real[1])[0]
    first = base[0] + sum(by * slope[0] for by, slope in zip(moved, slopes, strict=True))
    host = {name: each + by for (name, each), by in zip(at.items(), moved.tolist(), strict=True)}
    return {**host, "server_ms": float(np.median(real[0] - first))}


def replayed(folder: Path) -> dict[str, dict[str, float]]:
    """Returns the errors of our simulations of a run of LLMServingSim's, with the tables alone and with the engine's time, and of its own."""
    about, run = json.loads((folder / "vllm_run" / "meta.json").read_text()), read_run(folder / "vllm_run")
    spec, settings, real = load_spec("llama-3.1-8b"), about["engine_kwargs"], figures(run)
    limits = {"max_tokens": settings["max_num_batched_tokens"], "batch": settings["max_num_seqs"]}
    num_blocks = about.get("kv_cache", {}).get("num_gpu_blocks")
    host = {name: value for name, value in KNOWN["engine"].items() if name != "server_ms"}
    found = {}
    for name, added in {"cbatch, tables alone": {}, "cbatch, with the engine's time": host}.items():
        requests = [
            Request(id_, int(prompt), int(output), arrival_time=time, prefix_hashes=hashes, hash_block=BLOCK)
            for id_, prompt, output, time, hashes in run[["prompt", "output", "arrival", "hashes"]].itertuples()
        ]
        served = serve(convert(folder, [spec], **added), spec, requests, num_blocks=num_blocks, **limits)
        times = pd.DataFrame({"first": served.first_token, "last": served.last_token}, index=served.id)
        found[name] = {name: value / real[name] - 1 for name, value in figures(run.assign(**times)).items()}
    return found | {"LLMServingSim": KNOWN["llmservingsim"][folder.parent.name]}


def read_run(folder: Path) -> pd.DataFrame:
    """Returns the served requests in order of arrival, a row for each; times in seconds since the first arrival.

    Raises:
        ProfileError: a file cannot be read, or lacks a field.
    """
    try:
        run = pd.read_json(folder / "requests.jsonl.gz", lines=True)[[*FIELDS]].rename(columns=FIELDS)
        prompts = folder / "prompts.jsonl.gz"
        ids = pd.read_json(prompts, lines=True)["input_tok_ids"] if prompts.is_file() else [()] * len(run)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise ProfileError(f"{folder}: cannot read the run: {error!r}; give the published folder, unchanged") from error
    run[["arrival", "first", "last"]] -= run["arrival"].min()
    known = dict[Any, int]()
    return run.assign(hashes=pd.Series([tuple(named_blocks(tokens, known)) for tokens in ids]))


def named_blocks(tokens: Sequence[int], known: dict[Any, int]) -> Iterable[int]:
    """Yields a number for each whole block of a prompt, equal where the prompts up to its end are. known: those of earlier prompts."""
    before = -1
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = known.setdefault((before, *tokens[begin : begin + BLOCK]), len(known))
        yield before


def figures(run: pd.DataFrame) -> dict[str, float]:
    """Returns latencies in seconds, by name."""
    kinds = {"TTFT": run["first"] - run["arrival"], "E2E": run["last"] - run["arrival"]}
    kinds["TPOT"] = (run["last"] - run["first"]) / (run["output"] - 1).clip(lower=1)
    return {f"{kind} {rank}": value for kind, of in kinds.items() for rank, value in statistics(of.to_numpy()).items()}
