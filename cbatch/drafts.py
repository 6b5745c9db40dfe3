"""Speculative decoding: drafts are guesses of a request's next tokens, which one iteration checks (Leviathan et al. 2211.17192).

    tokens of the request    known ... known | draft 1 | draft 2 | draft 3
    sampled by the iteration           token 1   token 2   token 3   token 4
                                       = draft 1 accepted; token 2 != draft 2: tokens 1 and 2 are received, drafts 2 and 3 rejected

A draft is accepted if it equals the token that the model samples at its place, at any temperature. The drafter is deterministic, so this
is rejection sampling: draft x is accepted with the model's probability p(x), and else the token is distributed as p without x. The random
number of a token depends on its position alone, so the tokens are those without drafts.
"""

from collections.abc import Callable, Collection, Sequence, Set
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from cbatch.errors import ConfigError
from cbatch.executor import Step, Tokens
from cbatch.request import FinishReason, Ints, Request
from cbatch.request_table import ONE, ZERO, RequestTable
from cbatch.survivals import Shares


class Drafter:
    """Proposes drafts; the base class proposes none. The same tokens must give the same drafts.

    max_drafts: most drafts of a request in an iteration. needs_tokens: whether it works with real tokens only.
    """

    max_drafts = 0
    needs_tokens = False

    def propose(self, tokens: Tokens, k: int) -> Tokens:
        """Returns at most `k` drafts. tokens: prompt and output of a request, int32 [known]."""
        return tokens[:0]

    def seconds(self, num_requests: int, k: int) -> float:
        """Returns the seconds that `k` drafts for each of `num_requests` take, before the iteration that checks them."""
        return 0.0


class NoDrafter(Drafter):
    name = "none"


class NgramDrafter(Drafter):
    """Proposes what followed the earliest occurrence of the longest matching end of the tokens (prompt look-up).

    The end has `max_n` tokens, or, if these occur nowhere before, fewer, down to `min_n`. This is the rule of vLLM's `ngram` method.
    `transformers` (`prompt_lookup_num_tokens`) has the same rule, but always tries ends down to a single token.

    Raises ConfigError unless max_drafts >= 1 and 1 <= min_n <= max_n.
    """

    name, needs_tokens = "ngram", True

    def __init__(self, max_drafts: int = 3, min_n: int = 5, max_n: int = 5) -> None:
        if max_drafts < 1:
            raise ConfigError(f"drafter.max_drafts={max_drafts} must be at least 1; or give drafter=none")
        if not 1 <= min_n <= max_n:
            raise ConfigError(f"drafter.min_n={min_n} must be at least 1, and at most drafter.max_n={max_n}")
        self.max_drafts, self.min_n, self.max_n = max_drafts, min_n, max_n

    def propose(self, tokens: Tokens, k: int) -> Tokens:
        size, number = tokens.itemsize, len(tokens)
        text = tokens.tobytes()
        for n in range(min(self.max_n, number - 1), self.min_n - 1, -1):
            end = text[-n * size :]
            place = text.find(end)
            while place % size:  # not at a token's begin
                place = text.find(end, place + 1)
            begin = place // size + n
            if begin < number:
                return tokens[begin : begin + k]
        return tokens[:0]


class Drafts:
    """What a policy sees of speculation, and the source of drafts. This class is for hosts without drafts.

    most: drafts of one request in one iteration, `Limits.max_drafts`.
    """

    most = 0
    counts = np.zeros((2, 0))
    """See `Shares.counts`."""

    def can_have(self, request: Request) -> bool:
        """Returns whether the request decodes and all its tokens are on the host, so that it can have drafts now."""
        return False

    def granted(self, request: Request) -> int:
        """Returns how many drafts a plan can give the request: in simulation as many as it can have, else as many as were proposed."""
        return 0

    def late(self, requests: Collection[Request]) -> Set[Request]:
        """Returns the requests that cannot have drafts now."""
        return {request for request in requests if not self.can_have(request)}

    def planned(self, requests: Sequence[Request], rows: Ints, surplus: Ints) -> Ints | None:
        """Returns the drafts of each request of a plan, at most those `granted`; None if no request has any.

        rows: in the table. surplus: planned tokens beyond those ready. [requests] each.
        """
        return None

    def propose_each(self, requests: Sequence[Request], at_most: Sequence[int]) -> list[int]:
        return [self.propose(request, most) for request, most in zip(requests, at_most, strict=True)]

    def propose(self, request: Request, at_most: int) -> int:
        """Finds drafts for a request that `can_have` them; returns their number."""
        return 0

    def survivals(self, request: Request) -> Sequence[float]:
        """Returns, for each place from 1 to `most`, the predicted probability that the request's draft there is accepted.

        It is a product over the places up to there: of the share of the drafts that were accepted among those whose predecessors were.
        Each share is a moving mean (weight 1/8), which begins as that of all requests of the run; the latter begins as 1.
        """
        return ()

    def seconds(self, num_requests: int, k: int) -> float:
        """Returns the predicted seconds of finding `k` drafts for each of `num_requests`."""
        return 0.0

    def note(self, rows: Ints, drafts: Ints, accepted: Ints) -> None:
        """Takes in outcomes, [requests] each."""


NO_DRAFTS = Drafts()


class TableDrafts(Drafts):
    """The drafts of an engine."""

    def __init__(
        self, table: RequestTable, decoding: Collection[Request], most: int, drafter: Drafter | None = None
    ) -> None:
        """drafter: None in simulation, where drafts have no values."""
        if table.tokens is not None and drafter is None:
            raise ConfigError(f"max_drafts={most} needs a drafter; set drafter=ngram, or max_drafts=0")
        self.most, self._table, self._decoding, self._drafter = most, table, decoding, drafter
        self._shares = Shares(most)

    def can_have(self, request: Request) -> bool:
        return request in self._decoding and bool(self._can_have(rows_of([request]))[0])

    def granted(self, request: Request) -> int:
        planned = self.planned([request], rows_of([request]), np.array([self.most]))
        return 0 if planned is None else int(planned[0])

    def late(self, requests: Collection[Request]) -> Set[Request]:
        late = ~self._can_have(rows_of(requests))
        return set(compress(requests, late.tolist())) if late.any() else frozenset()

    def _can_have(self, rows: Ints) -> NDArray[np.bool_]:
        """Returns `can_have` of decodes."""
        table = self._table
        known = table.known[rows]
        can: NDArray[np.bool_] = (table.drafts[rows] == ZERO) & (known == table.total[rows])
        return can & (known < table.limit[rows])

    def planned(self, requests: Sequence[Request], rows: Ints, surplus: Ints) -> Ints | None:
        if not (asked := surplus > ZERO).any():
            return None
        table, known = self._table, self._table.known[rows]
        asked &= self._can_have(rows) & (rows >= ZERO)
        asked[asked] = [requests[place] in self._decoding for place in asked.nonzero()[0].tolist()]
        most = np.minimum(table.limit[rows] - known - ONE, self.most)
        if table.tokens is not None:
            most = np.minimum(most, np.where(table.proposed_for[rows] == known, table.proposed[rows], 0))
        drafts: Ints = np.where(asked, np.minimum(surplus, most), 0)
        return drafts

    def propose(self, request: Request, at_most: int) -> int:
        return self.propose_each([request], [at_most])[0]

    def propose_each(self, requests: Sequence[Request], at_most: Sequence[int]) -> list[int]:
        table, rows = self._table, rows_of(requests)
        known = table.known[rows]
        numbers: list[int] = (
            np.minimum(np.minimum(at_most, self.most), table.limit[rows] - known - ONE).clip(0).tolist()
        )
        if table.tokens is None:
            return numbers
        assert self._drafter is not None
        for place, (row, begin) in enumerate(zip(rows.tolist(), known.tolist(), strict=True)):
            tokens = table.tokens[row]
            drafts = self._drafter.propose(tokens[:begin], numbers[place])[: numbers[place]]
            numbers[place] = len(drafts)
            tokens[begin : begin + len(drafts)] = drafts
        table.proposed[rows], table.proposed_for[rows] = numbers, known
        return numbers

    def survivals(self, request: Request) -> Sequence[float]:
        return self._shares.survivals(request._row, request.id)

    @property
    def counts(self) -> NDArray[np.float64]:  # type: ignore[override]
        return self._shares.counts

    def seconds(self, num_requests: int, k: int) -> float:
        return 0.0 if self._drafter is None else self._drafter.seconds(num_requests, k)

    def note(self, rows: Ints, drafts: Ints, accepted: Ints) -> None:
        self._shares.note(rows, self._table.id[rows], drafts, accepted)


def rows_of(requests: Collection[Request]) -> Ints:
    return np.fromiter((request._row for request in requests), np.int64, len(requests))


def is_stop(request: Request, token: int, ends_text: Callable[[Request, int], bool]) -> bool:
    """Returns whether a token ends the request. ends_text: see `State`."""
    return token in request.stop_tokens or (bool(request.stop_strings) and ends_text(request, token))


def expect(step: Step) -> tuple[Ints, Ints]:
    """Enters a launched step's drafts in the table. Returns the places that sample without drafts, and their requests' total tokens."""
    table, rows, drafts = step.table, step.rows, step.drafts
    assert drafts is not None
    table.drafts[rows] = drafts
    table.num_drafting += int(np.count_nonzero(drafts))
    table.total[rows] += drafts
    table.sampled_row[rows[step.sampled]] = step.first_rows[step.sampled]
    places = step.sampled[drafts[step.sampled] == ZERO]
    return places, table.total[rows[places]]


def settle(
    policy_drafts: Drafts,
    step: Step,
    places: Ints,
    tokens: Tokens | None,
    accepted: Ints | None,
    ends_text: Callable[[Request, int], bool],
) -> tuple[Ints, dict[Request, FinishReason]]:
    """Gives requests the tokens that a step with drafts has sampled, and takes back what their counters held for rejected drafts.

    What rejected drafts wrote to the KV cache is overwritten by the tokens that take their positions; the blocks remain with the request.

    places: of the requests that receive tokens. tokens, accepted: see `StepResult`; if both are None, no draft is accepted.
    Returns how many tokens each request receives, [places], and the requests that end there by a token or at their limit.
    """
    table, drafts = step.table, step.drafts
    assert drafts is not None
    table.num_drafting -= int(np.count_nonzero(drafts))
    table.drafts[step.rows] = 0
    rows, drafts = step.rows[places], drafts[places]
    known, first = table.known[rows], step.first_rows[places]
    numbers = np.zeros_like(drafts) if accepted is None else np.minimum(accepted[places], drafts)
    if tokens is not None and table.tokens is not None:
        numbers = _num_equal(table.tokens, rows, known, drafts, tokens, first)
    counts = numbers + ONE
    if table.has_hidden_lengths:
        stop = table.stop[rows]
        counts = np.where(stop > ZERO, np.minimum(counts, stop - known), counts)
    done: dict[Request, FinishReason] = {}
    if tokens is not None:
        for index in table.can_stop[rows].nonzero()[0].tolist():
            request, begin = step.requests[places[index]], first.item(index)
            for place, token in enumerate(tokens[begin : begin + counts.item(index)].tolist()):
                if is_stop(request, token, ends_text):
                    counts[index], done[request] = place + 1, FinishReason.STOP
                    break
        if table.tokens is not None:
            after = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
            table.tokens[rows.repeat(counts), known.repeat(counts) + after] = tokens[first.repeat(counts) + after]
    too_many = drafts + ONE - counts
    table.known[rows] = known = known + counts
    table.total[rows] -= too_many
    table.computed[rows] = np.maximum(table.computed[rows] - too_many, ZERO)  # 0 if the request was preempted in flight
    for place in places[(known >= table.limit[rows]) & (drafts > ZERO)].tolist():
        done.setdefault(step.requests[place], FinishReason.LENGTH)
    ended = (known >= table.limit[rows]) | (known == table.stop[rows])
    if done:
        ended |= [step.requests[place] in done for place in places.tolist()]
    goes_on = (drafts > ZERO) & ~ended  # a draft after the end would count as rejected
    policy_drafts.note(rows[goes_on], drafts[goes_on], numbers[goes_on])
    return counts, done


def _num_equal(drafted: Tokens, rows: Ints, known: Ints, drafts: Ints, tokens: Tokens, first: Ints) -> Ints:
    """Returns how many leading drafts of each request equal the sampled tokens. first: the requests' first places in `tokens`."""
    after = np.arange(drafts.max(initial=0))
    sampled = tokens[np.minimum(first[:, None] + after, len(tokens) - 1)]
    proposed = drafted[rows[:, None], np.minimum(known[:, None] + after, drafted.shape[1] - 1)]
    equal = (sampled == proposed) & (after < drafts[:, None])
    numbers: Ints = np.minimum.accumulate(equal, 1).sum(1)
    return numbers
