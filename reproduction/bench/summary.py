"""The table of README's section on speed: ours and vLLM's on the same work, from the files of reproduction/results/<gpu>."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.store.provenance import around_marks, write_text
from reproduction.bench.measured import Measured
from reproduction.bench.tables import MISSING, Json, Row, fastest, markdown, number

BEGIN, END = "<!-- begin: written by `python -m reproduction.bench report` -->", "<!-- end -->"
PEER = "vLLM"
SETTING = "In parentheses: most requests and most tokens in an iteration; -: not recorded."
MARKS = ("†", "‡", "§", "¶", "‖")


class Comparison(NamedTuple):
    """One line: a piece of work, our figure, and vLLM's.

    batch: the most requests in an iteration. theirs: vLLM's fastest at our batch, of the newest measurements. best: its
    fastest of all batches, days and cards.
    """

    work: str
    unit: str
    batch: int
    ours: Row | None
    theirs: Row | None
    best: Row | None


def write(readme: Path, measured: Measured) -> None:
    """Puts the table between the two marks; raises ConfigError if the file or one of the marks is missing."""
    before, after = around_marks("readme", readme, BEGIN, END)
    write_text(readme, f"{before}\n{table(measured)}\n{after}")


def table(measured: Measured) -> str:
    """Work, ours and vLLM's. Most figures are of one date and commit, named in a note; marks name the others'."""
    lines = list(comparisons(measured))
    runs = Counter(row.measured for line in lines for row in line[3:] if row)
    usual, *others = [run for run, _ in runs.most_common()] or [MISSING]
    marks = {usual: "", **dict(zip(others, MARKS, strict=False))}

    def cell(row: Row | None, unit: str = "") -> str:
        return f"{number(row.value)}{unit}{marks[row.measured]}" if row else MISSING

    rows = [
        [
            line.work,
            cell(line.ours, f" {line.unit}{_setting(line.ours, line.batch, unknown='')}"),
            *(cell(row, _setting(row, line.batch, unknown=f" ({line.batch}; -)")) for row in (line.theirs, line.best)),
        ]
        for line in lines
    ]
    peer = (
        " or ".join(sorted({row.name.partition(",")[0] for line in lines for row in (line.theirs, line.best) if row}))
        or PEER
    )
    head = ["", "cbatch", f"{peer}, same batch", f"{peer}, best figure of any card"]
    hardware = {str(found["hardware"]) for found in measured if "hardware" in found}
    notes = [f"{mark} {run}" for run, mark in marks.items() if mark]
    note = f"Measured on one {' or '.join(sorted(hardware)) or 'GPU'} each: {'; '.join([usual, *notes])}. {SETTING}"
    return f"{markdown(rows, head)}\n\n{note}"


def comparisons(measured: Measured) -> Iterator[Comparison]:
    decodes = {"2048 new": "Llama-3.1-8B, 32 requests, 2,048 new tokens", "8192 new": "the same, 8,192 new tokens"}
    for new, work in decodes.items():
        loop = measured.decode["figures"].get(new, {}).get("async", {})
        section = measured.peers.get("decode", {}).get(new, {})
        ours = _row(loop, "ms_per_iteration")
        yield Comparison(work, "ms per iteration", 32, ours, *_peers(section, faster_is_less=True))
    one = fastest(filter(None, (_row(way, "output_tokens_per_second") for way in measured.graphs["figures"].values())))
    yield Comparison("LLaMA-2-7B, one request", "tokens/s", 1, one, *_peers(measured.peers.get("one_request", {})))
    chunks = _ours(measured.pd["figures"].get("14", {}), "sarathi, 256 tokens")
    work = "LLaMA-13B, P:D 14, SARATHI's chunks of 256"
    yield Comparison(work, "tokens/s", 18, chunks, *_peers(measured.peers.get("pd", {})))
    policies = {
        "512 queued requests of the Azure trace, first come, first served (`sarathi_serve`), batch {}": "sarathi_serve",
        "the same, whole prompts (`orca`), batch {}": "orca",
        "the same, `longest_first policy.per_prompt_token=true`, batch {}": "longest per prompt token first",
    }
    for batch in (128, 256):
        theirs = _peers(measured.peers.get("trace", {}), f"batch {batch},")
        for work, policy in policies.items():
            ours = _ours(measured.trace["figures"], f"batch {batch}, {policy}")
            if ours or (any(theirs) and policy == "sarathi_serve"):
                yield Comparison(work.format(batch), "tokens/s", batch, ours, *theirs)


def _setting(row: Row | None, batch: int, unknown: str) -> str:
    """Batch and token budget, which stand in a measured row's figures, or in its name."""
    found = (row and row.figures) or {}
    named = re.search(r"([\d,]+) tokens", row.name if row else "")
    budget = found.get("budget") or (named and int(named[1].replace(",", "")))
    return f" ({found.get('batch', batch)}; {budget:,})" if budget else unknown


def _ours(policies: Json, beginning: str) -> Row | None:
    chosen = {name: found for name, found in policies.items() if name.startswith(beginning)}
    return fastest(filter(None, (_row(found, "tokens_per_second", name) for name, found in chosen.items())))


def _row(part: Json, key: str, name: str = "") -> Row | None:
    return Row(name, {**part[key], "measured": part["measured"]}) if key in part else None


def _peers(section: Json, setting: str = "", *, faster_is_less: bool = False) -> tuple[Row | None, Row | None]:
    """`theirs` and `best` of a `Comparison`, for vLLM's rows with this setting."""
    rows = [Row(name, found) for name, found in section.get("engines", {}).items() if name.startswith(PEER)]
    chosen = [row for row in rows if setting in row.name]
    newest = [row for row in chosen if row.measured[:10] == max(row.measured[:10] for row in chosen)]
    return fastest(newest, faster_is_less=faster_is_less), fastest(rows, faster_is_less=faster_is_less)
