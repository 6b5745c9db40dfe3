"""Length tables: CSV with num_prefill_tokens and num_decode_tokens, and no arrival times.

Such tables of ShareGPT and arXiv-summarization (Llama-2 tokenizer) come with the simulators Vidur (microsoft/vidur,
MLSys 2024) and Sarathi-Serve (microsoft/sarathi-serve, OSDI 2024). Other columns are ignored.
"""

from __future__ import annotations

from experiments.workloads.readers.source import TextFile
from experiments.workloads.readers.table import read_csv
from experiments.workloads.trace import Trace

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def read_length_table(file: TextFile) -> Trace:
    """The lengths of the file, in its order."""
    table = read_csv(file, COLUMNS)
    return Trace(
        source=file.name,
        prompt_tokens=table.token_counts("num_prefill_tokens"),
        output_tokens=table.token_counts("num_decode_tokens"),
        line=table.line,
    )
