"""The table of README's section on speed: ours beside the best of vLLM on the same work, from the files of results/<gpu>."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cbatch import ConfigError
from experiments.bench.measured import Measured
from experiments.bench.peers.rows import BY_HAND
from experiments.bench.tables import MISSING, Json, Row, fastest, markdown, number

BEGIN, END = "<!-- begin: written by `python -m experiments.bench report` -->", "<!-- end -->"
PEER = "vLLM"


class Comparison(NamedTuple):
    """One line: a piece of work, our figure and the fastest of vLLM's under any setting allowed for the line."""

    work: str
    unit: str
    ours: Row | None
    theirs: Row | None


def write(readme: Path, measured: Measured) -> None:
    """Puts the table between the two marks; raises ConfigError if the file or one of the marks is missing."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"readme={readme}: needs the lines {BEGIN!r} and {END!r}; the table goes between them")
    readme.write_text(f"{before}{BEGIN}\n{table(measured)}\n{END}{after}", encoding="utf-8")


def table(measured: Measured) -> str:
    """Work, ours and vLLM's; figures entered by hand carry a star."""
    rows = []
    for work, unit, ours, theirs in comparisons(measured):
        star = "\\*" if theirs and theirs.name.endswith(BY_HAND) else ""
        rows.append(
            [
                work,
                f"{number(ours.value)} {unit}" if ours else MISSING,
                f"{number(theirs.value)}{star}" if theirs else "",
            ]
        )
    starred = any(row[2].endswith("*") for row in rows)
    note = f"\n\n\\* Measured on {measured.peers['date']} and entered by hand." if starred else ""
    return markdown(rows, ["", "cbatch", f"{PEER}, its best setting"]) + note


def comparisons(measured: Measured) -> Iterator[Comparison]:
    decodes = {"2048 new": "Llama-3.1-8B, 32 requests, 2,048 new tokens", "8192 new": "the same, 8,192 new tokens"}
    for new, work in decodes.items():
        ours = measured.decode["figures"].get(new, {}).get("async", {}).get("ms_per_iteration")
        theirs = _peer(measured.peers.get("decode", {}).get(new, {}), faster_is_less=True)
        yield Comparison(work, "ms per iteration", ours and Row("", ours), theirs)
    ways = measured.graphs["figures"].values()
    one = fastest(Row("", way.get("output_tokens_per_second")) for way in ways)
    yield Comparison("LLaMA-2-7B, one request", "tokens/s", one, _peer(measured.peers.get("one_request", {})))
    chunks, theirs = (
        _ours(measured.pd["figures"].get("14", {}), "sarathi, 256 tokens"),
        _peer(measured.peers.get("pd", {})),
    )
    yield Comparison("LLaMA-13B, P:D 14, SARATHI's chunks of 256", "tokens/s", chunks, theirs)
    policies = {
        "512 queued requests of the Azure trace, first come, first served (`sarathi_serve`), batch {}": "sarathi_serve",
        "the same, whole prompts (`orca`), batch {}": "orca",
        "the same, `longest_first policy.per_prompt_token=true`, batch {}": "longest per prompt token first",
    }
    for batch in (128, 256):
        theirs = _peer(measured.peers.get("trace", {}), f"batch {batch},")
        for work, policy in policies.items():
            ours = _ours(measured.trace["figures"], f"batch {batch}, {policy}")
            if ours or (theirs and policy == "sarathi_serve"):
                yield Comparison(work.format(batch), "tokens/s", ours, theirs)


def _ours(policies: Json, beginning: str) -> Row | None:
    """The fastest of the policies whose names begin so."""
    chosen = {name: found for name, found in policies.items() if name.startswith(beginning)}
    return fastest(Row(name, found["tokens_per_second"]) for name, found in chosen.items())


def _peer(section: Json, setting: str = "", *, faster_is_less: bool = False) -> Row | None:
    """The fastest of vLLM's rows with this setting."""
    rows = [Row(name, found) for name, found in section.get("engines", {}).items()]
    chosen = [row for row in rows if row.name.startswith(PEER) and setting in row.name]
    return fastest(chosen, faster_is_less=faster_is_less)
