"""Length tables: CSV with num_prefill_tokens and num_decode_tokens, and no arrival times.

Such tables of ShareGPT and arXiv-summarization (Llama-2 tokenizer) come with the simulators Vidur (microsoft/vidur,
MLSys 2024) and Sarathi-Serve (microsoft/sarathi-serve, OSDI 2024). Further columns are not read.
"""

from __future__ import annotations

import numpy as np

from experiments.workloads.readers.source import TextFile
from experiments.workloads.readers.table import csv_columns, token_counts
from experiments.workloads.trace import Trace

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def read_length_table(file: TextFile) -> Trace:
    """The lengths of the file, in its order."""
    prompt, output = csv_columns(file, COLUMNS).values()
    return Trace(
        source=file.name,
        prompt_tokens=token_counts(file, COLUMNS[0], prompt),
        output_tokens=token_counts(file, COLUMNS[1], output),
        line=np.arange(2, len(prompt) + 2),
    )
