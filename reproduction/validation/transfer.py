"""One transfer of a prompt's KV blocks between two GPUs beside a plain copy of as many bytes, and what share of its time is the host's.

    python -m reproduction.validation transfer hardware=h200     # on two GPUs

plain: a copy of one tensor, from the call until the host knows of its end. blocks: the same of scattered blocks. Both after a pause, after iterations of
prompts, and several in a row. pull: a transfer while serving, from the decoder's turn in which it takes the request to the end of the copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np
from tabulate import tabulate

from cbatch.cluster import ReplicatedServer
from cbatch.record import Transfer
from experiments.profile.machine import hardware_name
from experiments.settings.compose import compose_run
from experiments.setup.servers import equal_requests
from experiments.store.provenance import spread, write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.validation.apart import SETUP, laid_out, server_of
from reproduction.validation.handover import requests_of

LOADS = {"2,000 alone": 2, "8,000 alone": 3}
"""Loads of `handover`, and how often each is served."""

PAUSE, REPEATS, ROW = 0.3, 8, 8
"""Seconds before a copy, how often it is repeated, and the number of copies in a row."""

PARTS = "first token to turn", "pull", "reserved in", "launched in", "then copied in", "host's share"


class Watched:
    """Copies from one executor to another. asked: when each was asked for and had been launched, in seconds of the receiver's clock."""

    def __init__(self, connect: Callable[..., Any], sender: Any, receiver: Any) -> None:
        self._copy, self._now = connect(sender, receiver), receiver.now
        self.asked: list[tuple[float, float]] = []

    def __call__(self, pairs: Any) -> Any:
        asked = self._now()
        copy = self._copy(pairs)
        self.asked.append((asked, self._now()))
        return copy


def parts(
    transfers: Sequence[Transfer], left: Mapping[int, float | None], asked: Sequence[tuple[float, float]]
) -> dict[str, list[float]]:
    """Returns the ms of each transfer and of its parts, and the host's share in percent: until the copy has been launched.

    left: seconds of each request's first token, by id. asked: of `Watched`.
    """
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for sent, (began, launched) in zip(sorted(transfers, key=lambda each: each.ended), sorted(asked), strict=True):
        whole, host = sent.ended - sent.started, launched - sent.started
        first = left[sent.request]
        assert first is not None
        spans = sent.started - first, whole, began - sent.started, launched - began, sent.ended - launched
        for values, value in zip(found.values(), (*(1e3 * span for span in spans), 100 * host / whole), strict=True):
            values.append(value)
    return found


def pulls(server: ReplicatedServer, load: str, times: int) -> tuple[int, dict[str, list[float]]]:
    """Serves a load so many times. Returns the blocks of a transfer, and its `parts`."""
    assert server.moves is not None and server.moves.connect is not None
    made: list[Watched] = []

    def connect(*executors: Any) -> Watched:
        made.append(Watched(server.moves.connect, *executors))  # type: ignore[union-attr, arg-type]
        return made[-1]

    watched = replace(server, moves=replace(server.moves, connect=connect))
    found: dict[str, list[float]] = {}
    for _ in range(times):
        made.clear()
        record = laid_out(watched, "pull").engine(compose_run(*SETUP.split()).policy(), requests_of(load)).run()
        left = {request.id: request.token_times[0] for request in record.requests}
        for name, values in parts(record.transfers, left, [each for one in made for each in one.asked]).items():
            found.setdefault(name, []).extend(values)
    return record.transfers[0].num_bytes // server.moves.block_bytes, found


def copies(server: ReplicatedServer, number: int) -> dict[str, list[float]]:
    """Returns the ms of plain copies and of copies of scattered blocks, so many blocks each, by what comes before."""
    import torch

    moves: Any = server.moves
    executors: Any = [each.executor for each in server.servers]
    send, draw = moves.connect(*executors), np.random.default_rng(0)
    pairs = [draw.permutation(each.kv.num_blocks)[:number].astype(np.int32) for each in server.servers]
    devices = [each.caches[0][0].keys.device for each in executors]
    there, here = (torch.empty(number * moves.block_bytes, dtype=torch.uint8, device=device) for device in devices)

    def plain(times: int) -> None:
        for _ in range(times):
            here.copy_(there, non_blocking=True)
        torch.cuda.synchronize(devices[0])

    def blocks(times: int) -> None:
        for copy in [send(pairs) for _ in range(times)]:
            copy.wait()

    def work() -> None:
        policy = compose_run(*SETUP.split()).policy()
        laid_out(server, "both").engine(policy, equal_requests(2, 2000, 1, 32000)).run()

    found: dict[str, list[float]] = {}
    for kind in (plain, blocks):
        kind(1)
        for name, before, times in (
            ("", partial(sleep, PAUSE), 1),
            (" after prompts", work, 1),
            (" in a row", lambda: None, ROW),
        ):
            for _ in range(REPEATS):
                before()
                begin = perf_counter()
                kind(times)
                found.setdefault(kind.__name__ + name, []).append(1e3 * (perf_counter() - begin) / times)
    return found


def main(hardware: str = "h200", folder: str = RESULTS) -> None:
    """Measures, prints and writes transfer.json, after each size too. hardware: a profile, which is not asked for times."""
    server = server_of("backend=cuda", hardware=[hardware] * 2)
    pulls(server, "2,000 alone", 1)  # compiles what the first run would compile
    runs: list[dict[str, Any]] = []
    for load, times in LOADS.items():
        number, found = pulls(server, load, times)
        found = copies(server, number) | found
        size = number * server.moves.block_bytes  # type: ignore[union-attr]
        row = {"prompts": load, "number": number, "bytes": size} | {name: spread(found[name]) for name in found}
        runs.append(row)
        print(f"prompts of {load}: {number} blocks", flush=True)
        path = write_benchmark("transfer", f"{hardware_name('cuda')} x2", {"runs": runs}, folder, VALIDATION)
    print(table(runs), f"written: {path}", sep="\n")


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the medians with the least and the most, and rates beside that of a plain copy after the same; a pull's beside those after a pause and after prompts."""
    rows = []
    for name in runs[0]:
        if not isinstance(runs[0][name], dict):
            continue
        rows.append([f"{name} [{'%' if name.endswith('share') else 'ms'}]"])
        for run in runs:
            found = run[name]
            rows[-1].append(f"{found['median']:.3g} [{found['min']:.3g}, {found['max']:.3g}]")
            kind, *rest = name.split(maxsplit=1)
            after = ["", " after prompts"] if name == "pull" else [f" {text}" for text in rest] or [""]
            if kind in ("plain", "blocks", "pull"):
                ratios = "; ".join(f"{run[f'plain{each}']['median'] / found['median']:.2f}" for each in after)
                rows[-1] += [f"{run['bytes'] / found['median'] / 1e6:.0f}", ratios]
            else:
                rows[-1] += ["", ""]
    heads = [text for run in runs for text in (f"{run['bytes'] / 1e9:.3g} GB", "GB/s", "over plain")]
    return tabulate(rows, ["", *heads], "github", disable_numparse=True) + "\n"
