"""Speculation at recorded views: drafts have no values there, and a policy finds as many as were found in the run."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from cbatch.drafts import Drafter, Drafts, TableDrafts
from cbatch.executor import Tokens
from cbatch.replay.decisions import Decision
from cbatch.request import Request
from cbatch.request_table import RequestTable
from cbatch.survivals import Shares


def drafts_of(decision: Decision) -> dict[int, int]:
    """Returns the drafts of a recorded plan, by the request's id."""
    decoding = {*decision.seen.decoding}
    return {id_: count - 1 for id_, count in decision.decided.entries if count > 1 and id_ in decoding}


class Zeros(Drafter):
    """Stands for the drafter of a run."""

    def propose(self, tokens: Tokens, k: int) -> Tokens:
        return np.zeros(k, np.int32)


class ReplayedDrafts(Drafts):
    """Drafts of requests whose counters are those of the latest view.

    real: whether the run had real tokens.
    """

    def __init__(self, most: int, *, real: bool) -> None:
        self.most, self._real = most, real
        self._found, self._decoding = dict[int, int](), frozenset[int]()
        self._shares, self._rows = Shares(most), dict[int, int]()

    def look(self, decision: Decision) -> None:
        """Takes in the latest view."""
        self._found, self._decoding = drafts_of(decision), frozenset(decision.seen.decoding)

    def can_have(self, request: Request) -> bool:
        return request.id in self._decoding and request.num_known == request.num_tokens < request.max_tokens

    def granted(self, request: Request) -> int:
        return self.propose(request, self.most) if self.can_have(request) else 0

    def propose(self, request: Request, at_most: int) -> int:
        most = min(at_most, self.most, request.max_tokens - request.num_tokens - 1)
        return max(min(most, self._found.get(request.id, 0)) if self._real else most, 0)

    def survivals(self, request: Request) -> Sequence[float]:
        return self._shares.survivals(self._rows.get(request.id, -1), request.id)

    def note_outcomes(self, outcomes: Mapping[int, tuple[int, int]]) -> None:
        """Takes in the drafts of requests, by id, and how many of them were accepted."""
        ids = np.array([*outcomes], np.int64)
        rows = np.array([self._rows.setdefault(id_, len(self._rows)) for id_ in outcomes], np.int64)
        drafts, accepted = np.array([*outcomes.values()], np.int64).reshape(-1, 2).T
        self._shares.note(rows, ids, drafts, accepted)


class FoundDrafts(TableDrafts):
    """Drafts of a replay that carries out the recorded plans."""

    def __init__(self, table: RequestTable, decoding: Collection[Request], most: int, *, real: bool) -> None:
        """real: whether the run had real tokens. found: drafts in the recorded plan, by the request's id."""
        super().__init__(table, decoding, most, Zeros())
        self._real, self.found = real, dict[int, int]()

    def propose_each(self, requests: Sequence[Request], at_most: Sequence[int]) -> list[int]:
        pairs = zip(requests, at_most, strict=True)
        most = [min(k, self.found.get(request.id, 0)) for request, k in pairs] if self._real else at_most
        return super().propose_each(requests, most)
