"""The client's specification of a request: a frozen record that workloads make and that decision files and results keep unchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LATEST_ARRIVAL = 1e10
"""Seconds. Larger floats, such as time stamps in micro- or nanoseconds, cannot represent fractions of a token's time."""

LEAST_TEMPERATURE = 1e-5  # lower temperatures mean greedy, as in vLLM: clients send 1e-45 for 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are drawn.

    A `temperature` of 0, or below `LEAST_TEMPERATURE`, is greedy. `top_k` 0 and `top_p` 1 switch the filters off. Both filters apply
    to the tempered distribution, top-k first. A token's random number depends only on `seed` and the token's position, so a seed
    gives the same tokens in any batch, under any policy, sync or async.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"sampling out of range (temperature >= 0, top_k >= 0, 0 < top_p <= 1): {self}")


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of one request in seconds or None: arrival to first token, each gap between tokens, arrival to last token, and the mean gap."""

    ttft: float | None = None
    tbt: float | None = None
    total: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (limit := getattr(self, name)) is not None and not limit > 0:
                raise ValueError(f"{name}={limit:g}: objectives must be above 0 seconds")


NO_SLO = SLO()


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The client's specification of a request. The runtime reads none of the fields below `stop_tokens`.

    id: unique in the run. num_prompt_tokens: at least 1.
    max_new_tokens: the request ends when it has generated this many tokens; at least 1.
    true_new_tokens: tokens after which the request ends by itself, hidden from policies. The last token acts as an
        end-of-sequence token: its arrival on the host ends the request, and further tokens from iterations in flight are
        overshoot. None, or at least `max_new_tokens`: the limit ends the request.
    arrival_time: seconds from the start of the run.
    timeout: seconds from the arrival until the client leaves; an unfinished request is then cancelled before the next
        iteration is planned. None: the client stays.
    prompt: token ids; None if only lengths matter (simulation).
    stop_tokens: token ids that end the request, as the last token of the output.
    stop_strings: texts that end the request; the output's last token completes such a text. See `State.ends_text`.
    priority: higher is more urgent. tier: name of a service class. session: shared by the requests of a conversation.
    turn: number of the request within its session, from 0. last: whether no request of the session follows. None: unknown.
    pause: seconds from the end of the session's requests that this one follows to its arrival: a person thinks, or a tool runs.
    follows: ids of these requests. Empty: none, or unknown.
    predicted_new_tokens: a prediction of the output length, from any source.
    prefix_hashes: hashes of the prompt's blocks, each covering the prompt up to the end of its block (as in Mooncake's
        traces): two prompts with n equal leading hashes share n blocks.
    hash_block: tokens per hash; the last hash may cover fewer. 0: unknown.
    texts: what prompt and output consist of after the hashed tokens, where token values do not matter: numbers of texts, each with
        the position in the prompt at which it begins; the last one goes on through the output. Requests with the same text at the
        same position share it: a turn's prompt is the text of all turns and answers before. Empty: a text of its own.
    salt: requests share cached blocks only with requests of the same salt.
    extra: further attributes from the workload, by name.

    Raises ValueError if a length is below 1, the prompt has another length, there are more hashes than blocks in the prompt, the
    arrival is negative or after `LATEST_ARRIVAL`, or the timeout is not above 0.
    """

    id: int
    num_prompt_tokens: int
    max_new_tokens: int
    true_new_tokens: int | None = None
    arrival_time: float = 0.0
    timeout: float | None = None
    prompt: Sequence[int] | None = None
    sampling: Sampling = GREEDY
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    client: str | None = None
    session: str | None = None
    turn: int | None = None
    last: bool | None = None
    pause: float | None = None
    follows: tuple[int, ...] = ()
    tier: str | None = None
    priority: int = 0
    slo: SLO = NO_SLO
    predicted_new_tokens: int | None = None
    prefix_hashes: tuple[int, ...] = ()
    hash_block: int = 0
    texts: tuple[tuple[int, int], ...] = ()
    salt: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompt, output = self.num_prompt_tokens, self.max_new_tokens
        if prompt < 1 or output < 1:
            lengths = f"got {prompt} and {output}"
            raise ValueError(f"request {self.id}: prompt and output need at least 1 token each, {lengths}")
        if self.true_new_tokens is not None and self.true_new_tokens < 1:
            raise ValueError(f"request {self.id}: true_new_tokens={self.true_new_tokens} must be at least 1")
        if self.arrival_time < 0:
            raise ValueError(f"request {self.id}: arrival must not be negative")
        if not self.arrival_time <= LATEST_ARRIVAL:
            problem = f"arrival_time={self.arrival_time} is not in seconds from the start of the run"
            raise ValueError(f"request {self.id}: {problem}; subtract the time of the first request")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"request {self.id}: timeout={self.timeout} must be above 0 seconds")
        if self.prompt is not None and len(self.prompt) != prompt:
            problem = f"prompt has {len(self.prompt)} token{'s' * (len(self.prompt) != 1)}"
            raise ValueError(f"request {self.id}: {problem}, num_prompt_tokens says {prompt}")
        if self.hash_block and (len(self.prefix_hashes) - 1) * self.hash_block > prompt:
            problem = f"{len(self.prefix_hashes)} prefix_hashes of {self.hash_block} tokens each"
            raise ValueError(f"request {self.id}: {problem} are more than its {prompt} prompt tokens")
        if type(self.stop_tokens) is not tuple:
            object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))

    @property
    def max_tokens(self) -> int:
        """Returns the tokens of prompt and output at which the request ends by length."""
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def can_stop(self) -> bool:
        """Returns whether a generated token or text may end the request before its limit."""
        return bool(self.stop_tokens or self.stop_strings)

    @property
    def has_hidden_length(self) -> bool:
        """Returns whether the request ends before its limit, which policies do not know."""
        return self.true_new_tokens is not None and self.true_new_tokens < self.max_new_tokens
