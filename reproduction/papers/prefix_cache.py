"""Hits against the size of the prefix cache, by eviction and policy, on Mooncake's conversation trace (FAST '25).

    python -m reproduction.papers prefix_cache traces=FOLDER [folder=results]

Twice: all 7,851 requests one at a time through the pool alone, where Belady's eviction is the optimum; and the first 1,000 served by
three policies, on one simulated H100 near saturation. A block is a hash id of the trace, 512 tokens. Rows that folder/prefix_cache/hits.csv
has already are not measured again, unless they were served with other tables of the profile than today's (column `tables`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from tabulate import tabulate

from cbatch import Eviction, Request
from cbatch.kv import PrefixPool, blocks_for
from cbatch.sim import load_profile
from experiments.api import simulate
from experiments.plots.saving import save
from experiments.plots.style import line_style, new_figure, print_style
from experiments.store.provenance import write_text
from experiments.workloads.readers.traces import read_trace
from policies.evictions import FIFO, LFU, LRU, SLRU, TLRU, Belady, Marconi, SoftTTL
from reproduction import RESULTS
from reproduction.parts import legend, log_x
from reproduction.validation.compare import tables_of

FILE, BLOCK = "mooncake_fast25_conversation_rows1-7851.jsonl.gz", 512
EVICTIONS: dict[str, Callable[[], Eviction]] = {
    "belady": Belady,
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "slru": SLRU,
    "tlru": lambda: TLRU(threshold=512, next_prompt=128),
    "marconi": Marconi,
    "soft_ttl": lambda: SoftTTL(ttl=30),
}
"""With the values of conf/eviction."""
ALONE = "one at a time"
POLICIES = {"sarathi_serve": "sarathi_serve", "lpm": "prefix_order(order=lpm)", "hrrn": "prefix_order(order=hrrn)"}
SIZES = {ALONE: (500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)} | dict.fromkeys(
    POLICIES, (1000, 2000, 4000, 8000, 16_000)
)
"""Blocks of the whole cache."""
LARGEST = {"marconi": 10_000, "soft_ttl": 1000}
"""Alone: these rank all leaves before each eviction, which takes minutes in larger caches."""
SERVED: dict[str, Any] = {"requests": 1000, "speed": 0.4, "hardware": "h100", "batch": 128, "chunk": 2048}
"""At 0.4 of its speed the trace has 1.3 requests/s, about what the GPU serves."""
KEY = ["policy", "eviction", "blocks"]


def main(traces: str, folder: str = RESULTS) -> None:
    """Measures what is missing, and writes hits.csv, hits.png, hits.pdf and table.md."""
    place = Path(folder) / "prefix_cache"
    path = place / "hits.csv"
    data = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*KEY, "tables"])
    data = data[(data["policy"] == ALONE) | (data["tables"] == tables_of(load_profile(SERVED["hardware"])))]
    known = set(map(tuple, data[KEY].to_numpy().tolist()))
    for key in ((policy, name, size) for policy in SIZES for name in EVICTIONS for size in SIZES[policy]):
        if key not in known and (key[0] != ALONE or key[2] <= LARGEST.get(key[1], key[2])):
            row = dict(zip(KEY, key, strict=True)) | measure(*key, traces)
            print(*row.values(), flush=True)
            data = pd.concat([data, pd.DataFrame([row])], ignore_index=True)
            write_text(path, data.to_csv(index=False, float_format="%.5g"))
    print(*save(draw(data), place, "hits"), write_text(place / "table.md", table(data)), sep="\n")


def measure(policy: str, name: str, num_blocks: int, traces: str) -> dict[str, Any]:
    """Returns the share of prompt tokens that were found; served, also the mean time to first token in seconds, and the profile's tables."""
    if policy == ALONE:
        return {"hit_share": alone(EVICTIONS[name](), num_blocks, traces)}
    keys = {**SERVED, "block_size": BLOCK, "kv_tokens": num_blocks * BLOCK, "prefix_cache": True, "eviction": name}
    summary = simulate(POLICIES[policy], "traces/mooncake", traces=traces, **keys).summary
    tables = tables_of(load_profile(SERVED["hardware"]))
    figures = {"hit_share": summary["prefix_cache"]["hit_share"], "ttft_seconds": summary["ttft_seconds"]["mean"]}
    return figures | {"tables": tables}


def alone(eviction: Eviction, num_blocks: int, traces: str) -> float:
    """Serves all requests one at a time in the order of arrival, without an engine; returns the share of prompt tokens found."""
    trace = read_trace(str(Path(traces) / FILE))
    pool = PrefixPool(num_blocks, BLOCK, 1, int((trace.prompt_tokens + trace.output_tokens).max()), eviction)
    lengths = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    requests = [Request(row, *both) for row, both in enumerate(lengths)]
    ids = [list(hashes) for hashes in trace.fields["prefix_hashes"]]
    for request, hashes in zip(requests, ids, strict=True):
        eviction.on_submit(request, hashes[: request.num_prompt_tokens // BLOCK])
    num_found = 0
    assert trace.arrival_time is not None
    for request, hashes, pool.now in zip(requests, ids, trace.arrival_time.tolist(), strict=True):
        prompt, total = request.num_prompt_tokens, request.num_prompt_tokens + request.max_new_tokens
        names = hashes[: prompt // BLOCK]
        found = [hash_id for hash_id in names[: (prompt - 1) // BLOCK] if hash_id in pool]
        names += [(request.id, block) for block in range(len(names), (total - 1) // BLOCK)]
        pool.share(0, found)
        eviction.on_admit(request, found, pool.now)
        pool.extend(0, blocks_for(total - 1, BLOCK) - len(found))
        pool.register(0, names, len(names))
        pool.note_holder(0, total)
        eviction.on_release(request, names, pool.now)
        pool.release(0, None)
        eviction.on_finish(request)
        num_found += len(found)
    return num_found * BLOCK / int(trace.prompt_tokens.sum())


def table(data: pd.DataFrame) -> str:
    """Returns the hits in percent; served, also the mean time to first token in seconds."""
    cells = data["hit_share"].map("{:.1%}".format) + data["ttft_seconds"].map(", {:.1f} s".format).where(
        data["policy"] != ALONE, ""
    )
    texts = []
    for policy, part in data.assign(cell=cells).groupby("policy", sort=False):
        columns = part.pivot_table(index="eviction", columns="blocks", values="cell", aggfunc="first", sort=False)
        headers = [str(policy), *(f"{size:,} blocks" for size in columns.columns.tolist())]
        texts.append(tabulate(columns.fillna("").reset_index().to_numpy().tolist(), headers, "github"))
    return "\n\n".join(texts) + "\n"


@print_style()
def draw(data: pd.DataFrame) -> Figure:
    """Hits against the size of the cache: all requests one at a time, and 1,000 of them served by each policy. Equal evictions share a line."""
    hits, equal = data.pivot_table(index=KEY[::2], columns="eviction", values="hit_share"), dict[str, list[str]]()
    for name in EVICTIONS:
        same = (other for other in equal if not (hits[other] - hits[name]).any())
        equal.setdefault(next(same, name), []).append(name)
    figure, axes = new_figure(2, 2, 4.6)
    panels = [panel for row in axes for panel in row]
    titles = {ALONE: "7,851 requests, one at a time"} | {policy: f"1,000 requests, {policy}" for policy in POLICIES}
    for panel, (policy, title) in zip(panels, titles.items(), strict=True):
        for index, (name, names) in enumerate(equal.items()):
            line = data[(data["policy"] == policy) & (data["eviction"] == name)]
            style = line_style(index) | ({"color": "#777777", "linestyle": "--"} if name == "belady" else {})
            panel.plot(line["blocks"] / 1000, line["hit_share"], label=" = ".join(names), **style)
        log_x(panel, [size / 1000 for size in SIZES[policy]])
        panel.xaxis.minorticks_off()
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panel.set(title=title, ylim=(0, None))
    for panel in panels[2:]:
        panel.set_xlabel("size of the cache [1,000 blocks of 512 tokens]")
    for panel in panels[::2]:
        panel.set_ylabel("prompt tokens found")
    legend(figure, panels[:1], ncols=8)
    return figure
