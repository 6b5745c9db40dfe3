"""Speculative decoding: drafts are guesses of a request's next tokens, which one iteration checks (Leviathan et al. 2211.17192).

    tokens of the request    known ... known | draft 1 | draft 2 | draft 3
    sampled by the iteration           token 1   token 2   token 3   token 4
                                       = draft 1 accepted; token 2 != draft 2: tokens 1 and 2 are received, drafts 2 and 3 rejected

A draft is accepted if it equals the token that the model samples at its place, at any temperature. The drafter is deterministic, so this
is rejection sampling: draft x is accepted with the model's probability p(x), and else the token is distributed as p without x. The random
number of a token depends on its position alone, so the tokens are those without drafts.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.errors import ConfigError, PolicyError, call
from cbatch.executor import Tokens
from cbatch.model import ModelSpec
from cbatch.request import NEVER, Ints, Request
from cbatch.request_table import ONE, ZERO, RequestTable

NO_DRAFT = -1  # in place of a draft that was not found; it is never accepted


class Drafter:
    """Proposes drafts; the base class proposes none. The same tokens must give the same drafts.

    max_drafts: most drafts of a request in an iteration. needs_tokens: whether it works with real tokens only. model: the shape of a draft model.

    Real drafts are made on the device, as part of the iteration that checks them: the host does not know the newest tokens yet when it plans
    that iteration. A GPU calls `propose_each` alone.
    """

    max_drafts = 0
    needs_tokens = False
    model: ModelSpec | None = None

    def propose(self, tokens: Tokens, k: int) -> Tokens:
        """Returns at most `k` drafts. tokens: prompt and output of a request, int32 [known]."""
        return tokens[:0]

    def propose_each(self, texts: Any, lengths: Any, k: int) -> Any:
        """Returns drafts for several requests, an int32 tensor [requests, k] with `NO_DRAFT` where there is none.

        On a GPU the operations are captured in a graph: shapes are fixed, and nothing is read from the device. This default, for a CPU, calls
        `propose` for each request.

        texts: int32 tensor [requests, width], on the device; prompt and output, undefined beyond `lengths`, int32 [requests], which may be 0.
        """
        name, drafts = f"drafter {type(self).__name__}", texts.new_full((len(texts), k), NO_DRAFT)
        for row, (text, length) in enumerate(zip(texts.numpy(), lengths.tolist(), strict=True)):
            if length:
                proposed = np.asarray(call(name, self.propose, text[:length], k))
                if proposed.ndim != 1 or len(proposed) > k or (proposed.size and proposed.dtype.kind not in "iu"):
                    problem = f"propose() returned {' '.join(repr(proposed).split())}"
                    raise PolicyError(f"{name}: {problem}; return an int32 array of at most {k} tokens")
                drafts[row, : len(proposed)] = texts.new_tensor(proposed.clip(-(2**31), 2**31 - 1))
        return drafts

    def seconds(self, num_requests: int, k: int) -> float:
        """Returns the seconds that `k` drafts for each of `num_requests` take, before the iteration that checks them, beyond those of `model`."""
        return 0.0


class NoDrafter(Drafter):
    name = "none"


class NgramDrafter(Drafter):
    """Proposes what followed the earliest occurrence of the longest matching end of the tokens (prompt look-up).

    The end has `max_n` tokens, or, if these occur nowhere before, fewer, down to `min_n`. This is the rule of vLLM's `ngram` method.
    `transformers` (`prompt_lookup_num_tokens`) has the same rule, but always tries ends down to a single token. On a GPU a kernel follows the
    same rule: `cbatch.runtime.fast.ngram_drafting`.

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


class ModelDrafter(Drafter):
    """Proposes the likeliest tokens of a smaller model with the same vocabulary: see `cbatch.runtime.draft_model`.

    The executor loads the model, whole, on each device of the first stage. Raises ConfigError unless max_drafts >= 1.
    """

    name, needs_tokens = "model", True

    def __init__(self, model: ModelSpec, max_drafts: int = 3) -> None:
        if max_drafts < 1:
            raise ConfigError(f"drafter.max_drafts={max_drafts} must be at least 1; or give drafter=none")
        self.model, self.max_drafts = model, max_drafts


def draft_model(drafter: Drafter | None, spec: ModelSpec) -> ModelSpec | None:
    """Returns the shape of the draft model; None without one. Raises ConfigError if its vocabulary is not that of `spec`."""
    draft = None if drafter is None else drafter.model
    if draft is not None and draft.vocab_size != spec.vocab_size:
        sizes = f"has {draft.vocab_size} tokens, but model={spec.name} has {spec.vocab_size}"
        problem = f"the vocabulary of {draft.name} {sizes}"
        raise ConfigError(f"drafter=model: {problem}; choose a model of the same vocabulary")
    return draft


WEIGHT = 0.125  # weight of the latest outcome in a request's moving means


class Shares:
    """The moving means of `Drafts.survivals`. A request has a row, which a later request may take over.

    The means of the run are quotients, by place: of the drafts accepted, and of those whose predecessors were; each count begins as 1.
    """

    def __init__(self, most: int) -> None:
        self._run = np.ones((2, most))
        self._of_rows, self._owners = np.ones((0, most)), np.zeros(0, np.int64)

    @property
    def counts(self) -> NDArray[np.float64]:
        """Returns the drafts of the run that were accepted, and those whose predecessors were, [2, places]."""
        return self._run - 1

    def survivals(self, row: int, id_: int) -> list[float]:
        known = 0 <= row < len(self._owners) and self._owners.item(row) == id_
        shares = self._of_rows[row] if known else self._run[0] / self._run[1]
        survivals: list[float] = shares.cumprod().tolist()
        return survivals

    def note(self, rows: Ints, ids: Ints, drafts: Ints, accepted: Ints) -> None:
        """Takes in outcomes, [requests] each."""
        if (more := int(rows.max(initial=-1)) + 1 - len(self._owners)) > 0:
            self._owners = np.append(self._owners, np.full(more, NEVER))
            self._of_rows = np.concatenate([self._of_rows, np.ones((more, self._run.shape[1]))])
        new = rows[self._owners[rows] != ids]
        self._of_rows[new], self._owners[rows] = self._run[0] / self._run[1], ids
        places = np.arange(self._run.shape[1])
        tried = (places < drafts[:, None]) & (places <= accepted[:, None])  # a draft after a rejected one was not tried
        succeeded = places < accepted[:, None]
        self._of_rows[rows] += WEIGHT * tried * (succeeded - self._of_rows[rows])
        self._run += (succeeded & tried).sum(0), tried.sum(0)


class Drafts:
    """What a policy sees of speculation, and the source of drafts. This class is for hosts without drafts.

    most: drafts of one request in one iteration, `Limits.max_drafts`. asked: the most that a plan has asked for.
    """

    most = asked = 0
    _shares, _drafter = Shares(0), Drafter()

    @property
    def counts(self) -> NDArray[np.float64]:
        """See `Shares.counts`."""
        return self._shares.counts

    def can_have(self, request: Request) -> bool:
        """Returns whether the request decodes and its newest token can be computed, so that it can have drafts now."""
        return False

    def propose(self, request: Request, at_most: int) -> int:
        """Returns how many drafts a plan can give a decode: at most as many tokens as the request may still generate, but one."""
        return 0

    def granted(self, request: Request) -> int:
        """Returns the most drafts that a plan can give the request."""
        return self.propose(request, self.most) if self.can_have(request) else 0

    def planned(self, requests: Sequence[Request], rows: Ints, surplus: Ints) -> Ints | None:
        """Returns the drafts of each request of a plan, at most those `granted`; None if there are none, nor any in flight.

        rows: in the table. surplus: planned tokens beyond those ready. [requests] each.
        """
        return None

    def survivals(self, request: Request) -> Sequence[float]:
        """Returns, for each place from 1 to `most`, the predicted probability that the request's draft there is accepted.

        It is a product over the places up to there: of the share of the drafts that were accepted among those whose predecessors were.
        Each share is a moving mean (weight 1/8), which begins as that of all requests of the run; the latter begins as 1.
        """
        return self._shares.survivals(request._row, request.id)

    def seconds(self, num_requests: int, k: int) -> float:
        """Returns the predicted seconds of finding `k` drafts for each of `num_requests`, but 0 of a draft model, whose passes are part of `view.cost`."""
        return self._drafter.seconds(num_requests, k)

    def note(self, rows: Ints, drafts: Ints, accepted: Ints) -> None:
        """Takes in outcomes, [requests] each."""


NO_DRAFTS = Drafts()


class TableDrafts(Drafts):
    """The drafts of an engine."""

    def __init__(
        self, table: RequestTable, decoding: Collection[Request], most: int, drafter: Drafter | None = None
    ) -> None:
        """drafter: predicts the seconds of drafting; None: it takes none."""
        self.most, self._table, self._decoding = most, table, decoding
        self._shares, self._drafter = Shares(most), drafter or self._drafter

    def can_have(self, request: Request) -> bool:
        return request in self._decoding and request.num_ready > 0

    def propose(self, request: Request, at_most: int) -> int:
        left = self._table.limit.item(request._row) - self._table.total.item(request._row)
        return max(min(at_most, self.most, left - 1), 0)

    def planned(self, requests: Sequence[Request], rows: Ints, surplus: Ints) -> Ints | None:
        asked = surplus > ZERO
        if not (asked.any() or self._table.num_drafting):
            return None
        asked[asked] = [requests[place] in self._decoding for place in asked.nonzero()[0].tolist()]
        most = np.minimum(self._table.limit[rows] - self._table.total[rows] - ONE, self.most)
        drafts: Ints = np.where(asked, np.minimum(surplus, most), 0)
        return drafts

    def note(self, rows: Ints, drafts: Ints, accepted: Ints) -> None:
        self._shares.note(rows, self._table.id[rows], drafts, accepted)


def drafter_of(executor: Any) -> Drafter | None:
    """Returns the drafter that an executor was built with. Raises ConfigError if it computes real tokens without one."""
    drafter: Drafter | None = getattr(executor, "drafter", None)
    if executor.needs_tokens and drafter is None:
        raise ConfigError("max_drafts > 0, but the executor has no drafter; build it with Options(drafter=...)")
    return drafter


def rows_of(requests: Collection[Request]) -> Ints:
    return np.fromiter((request._row for request in requests), np.int64, len(requests))
