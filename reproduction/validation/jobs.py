"""Chats and agents in closed loop: served on a GPU, and simulated from its profile, judged by the session.

    python -m reproduction.validation jobs hardware=h200 traces=FOLDER                        # on a GPU; FOLDER has the published traces
    python -m reproduction.validation jobs measured=reproduction/results/h200/jobs.json traces=FOLDER   # simulates its runs again

No run was used to build the profile. The size of the cache is a multiple of the working set: the most tokens that sessions hold at once, simulated
without limit. Agents are the recorded ones of `workload=traces/agents`, with a twentieth of the tokens, at most 6,144, and short pauses.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cbatch import KVSize, Limits, RunRecord, Server
from cbatch.model.checkpoint import Vocabulary
from cbatch.results.summary import summarize
from cbatch.sim import load_profile
from experiments.profile.machine import hardware_name
from experiments.settings.backends import Cuda
from experiments.settings.compose import compose_run
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests, real_server
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.validation.compare import simulated_server, tables_of
from reproduction.validation.stored import served_before

LIMITS = Limits(64, 2048, 65_536)
UNLIMITED = 2_000_000
POLICIES = ("policy=sarathi_serve chunk=512", "policy=prefix_order policy.order=spf chunk=512")
SHARES = (1.0, 0.5)
WORKLOADS = {
    "24 chats": "workload=chat workload.sessions=24 workload.num_requests=144 workload.turns=6 workload.pause=2",
    "12 agents": "workload=traces/agents workload.sessions=12 workload.num_sessions=12 workload.length_scale=0.05"
    " workload.max_length=6144 workload.too_long=clip workload.pause_scale=0.02 workload.max_pause=1",
}


def serve(
    server: Server, policy: str, workload: str, num_blocks: int, vocabulary: Vocabulary | None = None
) -> RunRecord:
    """Serves a workload, with real tokens if there is a vocabulary."""
    chosen = compose_run(*policy.split(), *workload.split(), "max_tokens=2048", "prefix_cache=true")
    server = replace(server, kv=KVSize(num_blocks, server.kv.block_size), prefix_cache=chosen.eviction)
    return server.engine(chosen.policy(), chosen.workload.source(vocabulary)).run()


def working_set(record: RunRecord) -> int:
    """Returns the most tokens that sessions hold at once, from their first turn's arrival to their last end. What they share counts for each."""
    held, changes = defaultdict[str | None, int](int), list[tuple[float, int]]()
    turns = {request.session: request for request in record.requests}  # the last turns
    for request in record.requests:
        end, tokens = request.finished_at or 0.0, request.num_prompt_tokens + request.num_output_tokens
        changes.append(
            (end, tokens - held[request.session] if request is not turns[request.session] else -held[request.session])
        )
        held[request.session] = tokens
    return int(np.cumsum([tokens for _, tokens in sorted(changes)]).max())


def figures(record: RunRecord, block_size: int) -> dict[str, float]:
    """Returns the share of hits, job completion and turn times, and the time to first token by turn; seconds."""
    summary = summarize(record, num_blocks=1, max_batch=1, num_evicted_blocks=0, block_size=block_size)
    sessions, found = summary["sessions"], {"hit share": summary["prefix_cache"]["hit_share"]}
    for name in ("job", "busy", "turn"):
        found |= {f"{name} {rank}": sessions[f"{name}_seconds"][rank] for rank in ("mean", "p50", "p90")}
    return found | {f"TTFT of turns {turns}": each["mean"] for turns, each in sessions["ttft_seconds"].items()}


def main(
    hardware: str = "h200", model: str = "llama-3.1-8b", measured: str = "", traces: str = "", folder: str = RESULTS
) -> None:
    """Serves and simulates, prints and writes jobs.json. measured: such a file, whose runs are simulated again; needs no GPU."""
    spec, profile = load_spec(model), load_profile(hardware)
    size = Cuda.block_size
    simulated = simulated_server(profile, spec, LIMITS, KVSize(UNLIMITED // size, size))
    if measured:
        kept, about = served_before(measured)
        rows, device = kept["runs"], kept["hardware"]
    else:
        rows, device, about = [], hardware_name("cuda"), {}
        for name, workload in WORKLOADS.items():
            needed = working_set(serve(simulated, POLICIES[0], f"{workload} traces={traces}", UNLIMITED // size))
            rows += [
                {
                    "name": name,
                    "workload": workload,
                    "policy": policy,
                    "cache over working set": share,
                    "kv_tokens": int(share * needed),
                }
                for share in SHARES
                for policy in POLICIES
            ]
        real = real_server(Cuda(), spec, LIMITS, kv_tokens=max(row["kv_tokens"] for row in rows))
        real.serve(compose_run(*POLICIES[0].split()).policy(), equal_requests(64, 300, 16, spec.vocab_size))
    for row in rows:
        workload, num_blocks = f"{row['workload']} traces={traces}", row["kv_tokens"] // size
        row["simulated"] = figures(serve(simulated, row["policy"], workload, num_blocks), size)
        if not measured:
            row["measured"] = figures(serve(real, row["policy"], workload, num_blocks, Vocabulary(spec)), size)
        print(show(row), flush=True)
    about |= {"profile": profile.name, "tables": tables_of(profile), "model": spec.name, "runs": rows}
    print(f"written: {write_benchmark('jobs', device, about, folder, VALIDATION)}")


def show(row: Mapping[str, Any]) -> str:
    """Returns a run's line: hit shares, and the errors of times."""
    simulated, real = row["simulated"], row["measured"]
    errors = (
        f"{name} {real[name]:.3f} s {simulated[name] / real[name] - 1:+.1%}" for name in real if name != "hit share"
    )
    shares = f"hit share {real['hit share']:.4f}, simulated {simulated['hit share']:.4f}"
    return f"{row['name']}, cache {row['cache over working set']}, {row['policy']}: {shares}; {', '.join(errors)}"
