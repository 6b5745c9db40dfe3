"""Mooncake traces: JSON lines with timestamp (milliseconds), input_length, output_length (tokens) and hash_ids.

Source: the trace release of the Mooncake paper, FAST '25, in the repository kvcache-ai/Mooncake. Timestamps lie on a
grid of about 3 s with several requests at each instant, so shorter intervals carry no information. `hash_ids`, one for
each 512 tokens of the prompt, become `prefix_hashes`; lines may lack them.
"""

from __future__ import annotations

from experiments.workloads.readers.source import TextFile
from experiments.workloads.readers.table import Table, read_json_lines
from experiments.workloads.trace import Column, Trace

KEYS = ("timestamp", "input_length", "output_length")


def read_mooncake(file: TextFile) -> Trace:
    """The requests of the file; times count from the first row."""
    table = read_json_lines(file, (*KEYS, "hash_ids"))
    milliseconds = table.amounts("timestamp")
    return Trace(
        source=file.name,
        arrival_time=(milliseconds - milliseconds[0]) / 1000,
        prompt_tokens=table.token_counts("input_length"),
        output_tokens=table.token_counts("output_length"),
        line=table.line,
        fields={"prefix_hashes": _hashes(table)},
    )


def _hashes(table: Table) -> Column:
    """A tuple for each row."""
    hashes = table.rows["hash_ids"]
    valid = hashes.map(lambda ids: ids is None or (isinstance(ids, list) and set(map(type, ids)) <= {int}))
    table.refuse(~valid, "must be a list of whole numbers", "hash_ids")
    return hashes.map(lambda ids: tuple(ids or ())).to_numpy()
