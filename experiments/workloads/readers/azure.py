"""Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

Source: Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024; the traces of
2023 (conversation and code) are in the repository Azure/AzurePublicDataset. TIMESTAMP is a wall-clock time with 100 ns
digits, read to 1 us. No row of the published files has GeneratedTokens 0, and one that had would be refused.
"""

from __future__ import annotations

import numpy as np

from experiments.workloads.readers import fields
from experiments.workloads.readers.source import TextFile
from experiments.workloads.readers.table import column, csv_columns, token_counts
from experiments.workloads.trace import Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(file: TextFile) -> Trace:
    """The requests of the file; times count from the first row."""
    time, prompt, output = csv_columns(file, COLUMNS).values()
    moments = column(file, COLUMNS[0], time, fields.timestamp, 2)
    return Trace(
        source=file.name,
        prompt_tokens=token_counts(file, COLUMNS[1], prompt),
        output_tokens=token_counts(file, COLUMNS[2], output),
        arrival_time=np.array([(moment - moments[0]).total_seconds() for moment in moments]),
        line=np.arange(2, len(time) + 2),
    )
