"""Mooncake traces: JSON lines with timestamp (milliseconds), input_length and output_length (tokens).

Source: the trace release of the Mooncake paper, FAST '25, in the repository kvcache-ai/Mooncake. Timestamps lie on a
grid of about 3 s with several requests at each instant, so intervals below that say nothing. `hash_ids`, which name the
prompt's reusable 512-token blocks, are not read.
"""

from __future__ import annotations

import numpy as np

from experiments.workloads.readers import fields
from experiments.workloads.readers.source import TextFile
from experiments.workloads.readers.table import column, json_objects
from experiments.workloads.trace import Trace

KEYS = ("timestamp", "input_length", "output_length")


def read_mooncake(file: TextFile) -> Trace:
    """The requests of the file; times count from the first row."""
    records = json_objects(file)
    time, prompt, output = ([record.get(key) for record in records] for key in KEYS)
    milliseconds = np.array(column(file, KEYS[0], time, fields.not_negative, 1))
    return Trace(
        source=file.name,
        prompt_tokens=np.array(column(file, KEYS[1], prompt, fields.token_count, 1)),
        output_tokens=np.array(column(file, KEYS[2], output, fields.token_count, 1)),
        arrival_time=(milliseconds - milliseconds[0]) / 1000,
        line=np.arange(1, len(records) + 1),
    )
