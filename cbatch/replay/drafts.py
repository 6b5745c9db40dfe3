"""Speculation at recorded views."""

from collections.abc import Mapping, Sequence

import numpy as np

from cbatch.drafts import Drafter, Drafts, Shares
from cbatch.replay.decisions import Decision
from cbatch.request import Request


def drafts_of(decision: Decision) -> dict[int, int]:
    """Returns the drafts of a recorded plan, by the request's id."""
    decoding = {*decision.seen.decoding}
    return {id_: count - 1 for id_, count in decision.decided.entries if count > 1 and id_ in decoding}


class ReplayedDrafts(Drafts):
    """Drafts of requests whose counters are those of the latest view."""

    def __init__(self, most: int, drafter: Drafter, *, real: bool) -> None:
        """real: see `Recorded.real_tokens`; a policy then finds as many as the recorded plan had."""
        self.most, self._real, self._drafter = most, real, drafter
        self._found, self._decoding = dict[int, int](), frozenset[int]()
        self._shares, self._rows = Shares(most), dict[int, int]()

    def look(self, decision: Decision) -> None:
        """Takes in the latest view."""
        self._found, self._decoding = drafts_of(decision), frozenset(decision.seen.decoding)

    def can_have(self, request: Request) -> bool:
        return request.id in self._decoding and request.num_ready > 0

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
