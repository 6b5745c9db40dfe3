"""The stages of a simulated pipeline: when each computes which iteration, and what every idle second is owed to.

    stage 0  | iteration 0 | 1 |   2   | 3 |          An iteration enters a stage when it has arrived there and the stage
    stage 1   . . . . . . .| 0 | idle  | 1 | ...      has ended the one before. Stage 1 waits for iteration 1 above: a
                                                      bubble, for iteration 1 took longer in stage 0 than 0 did in stage 1.

An idle interval is cut into what the iteration that ends it went through in that time: it was computed in an earlier
stage, or was sent; before its launch the host was at work, or waited for the oldest iteration in flight, whose tokens it
needed; or there was no work for the stage at all. Waiting for another iteration is a bubble of one of three kinds
(SARATHI, arXiv 2308.16369, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from cbatch.cost import BatchShape
from cbatch.sim.cost import StageTimes


@dataclass(slots=True)
class StageAccount:
    """Seconds of one stage; they sum to its span.

    compute, communication: at work; all-reduces, and waiting for a message from the stage before.
    pb1: bubbles, prefill lengths differ between the iteration waited for and the one just ended.
    pb2: bubbles, one of the two holds prompt tokens and the other none.
    pb3: bubbles, they differ in their decodes or contexts, or the stages in what they compute beside their layers.
    host: nothing was launched, as the host was planning.
    no_work: too few requests to fill the pipeline, its filling and its draining.
    """

    compute: float = 0.0
    communication: float = 0.0
    pb1: float = 0.0
    pb2: float = 0.0
    pb3: float = 0.0
    host: float = 0.0
    no_work: float = 0.0

    @property
    def bubbles(self) -> float:
        return self.pb1 + self.pb2 + self.pb3

    @property
    def span(self) -> float:
        return self.compute + self.communication + self.bubbles + self.host + self.no_work


class Why(Enum):
    """What the host or an iteration was doing."""

    COMPUTED = 0  # it was computed, here or elsewhere: who waits for it sits in a bubble
    SENT = 1
    HOST = 2
    NO_WORK = 3


class Doing(NamedTuple):
    """`shape`: of the iteration that was computed."""

    begin: float
    end: float
    why: Why
    shape: BatchShape


class Span(NamedTuple):
    """When an iteration was computed, in virtual seconds: its start in the first stage, its end in the last.

    shape: what it was. bubbles: seconds that stages waited for it, of all three kinds, summed over the stages.
    """

    started: float
    ended: float
    shape: BatchShape
    bubbles: float


class Stages:
    """The calendars of the stages, and their accounts. Its owner tells it what the host does between two launches."""

    def __init__(self, num_stages: int) -> None:
        self.accounts = [StageAccount() for _ in range(num_stages)]
        self._free_at = [0.0] * num_stages
        self._previous: BatchShape | None = None  # the iteration before, in every stage
        self._trail: list[Doing] = []  # since the launch before

    def host_was(self, begin: float, end: float, why: Why, shape: BatchShape = BatchShape()) -> None:  # noqa: B008
        """What the host did before it launches the next iteration; `shape` is the iteration that it waited for."""
        self._trail.append(Doing(begin, end, why, shape))

    def launch(
        self, now: float, shape: BatchShape, times: StageTimes, *, full: bool = True, carried_from: Span | None = None
    ) -> Span:
        """Send an iteration through all stages.

        Args:
            full: whether as many iterations are under way as there are stages; if not, a stage that waits has no work.
            carried_from: the iteration whose sampled tokens are inputs of this one; it cannot start before they are there.
        """
        computed = Why.COMPUTED if full else Why.NO_WORK
        arrived, work = now, times.compute + times.communication
        if carried_from is not None and carried_from.ended > now:
            arrived = carried_from.ended
            self._trail.append(Doing(now, arrived, computed, carried_from.shape))
        last = len(self.accounts) - 1
        started = bubbles = 0.0
        for stage, account in enumerate(self.accounts):
            begin = self._free_at[stage]
            if begin < arrived:
                bubbles += self._blame(account, begin, arrived)
                begin = arrived
            if stage == 0:
                started, end = begin, begin + work + times.embedding
            else:
                end = begin + work
            if stage == last:
                end += times.head
            account.communication += times.communication
            account.compute += end - begin - times.communication
            self._free_at[stage] = end
            if stage < last:
                arrived = end + times.transfers[stage]
                self._trail += (Doing(begin, end, computed, shape), Doing(end, arrived, Why.SENT, shape))
        self._trail.clear()
        self._previous = shape
        return Span(started, end, shape, bubbles)

    def closed(self) -> list[StageAccount]:
        """The accounts up to the end of the last iteration in the last stage."""
        end = self._free_at[-1]
        return [
            replace(account, no_work=account.no_work + end - free_at)
            for account, free_at in zip(self.accounts, self._free_at, strict=True)
        ]

    def _blame(self, account: StageAccount, begin: float, end: float) -> float:
        """Book a stage's idle interval; return the seconds of it that are bubbles."""
        bubbles = 0.0
        for doing in reversed(self._trail):
            if doing.end <= begin:
                break
            seconds = min(end, doing.end) - max(begin, doing.begin)
            if seconds <= 0:
                continue
            end = max(begin, doing.begin)
            if doing.why is Why.SENT:
                account.communication += seconds
            elif doing.why is Why.HOST:
                account.host += seconds
            elif doing.why is Why.NO_WORK or self._previous is None:
                account.no_work += seconds
            else:
                kind = bubble_kind(doing.shape, self._previous)
                setattr(account, kind, getattr(account, kind) + seconds)
                bubbles += seconds
        account.no_work += end - begin  # before anything was launched
        return bubbles


def bubble_kind(waited_for: BatchShape, before: BatchShape) -> str:
    """The field of `StageAccount` for a stage that has ended one iteration and waits for another."""
    prompt, prompt_before = (sum(tokens for tokens, _ in shape.chunks) for shape in (waited_for, before))
    if (prompt > 0) != (prompt_before > 0):
        return "pb2"
    return "pb3" if prompt == prompt_before else "pb1"
