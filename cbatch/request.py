"""A request: what its client asked for, and how far it has come.

The counters of an admitted request live in a row of a `RequestTable`, and a `Request` reads its own row.

Knows nothing of tensors, policies or executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cbatch.request_table import NEVER, RequestTable


class Status(Enum):
    PENDING = "pending"  # has not arrived yet
    WAITING = "waiting"  # arrived, or preempted; holds no KV blocks
    RUNNING = "running"  # admitted
    FINISHED = "finished"


class FinishReason(Enum):
    LENGTH = "length"  # max_new_tokens generated
    STOP = "stop"  # an end-of-sequence token was generated
    REJECTED = "rejected"  # by the policy; the reason is in `Request.reject_reason`


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are drawn.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch the two filters off; both apply to the tempered
    distribution, top-k first. The random number of a token depends on `seed` and the token's position only, so the
    same seed gives the same tokens in any batch, under any policy, sync or async.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"sampling out of range (temperature >= 0, top_k >= 0, 0 < top_p <= 1): {self}")


GREEDY = Sampling()


class Request:
    """One request of a workload.

    What was asked for is set by the workload and never changes. `priority`, `client`, `deadline` (seconds, absolute)
    and `predicted_new_tokens` are for policies; the framework itself never reads them.
    """

    __slots__ = (
        "__weakref__",
        "admitted_at",
        "arrival_iteration",
        "arrival_time",
        "client",
        "deadline",
        "finish_reason",
        "finished_at",
        "id",
        "max_new_tokens",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "output",
        "predicted_new_tokens",
        "priority",
        "prompt",
        "reject_reason",
        "row",
        "sampling",
        "status",
        "stop_tokens",
        "table",
    )

    def __init__(
        self,
        id: int,
        num_prompt_tokens: int,
        max_new_tokens: int,
        *,
        arrival_time: float = 0.0,
        arrival_iteration: int = 0,
        prompt: Sequence[int] | None = None,
        sampling: Sampling = GREEDY,
        stop_tokens: Sequence[int] = (),
        priority: int = 0,
        client: str | None = None,
        deadline: float | None = None,
        predicted_new_tokens: int | None = None,
    ) -> None:
        """
        Args:
            id: unique in the run.
            num_prompt_tokens: at least 1.
            max_new_tokens: tokens to generate unless an end-of-sequence token comes first; at least 1.
            arrival_time: seconds from the start of the run.
            arrival_iteration: the request arrives no earlier than this iteration of the engine (a stagger that does not
                depend on the hardware's speed). If nothing else is left to run, it arrives at once.
            prompt: token ids; None where only lengths matter (simulation).
            stop_tokens: token ids that end the request; the stop token itself is the last token of the output.

        Raises:
            ValueError: a length below 1, a negative arrival, or a prompt that is not num_prompt_tokens long.
        """
        if num_prompt_tokens < 1 or max_new_tokens < 1:
            raise ValueError(
                f"request {id}: prompt and output need at least 1 token each, "
                f"got {num_prompt_tokens} and {max_new_tokens}"
            )
        if arrival_time < 0 or arrival_iteration < 0:
            raise ValueError(f"request {id}: arrival must not be negative")
        if prompt is not None and len(prompt) != num_prompt_tokens:
            raise ValueError(
                f"request {id}: prompt has {len(prompt)} tokens, num_prompt_tokens says {num_prompt_tokens}"
            )
        self.id = id
        self.num_prompt_tokens = num_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.arrival_time = arrival_time
        self.arrival_iteration = arrival_iteration
        self.prompt = prompt
        self.sampling = sampling
        self.stop_tokens = tuple(stop_tokens)
        self.priority = priority
        self.client = client
        self.deadline = deadline
        self.predicted_new_tokens = predicted_new_tokens

        self.status = Status.PENDING
        self.finish_reason: FinishReason | None = None
        self.reject_reason = ""
        self.table: RequestTable | None = None
        self.row = NEVER
        self.output: list[int] = []  # token ids; filled when the request ends, empty in simulation
        self.num_output_tokens = 0  # set when the request ends
        self.admitted_at: float | None = None  # seconds; first admission
        self.finished_at: float | None = None  # seconds
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and output at which the request ends by length."""
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def num_known(self) -> int:
        """Prompt tokens plus the generated tokens whose values the host has."""
        if self.table is None:
            return self.num_prompt_tokens + self.num_output_tokens
        return self.table.known.item(self.row)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens plus generated tokens, those that iterations in flight generate counted."""
        if self.table is None:
            return self.num_prompt_tokens + self.num_output_tokens
        return self.table.total.item(self.row)

    @property
    def num_new_tokens(self) -> int:
        """Generated tokens, those in flight counted."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the KV cache, those in flight counted."""
        return 0 if self.table is None else self.table.computed.item(self.row)

    @property
    def num_ready(self) -> int:
        """Tokens that could be computed in the next iteration: see `RequestTable.ready`."""
        if self.status is Status.FINISHED:
            return 0
        if self.table is None:
            return self.num_prompt_tokens
        return self.table.ready_of(self.row)

    def __repr__(self) -> str:
        return (
            f"Request({self.id}: {self.num_prompt_tokens}+{self.max_new_tokens} tokens, {self.status.value}, "
            f"{self.num_computed} of {self.num_tokens} computed)"
        )
