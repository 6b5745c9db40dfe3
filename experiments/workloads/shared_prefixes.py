"""Requests whose prompts begin alike: groups with a common prefix, and conversations that grow turn by turn."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from cbatch.validation import not_negative, whole
from experiments.workloads.base import MOST_REQUESTS
from experiments.workloads.lengths import LONGEST
from experiments.workloads.open_loop import DrawnRequests
from experiments.workloads.seeds import Stream, generator
from experiments.workloads.trace import Trace

_Tokens = Annotated[int, whole(1, LONGEST)]


@dataclass(frozen=True, kw_only=True, repr=False)
class PrefixGroups(DrawnRequests):
    """Each request belongs to a group drawn at random; the requests of a group share the first `prefix` tokens of their prompts.

    lengths: of what follows in the prompt, and of the output.
    """

    groups: Annotated[int, whole(1, MOST_REQUESTS)] = 32
    prefix: _Tokens = 2048

    def trace(self) -> Trace:
        prompts, outputs = self.lengths.draw(generator(self.seed, Stream.LENGTHS), self.num_requests)
        groups = generator(self.seed, Stream.GROUPS).integers(self.groups, size=self.num_requests)
        ids = [(group,) for group in groups.tolist()]
        return Trace(
            source="prefix groups",
            prompt_tokens=self.prefix + prompts,
            output_tokens=outputs,
            arrival_time=self.arrivals.times(generator(self.seed, Stream.ARRIVALS), self.num_requests),
            fields={"prefix_hashes": np.fromiter(ids, object, len(ids)), "hash_block": np.full(len(ids), self.prefix)},
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Chat(DrawnRequests):
    """Conversations of `turns` requests. A turn's prompt is the system prompt, all turns and answers before, and new tokens.

    An open loop: a turn comes `pause` seconds, on average, after the turn before came, whether that has been answered or not.
    With real tokens the answers within prompts are drawn, and differ from the model's.

    arrivals: of conversations. lengths: of a turn's new tokens, and of its answer.
    system: tokens of the prompt that all conversations share; 0: none. pause: seconds, exponentially distributed.
    """

    turns: Annotated[int, whole(1, MOST_REQUESTS)] = 8
    system: Annotated[int, whole(0, LONGEST)] = 1024
    pause: Annotated[float, not_negative("seconds")] = 10.0

    def trace(self) -> Trace:
        num_chats = -(-self.num_requests // self.turns)
        shape = num_chats, self.turns
        new, answers = (
            column.reshape(shape)
            for column in self.lengths.draw(generator(self.seed, Stream.LENGTHS), num_chats * self.turns)
        )
        before = np.cumsum(new + answers, axis=1) - new - answers
        numbers = generator(self.seed, Stream.ARRIVALS)
        starts = self.arrivals.times(numbers, num_chats)
        pauses = numbers.exponential(self.pause, shape)
        pauses[:, 0] = 0
        times = (starts[:, None] + np.cumsum(pauses, axis=1)).ravel()
        order = np.argsort(times, kind="stable")[: self.num_requests]
        chats = np.repeat(np.arange(num_chats), self.turns)[order]
        ids = [(0,) if self.system else ()] * len(order)
        return Trace(
            source="chat",
            prompt_tokens=(self.system + before + new).ravel()[order],
            output_tokens=answers.ravel()[order],
            arrival_time=times[order],
            fields={
                "session": chats.astype(str).astype(object),
                "conversation": chats.astype(object),
                "prefix_hashes": np.fromiter(ids, object, len(ids)),
                "hash_block": np.full(len(ids), self.system),
            },
        )
