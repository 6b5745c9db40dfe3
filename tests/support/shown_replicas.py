"""Replicas as states to show to a router, and prompts as letters of one block each."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from cbatch import Request
from cbatch.cluster import Role

COUNTERS = (
    "num_unfinished",
    "num_waiting",
    "num_running",
    "outstanding_tokens",
    "kv_use",
    "kv_committed",
    "prompt_tokens_left",
)


class Shown(list[Any]):
    now, stage = 0.0, Role.PREFILL

    def __init__(self, replicas: Iterable[Any]) -> None:
        super().__init__(replicas)
        for life, each in enumerate(self):
            each.life = life

    def fitting(self, request: Request) -> list[int]:
        return list(range(len(self)))


def letters(request: Request) -> list[str]:
    """Returns all prefixes, as a block's hash names all blocks before it."""
    return [request.extra["text"][: end + 1] for end in range(len(request.extra["text"]))]


def replica(block_size: int = 1, cached: int = 0, left: Iterable[tuple[int, int]] = (), **facts: Any) -> Any:
    """left: prompt tokens not computed, by request. blocks: of prompts, with this one; cost: a second per token."""
    blocks, facts = facts.pop("blocks", 0), dict.fromkeys(COUNTERS, 0) | {"role": Role.BOTH} | facts
    return SimpleNamespace(
        block_size=block_size,
        cached_tokens=lambda request: cached,
        prompts_left=lambda: [(SimpleNamespace(id=id_), tokens) for id_, tokens in left],
        predicted_wait=sum(tokens for _, tokens in left),
        prompt_blocks_with=lambda request: blocks,
        prefill_seconds=lambda request, tokens: float(tokens),
        block_hashes=letters,
        **facts,
    )


def loads(*numbers: int, **facts: Any) -> Any:
    return Shown(replica(num_unfinished=number, **facts) for number in numbers)


def prompt(text: str, id_: int = 0, **fields: Any) -> Request:
    return Request(id_, len(text), 5, extra={"text": text}, **fields)


ASKED = prompt("abcdefghij")
