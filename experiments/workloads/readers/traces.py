"""Reads request traces, with the column names of each published format.

azure      Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024; the traces of 2023
           (conversation and code) are in the repository Azure/AzurePublicDataset.
lengths    Tables that come with the simulators Vidur (microsoft/vidur, MLSys 2024) and Sarathi-Serve (microsoft/sarathi-serve,
           OSDI 2024): of ShareGPT and arXiv-summarization (Llama-2 tokenizer), without times, and of Azure's traces, with times.
mooncake   The trace release of the Mooncake paper, FAST '25, in the repository kvcache-ai/Mooncake. Timestamps lie on a grid of
           about 3 s with several requests at each instant, so shorter intervals carry no information. `hash_ids`, one per
           512 prompt tokens, become `prefix_hashes`.
bailian    Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025, in the repository alibaba-edu/qwen-bailian-usagetraces-anon:
           Mooncake's columns and `chat_id`, with times in seconds and ids of 16 tokens.
vtc        The table of requests in the result logs of Ying1123/VTC-artifact (fair_bench/*/all_results_real.jsonl; Sheng et al.,
           OSDI 2024), sorted by arrival.
decisions  A run's decisions.jsonl.gz, written with `decisions=true` or by vLLM with `vllm.record`: requests in order of arrival, with
           all fields that their clients sent and the lengths of their outputs. Requests without tokens from vLLM are left out.

`workload.columns='{client: user_id, difficulty: score}'` names further columns to read. `client`, `session`, `tier`, `priority`,
`predicted_new_tokens` and `timeout` (seconds, may be empty) fill fields of `RequestSpec`. Any other name becomes an attribute of
the request, `request.extra["difficulty"]`.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np

from cbatch import ConfigError, RequestSpec, WorkloadError
from cbatch.request_spec import NO_SLO
from cbatch.validation import nearest, shorten
from experiments.store.decisions_file import read_spec
from experiments.workloads.readers.table import Table, as_number, at_line, parse_table, read_text
from experiments.workloads.trace import MOST_TOKENS, Column, Format, Ints, Trace


@dataclass(frozen=True)
class TraceColumns:
    """The column names of a format. Only `prompt` and `output` are required in a file.

    per_second: units of `arrival` per second; None for wall-clock times. fields: further columns by field of `RequestSpec`.
    hashed: prompt tokens per id in `prefix_hashes`. mark: a column that no later format has.
    chained: whether an id states all tokens before, too, according to its publisher.
    """

    prompt: str
    output: str
    arrival: str
    per_second: float | None = 1.0
    fields: Mapping[str, str] = field(default_factory=dict)
    hashed: int = 0
    mark: str | None = None
    chained: bool = False


_IDS = {"prefix_hashes": "hash_ids"}

FORMATS: Mapping[str, TraceColumns] = {
    "azure": TraceColumns("ContextTokens", "GeneratedTokens", "TIMESTAMP", per_second=None),
    "bailian": TraceColumns("input_length", "output_length", "timestamp", 1.0, _IDS, 16, "chat_id"),
    "mooncake": TraceColumns("input_length", "output_length", "timestamp", 1000.0, _IDS, 512, chained=True),
    "lengths": TraceColumns("num_prefill_tokens", "num_decode_tokens", "arrived_at"),
    "vtc": TraceColumns("prompt_tokens", "output_tokens", "arrival_s", fields={"client": "client"}),
}

_DECISIONS = TraceColumns("num_prompt_tokens", "output_tokens", "arrival_time")
_FURTHER = {"arrival_iteration", *RequestSpec.__dataclass_fields__} - {"id", _DECISIONS.prompt, _DECISIONS.arrival}
"""Columns that a decisions file has in addition to `_DECISIONS`."""
_EMPTY: tuple[Any, ...] = (None, (), {})

_OTHER_WORKLOADS = {"window_start_s": "servegen", "prompt": "prompts", "token_ids": "prompts"}


def read_trace(
    path: str,
    format: Format = "auto",
    section: str = "workload",
    columns: Mapping[str, str] | None = None,
    timed: bool = True,
    at_most: int | None = None,
) -> Trace:
    """Reads a trace file, plain or compressed.

    format: "auto" recognizes a format by its columns. section: section of the keys `path` and `format`, for messages.
    columns: further columns by the attribute to fill. In `extra`, CSV columns of numbers become numbers, and empty values become
        None; JSON values stay unchanged.
    timed: whether to read arrival times. at_most: maximum rows to read and validate; None: all.

    Raises WorkloadError, with file and line number, if the file cannot be read, is empty or has no known format, or for a
    malformed line, a missing column, a length below 1, or a time that goes backwards.
    """
    text = read_text(path, f"{section}.path")
    if format == "decisions" or (format == "auto" and text.startswith('{"run":')):
        table, known = _recorded(path, text), _DECISIONS
        stated = (name for name in _FURTHER if any(value not in _EMPTY for value in table.columns[name]))
        filled = {name: _objects(table.columns[name]) for name in stated}
    else:
        table = parse_table(path, text, at_most)
        known = _columns(table, format, section)
        filled = _fields(table, {name: column for name, column in known.fields.items() if column in table.columns})
    further = _fields(table, own := columns or {})
    if filled.keys() & further.keys() & {"extra"}:
        pairs = zip(filled["extra"], further["extra"], strict=True)
        further["extra"] = _objects([{**(recorded or {}), **new} for recorded, new in pairs])
    filled |= further
    tokens = partial(table.whole_numbers, least=1, most=MOST_TOKENS, unit=" of tokens")
    prompts = tokens(known.prompt)
    if known.hashed and "prefix_hashes" in filled:
        ids = {**known.fields, **own}["prefix_hashes"]
        filled["prefix_hashes"] = _whole_hashes(table, ids, known, prompts, filled["prefix_hashes"])
        filled["hash_block"] = np.full(len(prompts), known.hashed)
    return Trace(
        source=path,
        prompt_tokens=prompts,
        output_tokens=tokens(known.output),
        arrival_time=_arrivals(table, known) if timed and known.arrival in table.columns else None,
        line=np.array(table.lines),
        fields=filled,
    )


def _columns(table: Table, format: Format, section: str) -> TraceColumns:
    """Returns the columns of the format. "auto": the first format whose columns, or else one of whose lengths, the table has."""
    lengths = {name: {known.prompt, known.output} & {*table.columns} for name, known in FORMATS.items()}
    if lengths.get(format):
        return FORMATS[format]
    for name, known in FORMATS.items():
        if {known.prompt, known.output, known.mark or known.prompt} <= {*table.columns}:
            if format != "auto":
                raise WorkloadError(f"{section}.format={format}: {table.path} has the columns of {name}; give {name}")
            return known
    if format == "auto" and (half := [name for name, present in lengths.items() if present]):
        return FORMATS[half[0]]  # the later error names the missing length
    pairs = "; ".join(f"{known.prompt}, {known.output} ({name})" for name, known in FORMATS.items())
    columns = shorten(", ".join(table.columns))
    others = [name for column, name in _OTHER_WORKLOADS.items() if column in table.columns]
    others = [name for name in others if name == "servegen" or ".csv" not in table.path]  # prompts are JSON lines
    other = f"use workload={others[0]}, or " if others else ""
    raise WorkloadError(f"{table.path}: has columns {columns}; {other}name its lengths as a known format does: {pairs}")


def _arrivals(table: Table, known: TraceColumns) -> Column:
    """Returns seconds since the first row, [rows]."""
    if known.per_second is None:
        seconds = table.times(known.arrival)
    else:
        seconds = table.since_first(known.arrival) / known.per_second
    table.refuse(np.diff(seconds, prepend=0.0) < 0, known.arrival, "the time goes backwards", "sort the rows by time")
    return seconds


def _recorded(path: str, text: str) -> Table:
    """Returns the requests with tokens in a decisions file, in order of arrival, with their fields and `output_tokens`."""
    lines, specs, stopped, received = dict[int, int](), dict[int, RequestSpec](), dict[int, int](), Counter[int]()
    iterations = dict[int, int]()
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.startswith('{"request"'):
                spec, iteration = read_spec(json.loads(line)["request"])
                specs[spec.id], lines[spec.id], iterations[spec.id] = spec, number, iteration
            elif line.startswith('{"step"'):
                step = json.loads(line)["step"]
                received.update(step["received"])
                stopped |= {id_: received[id_] for id_ in step["stopped"]}
            elif line.startswith('{"finish"'):
                finish = json.loads(line)["finish"]
                spec = specs.pop(finish["id"])
                if length := finish["num_output_tokens"]:
                    specs[spec.id] = replace(spec, true_new_tokens=length)
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise at_line(path, number, f"is damaged ({error}); record the run again") from error
    if not specs:
        raise WorkloadError(f"{path}: no request received a token; record a run that serves some")
    served = sorted(specs.values(), key=attrgetter("arrival_time", "id"))
    columns = {name: [getattr(spec, name) for spec in served] for name in RequestSpec.__dataclass_fields__}
    columns["slo"] = [None if slo == NO_SLO else slo for slo in columns["slo"]]
    columns["arrival_iteration"] = [iterations[spec.id] for spec in served]
    outputs = [spec.true_new_tokens or stopped.get(spec.id, spec.max_new_tokens) for spec in served]
    return Table(path, {**columns, "output_tokens": outputs}, [lines[spec.id] for spec in served])


def _fields(table: Table, columns: Mapping[str, str]) -> dict[str, Column]:
    """Returns the fields of a `Trace` that columns fill. columns: column names by attribute of requests."""
    filled: dict[str, Column] = {}
    extra: dict[str, list[Any]] = {}
    for name, column in columns.items():
        values = table.column(column, f"workload.columns.{name}: ")
        if name in _READERS:
            filled[name] = _READERS[name](table, column)
        elif name in RequestSpec.__dataclass_fields__:
            remedy = f"choose another name, or a field: {nearest(name, _READERS)}"
            raise WorkloadError(f"workload.columns.{name}: the format fills it; {remedy}")
        else:
            extra[name] = _plain(values)
    if extra:
        filled["extra"] = _objects([dict(zip(extra, row, strict=True)) for row in zip(*extra.values(), strict=True)])
    return filled


def _plain(values: list[Any]) -> list[Any]:
    """Converts text to numbers if all values are numbers, and empty text to None. Other JSON values stay unchanged."""
    plain = [None if value == "" else value for value in values]
    if all(isinstance(value, str | None) for value in plain):
        for kind in (int, float):
            with suppress(ValueError):
                return [None if value is None else kind(value) for value in plain]
    return plain


def _texts(table: Table, column: str) -> Column:
    return _objects([None if value in (None, "") else str(value) for value in table.columns[column]])


def _whole(table: Table, column: str, least: int = -(2**62)) -> Column:
    return table.whole_numbers(column, least).astype(object)


def _seconds(table: Table, column: str) -> Column:
    """Returns times in seconds, above 0; None for empty values."""
    seconds = [None if value in (None, "") else as_number(value) for value in table.columns[column]]
    bad = [time is not None and not 0 < time < inf for time in seconds]
    table.refuse(bad, column, "must be a number of seconds above 0")
    return _objects(seconds)


def _hashes(table: Table, column: str) -> Column:
    """Returns a tuple of ids for each row."""
    values = table.columns[column]
    valid = [ids is None or (isinstance(ids, list) and {*map(type, ids)} <= {int}) for ids in values]
    table.refuse(~np.array(valid), column, "must be a list of whole numbers")
    known = [len({*ids}) == len(ids) and min(ids, default=0) >= 0 for ids in (value or () for value in values)]
    table.refuse(
        ~np.array(known), column, "an id stands for the prompt up to its block's end: none comes twice or is negative"
    )
    return _objects([tuple(ids or ()) for ids in values])


def _whole_hashes(table: Table, column: str, known: TraceColumns, prompts: Ints, hashes: Column) -> Column:
    """Returns the ids of each row's whole parts. The last id is dropped if its part is not whole: a longer prompt has another id there.

    Refuses rows with more or fewer ids than the prompt has parts. A last part that is not whole may have an id.
    """
    counts, size = np.fromiter(map(len, hashes), np.int64, len(hashes)), known.hashed
    fits = (counts >= prompts // size) & (counts <= -(-prompts // size))
    given = [ids is not None for ids in table.columns[column]]
    table.refuse(given & ~fits, column, f"must have an id for each {size} tokens of {known.prompt}")
    whole = [ids[: prompt // size] for ids, prompt in zip(hashes, prompts.tolist(), strict=True)]
    if known.chained:
        _refuse_other_beginnings(table, column, whole)
    return _objects(whole)


def _refuse_other_beginnings(table: Table, column: str, hashes: Sequence[tuple[int, ...]]) -> None:
    """Raises WorkloadError if an id follows another id, or begins a prompt, where it does not in an earlier row: naming both rows."""
    before = dict[int, int]()  # -1: none
    for row, ids in enumerate(hashes):
        for previous, id_ in zip((-1, *ids), ids, strict=False):
            if before.setdefault(id_, previous) != previous:
                first = next(line for line, earlier in zip(table.lines, hashes, strict=True) if id_ in earlier)
                problem = f"{column}: id {id_} has other ids before it than in line {first}"
                raise at_line(
                    table.path, table.lines[row], f"{problem}; equal ids mean equal beginnings: correct one of them"
                )


_READERS: Mapping[str, Callable[[Table, str], Column]] = {
    "client": _texts,
    "session": _texts,
    "tier": _texts,
    "priority": _whole,
    "predicted_new_tokens": partial(_whole, least=1),
    "timeout": _seconds,
    "prefix_hashes": _hashes,
}
"""Readers by the field of `RequestSpec` that a column may fill."""


def _objects(values: list[Any]) -> Column:
    return np.fromiter(values, object, len(values))
