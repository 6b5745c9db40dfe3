"""The formats of request traces: what is read from each, and where its published files come from.

decisions  a run's decisions.jsonl.gz, as `decisions=true` and vLLM with `vllm.record` write it: the requests as they arrived, with
           their true lengths; those that got no token are left out.
azure      CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Patel et al., "Splitwise: Efficient generative LLM inference
           using phase splitting", ISCA 2024; the traces of 2023 (conversation and code) are in the repository
           Azure/AzurePublicDataset. TIMESTAMP is a wall-clock time with 100 ns digits, read to 1 us.
lengths    CSV with num_prefill_tokens and num_decode_tokens, and perhaps arrived_at (seconds). Such tables of ShareGPT and
           arXiv-summarization (Llama-2 tokenizer), which have no times, and of Azure's traces, which have, come with the
           simulators Vidur (microsoft/vidur, MLSys 2024) and Sarathi-Serve (microsoft/sarathi-serve, OSDI 2024).
mooncake   JSON lines with timestamp (milliseconds), input_length, output_length (tokens) and hash_ids. The trace release of
           the Mooncake paper, FAST '25, in the repository kvcache-ai/Mooncake. Timestamps lie on a grid of about 3 s
           with several requests at each instant, so shorter intervals carry no information. `hash_ids`, one for each
           512 tokens of the prompt, become `prefix_hashes`; lines may lack them.
vtc        CSV with arrival_s (seconds), client, prompt_tokens, output_tokens: the table of requests that the result logs of
           Ying1123/VTC-artifact give (fair_bench/*/all_results_real.jsonl; Sheng et al., OSDI 2024), sorted by arrival.

Other columns are ignored. A length of 0 is refused; no published file has one.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from cbatch import SLO
from experiments.workloads.readers.source import TextFile
from experiments.workloads.readers.table import Table, header_of, read_csv, read_json_lines
from experiments.workloads.trace import Column, Trace

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTHS = ("num_prefill_tokens", "num_decode_tokens")
ARRIVED_AT = "arrived_at"
MOONCAKE = ("timestamp", "input_length", "output_length")
_SAID = ("max_new_tokens", "client", "session", "tier", "priority", "predicted_new_tokens")
"""Fields of a `RequestSpec` that policies see, in a decisions file."""

VTC = ("arrival_s", "client", "prompt_tokens", "output_tokens")


def read_azure(file: TextFile) -> Trace:
    table = read_csv(file, AZURE)
    return _trace(table, *AZURE[1:], arrival_time=table.times("TIMESTAMP"))


def read_lengths(file: TextFile) -> Trace:
    if ARRIVED_AT not in header_of(file):
        return _trace(read_csv(file, LENGTHS), *LENGTHS)
    table = read_csv(file, (*LENGTHS, ARRIVED_AT))
    seconds = table.amounts(ARRIVED_AT)
    return _trace(table, *LENGTHS, arrival_time=seconds - seconds[0])


def read_mooncake(file: TextFile) -> Trace:
    table = read_json_lines(file, (*MOONCAKE, "hash_ids"))
    milliseconds = table.amounts("timestamp")
    seconds = (milliseconds - milliseconds[0]) / 1000
    return _trace(table, *MOONCAKE[1:], arrival_time=seconds, fields={"prefix_hashes": _hashes(table)})


def read_vtc(file: TextFile) -> Trace:
    table = read_csv(file, VTC)
    seconds, clients = table.amounts("arrival_s"), table.columns["client"]
    table.refuse((not client.strip() for client in clients), "must be a name", "client")
    return _trace(table, *VTC[2:], arrival_time=seconds - seconds[0], fields={"client": _objects(clients)})


def read_decisions(file: TextFile) -> Trace:
    asked: dict[int, dict[str, Any]] = {}
    lengths: dict[int, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(file.lines, 1):
        try:
            if line.startswith('{"request"'):
                request = json.loads(line)["request"]
                asked[request["id"]], lines[request["id"]] = request, number
                lengths[request["id"]] = request["true_new_tokens"] or request["max_new_tokens"]
            elif line.startswith('{"finish"'):
                finish = json.loads(line)["finish"]
                lengths[finish["id"]] = finish["num_output_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise file.fail(number, f"is damaged ({error}); record the run again") from error
    served = sorted((request["arrival_time"], id_) for id_, request in asked.items() if lengths[id_] > 0)
    if not served:
        raise file.fail(1, "no request received a token; record a run that serves some")
    rows = [asked[id_] for _, id_ in served]
    output = np.array([lengths[id_] for _, id_ in served])
    columns = {name: _objects(row[name] for row in rows) for name in _SAID}
    columns |= {"slo": _objects(SLO(**row["slo"]) for row in rows), "true_new_tokens": output}
    return Trace(
        source=file.name,
        prompt_tokens=np.array([row["num_prompt_tokens"] for row in rows]),
        output_tokens=output,
        arrival_time=np.array([time for time, _ in served]) - served[0][0],
        line=np.array([lines[id_] for _, id_ in served]),
        fields=columns,
    )


def _objects(values: Iterable[Any]) -> Column:
    return np.fromiter(values, object)


def _trace(table: Table, prompt: str, output: str, **columns: Any) -> Trace:
    prompt_tokens, output_tokens = table.token_counts(prompt), table.token_counts(output)
    source, line = table.file.name, table.line
    return Trace(source=source, prompt_tokens=prompt_tokens, output_tokens=output_tokens, line=line, **columns)


def _hashes(table: Table) -> Column:
    """A tuple for each row."""
    hashes = table.columns["hash_ids"]
    valid = (ids is None or (isinstance(ids, list) and set(map(type, ids)) <= {int}) for ids in hashes)
    table.refuse((not is_valid for is_valid in valid), "must be a list of whole numbers", "hash_ids")
    return _objects(tuple(ids or ()) for ids in hashes)
