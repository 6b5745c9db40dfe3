"""Conversations with a prefix cache: served on a GPU, and simulated from its profile.

    python -m reproduction.validation sessions hardware=h100                                                    # on a GPU
    python -m reproduction.validation sessions measured=reproduction/results/h100/sessions.json                 # simulates its runs again
    python -m reproduction.validation sessions measured=reproduction/results/h100/sessions.json slower=1.02 folder=/tmp   # were iterations 2% longer

Conversations arrive at random. A turn comes some seconds after the answer before, and its prompt holds that answer. No run was used to build the
profile. The load is a share of the requests per second that simulation sustains when all conversations come at once, with the same cache; the
size of the cache is a multiple of the working set: the mean tokens of the conversations that have begun and not ended, simulated without limit.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from cbatch import Engine, KVSize, Limits, Request, RunRecord, Server
from cbatch.arrivals import Listed
from cbatch.results.metrics import collect_served, statistics
from cbatch.sim import load_profile
from experiments.profile.machine import hardware_name
from experiments.settings.backends import Cuda
from experiments.settings.command_line import Count
from experiments.settings.compose import compose_run
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests, real_server
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.validation.compare import NUDGES, error_ranges, simulated_server, tables_of
from reproduction.validation.stored import served_before

SYSTEM, TURNS, PAUSE = 1024, 6, 2.0
"""Tokens that all conversations share; turns of a conversation; mean seconds before the next turn."""

LONGEST = 8192
LIMITS = Limits(64, 2048, LONGEST)
UNLIMITED = 2_000_000

SERVE = "policy=sarathi_serve chunk=512"
RUNS = [
    *((load, share, SERVE, "lru") for load in (0.6, 0.9) for share in (2.0, 1.0, 0.5)),
    (0.9, 1.0, SERVE, "lfu"),
    (0.9, 1.0, SERVE, "marconi"),
    (0.9, 1.0, "policy=prefix_order chunk=512", "lru"),
    (0.9, 1.0, "policy=prefix_order policy.order=spf chunk=512", "lru"),
]
"""Load, cache over working set, policy, eviction."""


class Sessions(Listed):
    """Arrivals of conversations: the first turns are known, and each turn that ends tells when the next one comes.

    With token ids (`vocabulary`) prompts hold the answers that the model gave; without, names stand for them.
    """

    def __init__(self, rate: float, number: int, seed: int, pause: float, vocabulary: int = 0) -> None:
        """rate: conversations per second; infinite: all come at once. pause: as `PAUSE`."""
        super().__init__()
        numbers = np.random.default_rng(seed)
        self._starts = np.cumsum(numbers.exponential(1 / rate, number))
        self._pauses = numbers.exponential(pause, (number, TURNS)) if rate < inf else np.zeros((number, TURNS))
        self._new = numbers.integers(64, 449, (number, TURNS))
        self._answers = numbers.integers(32, 225, (number, TURNS))
        self._numbers, self._vocabulary = numbers, vocabulary
        self._system = self._words(SYSTEM) if vocabulary else None

    def begin(self, engine: Engine) -> None:
        """Submits the first turns."""
        engine.arrivals = self
        self.add([self._turn(chat, 0, self._system, SYSTEM, time) for chat, time in enumerate(self._starts.tolist())])

    def ended(self, request: Request) -> None:
        super().ended(request)
        chat, turn = divmod(request.id, TURNS)
        if turn + 1 < TURNS:
            before = None if request.prompt is None else [*request.prompt, *request.output]
            tokens = request.num_prompt_tokens + request.num_output_tokens
            time = (request.finished_at or 0.0) + self._pauses[chat, turn].item()
            self.add([self._turn(chat, turn + 1, before, tokens, time)])

    def _words(self, number: int) -> list[int]:
        return self._numbers.integers(0, self._vocabulary, number).tolist()  # type: ignore[no-any-return]

    def _turn(self, chat: int, turn: int, before: list[int] | None, num_before: int, time: float) -> Request:
        new = self._new[chat, turn].item()
        prompt = None if before is None else before + self._words(new)
        shared = {"texts": ((0, 0), (1 + chat, SYSTEM)), "arrival_time": time}
        return Request(chat * TURNS + turn, num_before + new, self._answers[chat, turn].item(), prompt=prompt, **shared)


class Setting(NamedTuple):
    """One run: conversations per second, and what serves them."""

    rate: float
    number: int
    seed: int
    policy: str
    eviction: str
    num_blocks: int
    pause: float = PAUSE


def serve(server: Server, setting: Setting, vocabulary: int = 0) -> RunRecord:
    """Serves the conversations of a setting, with real tokens or simulated."""
    chosen = compose_run(
        *setting.policy.split(), "max_tokens=2048", "prefix_cache=true", f"eviction={setting.eviction}"
    )
    kv = KVSize(setting.num_blocks, server.kv.block_size)
    engine = replace(server, kv=kv, prefix_cache=chosen.eviction).engine(chosen.policy())
    Sessions(setting.rate, setting.number, setting.seed, setting.pause, vocabulary).begin(engine)
    return engine.run()


def figures(record: RunRecord, slower: float = 1.0) -> dict[str, float]:
    """Returns the share of hits, seconds, and latencies: means and percentiles; times `slower`."""
    requests = collect_served(record)
    prompts = sum(request.num_prompt_tokens for request in record.requests)
    hits = sum(request.num_cached_tokens for request in record.requests)
    found = {"hit share": hits / prompts, "seconds": slower * record.steps[-1].received_at}
    for name, values in (("TTFT", requests.ttft), ("TPOT", requests.tpot)):
        found |= {f"{name} {rank}": slower * value for rank, value in statistics(values).items() if rank != "max"}
    return found


def context_tokens(record: RunRecord) -> float:
    """Returns the mean tokens of the conversations that have begun and not ended; what all share counts once."""
    total, last = 0.0, 0.0
    turns = sorted(record.requests, key=lambda request: request.id)
    for request in turns:
        chat_ends = turns[request.id // TURNS * TURNS + TURNS - 1].finished_at or 0.0
        next_turn = request.id + 1
        until = turns[next_turn].finished_at if next_turn % TURNS else chat_ends
        held = request.num_prompt_tokens + request.num_output_tokens - SYSTEM
        total += held * ((until or 0.0) - (request.finished_at or 0.0))
        if request.id % TURNS == 0:
            total += (request.num_prompt_tokens - SYSTEM) * ((request.finished_at or 0.0) - request.arrival_time)
        last = max(last, chat_ends)
    return SYSTEM + total / last


def settings_of(server: Server, number: int, seed: int) -> list[dict[str, Any]]:
    """Returns the load, cache, policy and eviction of each run. server: simulated."""
    size, unlimited = server.kv.block_size, UNLIMITED // server.kv.block_size
    at_once = serve(server, Setting(inf, number, seed, SERVE, "lru", unlimited))
    capacity = number / at_once.steps[-1].received_at
    contexts = {
        load: context_tokens(serve(server, Setting(load * capacity, number, seed, SERVE, "lru", unlimited)))
        for load in {load for load, *_ in RUNS}
    }
    return [
        {
            "load": load,
            "cache over working set": share,
            "policy": policy,
            "eviction": eviction,
            "kv_tokens": int(share * contexts[load] / size) * size,
            "conversations per second": load * capacity,
        }
        for load, share, policy, eviction in RUNS
    ]


def main(
    hardware: str = "h100",
    model: str = "llama-3.1-8b",
    number: Count = 75,
    seed: int = 11,
    measured: str = "",
    slower: float = 1.0,
    folder: str = RESULTS,
) -> None:
    """Serves and simulates, prints and writes sessions.json.

    measured: such a file, whose runs are simulated again; needs no GPU. slower: simulated iterations take so many times as long.
    """
    spec, profile = load_spec(model), load_profile(hardware)
    kv = KVSize(UNLIMITED // Cuda.block_size, Cuda.block_size)
    simulated = simulated_server(profile, spec, LIMITS, kv)
    if measured:
        kept, about = served_before(measured)
        rows, device = kept["runs"], kept["hardware"]
        number, seed = kept["conversations"], kept["seed"]
    else:
        rows = settings_of(simulated, number, seed)
        real = real_server(Cuda(), spec, LIMITS, kv_tokens=max(row["kv_tokens"] for row in rows))
        real.serve(compose_run(*SERVE.split()).policy(), equal_requests(64, 300, 16, spec.vocab_size))
        about, device = {}, hardware_name("cuda")
    for row in rows:
        rate, num_blocks = row["conversations per second"], row["kv_tokens"] // kv.block_size
        setting = Setting(rate, number, seed, row["policy"], row["eviction"], num_blocks)
        row["simulated"], *nudged = (  # in units of `times` seconds
            figures(serve(simulated, setting._replace(rate=rate * times, pause=PAUSE / times)), times)
            for times in (slower, *(slower * nudge for nudge in NUDGES))
        )
        if not measured:
            row["measured"] = figures(serve(real, setting, spec.vocab_size))
        row["error_range"] = error_ranges(row["measured"], [row["simulated"], *nudged])
        print(show(row), flush=True)
    about |= {"profile": profile.name, "tables": tables_of(profile)}
    stamped = {**about, "model": spec.name, "conversations": number, "seed": seed, "runs": rows}
    print(f"written: {write_benchmark('sessions', device, stamped, folder, VALIDATION)}")


def show(row: Mapping[str, Any]) -> str:
    """Returns a run's line: hit shares, and the errors of latencies."""
    simulated, real = row["simulated"], row["measured"]
    errors = (f"{name} {simulated[name] / value - 1:+.1%}" for name, value in real.items() if name[0] == "T")
    shares = f"hit share {real['hit share']:.4f}, simulated {simulated['hit share']:.4f}"
    text = f"load {row['load']}, cache {row['cache over working set']}, {row['policy']}, {row['eviction']}"
    return f"{text}: {shares}; {', '.join(errors)}"
