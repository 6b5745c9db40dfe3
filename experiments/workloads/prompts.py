"""Prompts of one's own, from a JSONL file: text or token ids, a request a line."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cbatch.errors import WorkloadError
from cbatch.request import Request
from cbatch.request_spec import Sampling
from experiments.workloads.base import Vocabulary, Workload
from experiments.workloads.checks import check_whole
from experiments.workloads.readers import fields
from experiments.workloads.readers.source import TextFile, read_lines
from experiments.workloads.readers.table import convert, json_objects

_KEYS: dict[str, Callable[[object], Any]] = {
    "prompt": fields.text,
    "token_ids": fields.token_ids,
    "max_new_tokens": fields.token_count,
    "arrival_time": fields.not_negative,
    "temperature": fields.not_negative,
    "top_k": fields.top_k,
    "top_p": fields.top_p,
    "priority": fields.whole_number,
    "client": fields.text,
}
_SAMPLING_KEYS = ("temperature", "top_k", "top_p")


@dataclass(frozen=True, kw_only=True)
class PromptFile(Workload):
    """The requests of a JSONL file (plain or .gz), in its order.

    Each line is an object with either `prompt` (text) or `token_ids`, and optionally `max_new_tokens`, `arrival_time`
    (seconds from the start of the run, never decreasing, default 0), `temperature`, `top_k`, `top_p`, `priority`
    and `client`. Text needs a model with a tokenizer; token ids also run in simulation, where their number is all
    that counts.

    Fields:
        num_requests: the first so many lines; None takes all.
        max_new_tokens: for lines that do not say.
    """

    path: str
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("max_new_tokens", self.max_new_tokens, 1)

    def requests(self, vocabulary: Vocabulary | None) -> list[Request]:
        file = read_lines(self.path)
        records = _records(file)
        num = len(records) if self.num_requests is None else self.num_requests
        if num > len(records):
            raise WorkloadError(f"{file.name}: has {len(records)} prompts, workload.num_requests={num}: ask for fewer")
        stop_tokens = self._stop_tokens(vocabulary)
        samplings = self._samplings(num)
        return [
            self._request(file, row, record, vocabulary, samplings[row], stop_tokens)
            for row, record in enumerate(records[:num])
        ]

    def _request(
        self,
        file: TextFile,
        row: int,
        record: dict[str, Any],
        vocabulary: Vocabulary | None,
        sampling: Sampling,
        stop_tokens: tuple[int, ...],
    ) -> Request:
        prompt = _prompt(file, row + 1, record, vocabulary)
        return Request(
            row,
            len(prompt),
            record.get("max_new_tokens", self.max_new_tokens),
            arrival_time=record.get("arrival_time", 0.0),
            prompt=None if vocabulary is None else prompt,
            sampling=replace(sampling, **{key: record[key] for key in _SAMPLING_KEYS if key in record}),
            stop_tokens=stop_tokens,
            priority=record.get("priority", 0),
            client=record.get("client"),
        )


def _records(file: TextFile) -> list[dict[str, Any]]:
    """The file's lines with every value checked."""
    latest = 0.0
    records = []
    for line, record in enumerate(json_objects(file), start=1):
        for key, value in record.items():
            if key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0)
                raise file.fail(line, f"unknown key {key!r}: did you mean {near[0]!r}?")
            record[key] = convert(file, line, key, value, _KEYS[key])
        if ("prompt" in record) == ("token_ids" in record):
            raise file.fail(line, "give either prompt or token_ids")
        time = record.get("arrival_time", 0.0)
        if time < latest:
            raise file.fail(line, f"arrival_time {time:g} comes after {latest:g}: sort the lines by arrival_time")
        latest = time
        records.append(record)
    return records


def _prompt(file: TextFile, line: int, record: dict[str, Any], vocabulary: Vocabulary | None) -> list[int]:
    """The token ids of a line."""
    tokens: list[int]
    if "prompt" in record:
        if vocabulary is None:
            raise file.fail(
                line,
                "a simulation has no tokenizer for prompt text: give token_ids, "
                "or run with backend=cpu or backend=cuda",
            )
        tokens = vocabulary.encode(record["prompt"])
        if not tokens:
            raise file.fail(line, "the prompt has no tokens: give some text")
        return tokens
    tokens = record["token_ids"]
    if vocabulary is not None and max(tokens) >= vocabulary.size:
        raise file.fail(
            line, f"token id {max(tokens)} is not in the model's vocabulary: give ids from 0 to {vocabulary.size - 1}"
        )
    return tokens
