"""Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

Source: Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024; the traces of
2023 (conversation and code) are in the repository Azure/AzurePublicDataset. TIMESTAMP is a wall-clock time with 100 ns
digits, read to 1 us. No row of the published files has GeneratedTokens 0; one that had would be refused.
"""

from __future__ import annotations

from experiments.workloads.readers.source import TextFile
from experiments.workloads.readers.table import read_csv
from experiments.workloads.trace import Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(file: TextFile) -> Trace:
    """The requests of the file; times count from the first row."""
    table = read_csv(file, COLUMNS)
    return Trace(
        source=file.name,
        arrival_time=table.times("TIMESTAMP"),
        prompt_tokens=table.token_counts("ContextTokens"),
        output_tokens=table.token_counts("GeneratedTokens"),
        line=table.line,
    )
