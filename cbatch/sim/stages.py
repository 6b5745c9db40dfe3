"""The stages of a simulated pipeline: when each stage computes an iteration, and the cause of every idle second.

    stage 0  | iteration 0 | 1 |   2   | 3 |        An iteration starts in a stage once it has arrived and the stage has
    stage 1   . . . . . . .| 0 | idle  | 1 | ...    finished the previous one. Above, stage 1 waits for iteration 1,
                                                    which takes longer in stage 0 than iteration 0 in stage 1: a bubble.

An idle interval is divided by the history of the iteration that ends the interval. The iteration was computed in an earlier
stage, or sent; before its launch the host was busy, or waited for the tokens of the oldest iteration in flight; or the stage
had no work. Waiting for another iteration is a bubble of one of three kinds (SARATHI, arXiv 2308.16369, 3.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from cbatch.cost import BatchShape
from cbatch.executor import BlockCopies
from cbatch.request import Ints
from cbatch.sim.times import StageTimes


@dataclass(slots=True)
class StageAccount:
    """Seconds of one stage by cause; the seconds sum to the stage's span.

    compute: operations. communication: all-reduces, and waiting for a message from the previous stage.
    copies: waiting for KV blocks to be copied to host memory, and back, or from another replica.
    pb1: bubbles; prompt lengths differ between the awaited and the previous iteration.
    pb2: bubbles; only one of the two iterations has prompt tokens.
    pb3: bubbles; the two iterations differ in decodes or contexts, or the stages differ in embedding or head.
    host: no launch, since the host was planning.
    no_work: too few requests to fill the pipeline, including filling and draining.
    """

    compute: float = 0.0
    communication: float = 0.0
    copies: float = 0.0
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
        return self.compute + self.communication + self.copies + self.bubbles + self.host + self.no_work


class Cause(Enum):
    """Causes of an idle interval."""

    COMPUTE = 0  # an iteration was computed in any stage; waiting for it is a bubble
    SEND = 1
    HOST = 2
    NO_WORK = 3
    COPIES = 4


_HOST = Cause.HOST
Activity = tuple[float, float, Cause, BatchShape]
"""An interval of an iteration or of the host: begin, end, cause, and the batch of the computed iteration."""


class Span(NamedTuple):
    """When an iteration was computed, in virtual seconds: start in the first stage, end in the last stage.

    bubbles: seconds that stages waited for the iteration, summed over all three kinds and all stages.
    blocks: copies of KV blocks that came before. accepted: see `StepResult`.
    """

    started: float
    ended: float
    shape: BatchShape
    bubbles: float
    blocks: BlockCopies | None = None
    accepted: Ints | None = None


class Stages:
    """The calendars and accounts of the stages. The executor records the host's activities between two launches."""

    def __init__(self, num_stages: int, begin: float = 0.0) -> None:
        self.accounts = [StageAccount() for _ in range(num_stages)]
        self._free_at = [begin] * num_stages
        self._previous: BatchShape | None = None  # the previous iteration, in every stage
        self._trail: list[Activity] = []  # since the previous launch

    def record_host(self, begin: float, end: float, cause: Cause, shape: BatchShape = BatchShape()) -> None:  # noqa: B008
        """Records an activity of the host before the next launch. shape: batch of the iteration that the host waited for."""
        self._trail.append((begin, end, cause, shape))

    def launch(
        self,
        now: float,
        shape: BatchShape,
        times: StageTimes,
        *,
        saved: float = 0.0,
        full: bool = True,
        carried_from: Span | None = None,
        launched: float = 0.0,
    ) -> Span:
        """Sends an iteration through all stages.

        saved: seconds of `times.compute` that each stage saves.
        full: whether as many iterations are in flight as there are stages; otherwise a waiting stage has no work.
        carried_from: iteration whose sampled tokens are inputs of this iteration; the start waits for these tokens.
        launched: when the host has launched the iteration's last operation; the iteration cannot end earlier.
        """
        arrived = max(now, carried_from.ended) if carried_from else now
        work, spans = times.compute - saved + times.communication, list[tuple[float, float]]()
        for stage, transfer in enumerate((*times.transfers, 0.0)):
            begin = max(self._free_at[stage], arrived)
            end = begin + work + (times.embedding if stage == 0 else 0.0)
            if stage == len(times.transfers):
                end = max(end + times.head, launched)
            spans.append((begin, end))
            arrived = end + transfer
        return self.record(now, shape, spans, times.communication, full=full, carried_from=carried_from)

    def record(
        self,
        now: float,
        shape: BatchShape,
        spans: Sequence[tuple[float, float]],
        communication: float = 0.0,
        *,
        full: bool,
        carried_from: Span | None,
    ) -> Span:
        """Accounts for an iteration that was computed in all stages; other arguments as in `launch`.

        spans: begin and end in each stage. communication: seconds of all-reduces per stage.
        """
        computed, arrived = Cause.COMPUTE if full else Cause.NO_WORK, now
        if carried_from is not None and carried_from.ended > arrived:
            self._trail.append((arrived, carried_from.ended, computed, carried_from.shape))
            arrived = carried_from.ended
        bubbles = 0.0
        for stage, (account, (begin, end)) in enumerate(zip(self.accounts, spans, strict=True)):
            free_at = self._free_at[stage]
            if arrived < begin:  # real stages also wait for copies of inputs, events and peer stores
                self._trail.append((arrived, begin, Cause.SEND, shape))
            if free_at < begin:
                bubbles += self._account_idle(account, free_at, begin)
            account.communication += communication
            account.compute += end - max(begin, free_at) - communication
            self._free_at[stage] = arrived = end
            self._trail.append((begin, end, computed, shape))
        self._trail.clear()
        self._previous = shape
        return Span(spans[0][0], spans[-1][1], shape, bubbles)

    @property
    def first_free_at(self) -> float:
        """Returns when the first stage has computed all launched iterations."""
        return self._free_at[0]

    @property
    def free_at(self) -> float:
        """Returns when the last stage has computed all launched iterations."""
        return self._free_at[-1]

    def launch_alone(self, now: float, shape: BatchShape, times: StageTimes, saved: float, launched: float) -> Span:
        """Launches an iteration in a single stage, which only the host can delay."""
        account, begin, bubbles = self.accounts[0], self._free_at[0], 0.0
        if begin < now:
            bubbles, begin = self._account_idle(account, begin, now), now
        compute, communication, embedding, head, _, _ = times
        end = begin + (compute - saved + communication) + embedding + head
        if end < launched:
            end = launched
        account.communication += communication
        account.compute += end - begin - communication
        self._free_at[0], self._previous = end, shape
        self._trail.clear()
        return Span(begin, end, shape, bubbles)

    def close_accounts(self) -> list[StageAccount]:
        """Returns the accounts up to the end of the last iteration in the last stage."""
        end = self._free_at[-1]
        stages = zip(self.accounts, self._free_at, strict=True)
        return [replace(account, no_work=account.no_work + end - free_at) for account, free_at in stages]

    def _account_idle(self, account: StageAccount, begin: float, end: float) -> float:
        """Accounts for a stage's idle interval. Returns the seconds of bubbles."""
        bubbles = 0.0
        for began, ended, cause, shape in reversed(self._trail):
            if ended <= begin:
                break
            seconds = min(end, ended) - max(begin, began)
            if seconds <= 0:
                continue
            end = max(begin, began)
            if cause is _HOST:
                account.host += seconds
            elif cause is Cause.SEND:
                account.communication += seconds
            elif cause is Cause.COPIES:
                account.copies += seconds
            elif cause is Cause.NO_WORK or self._previous is None:
                account.no_work += seconds
            else:
                kind = bubble_kind(shape, self._previous)
                setattr(account, kind, getattr(account, kind) + seconds)
                bubbles += seconds
        account.no_work += end - begin  # before the first launch
        return bubbles


def bubble_kind(waited_for: BatchShape, before: BatchShape) -> str:
    """Returns the field of `StageAccount` for a stage that waits for one iteration after another."""
    prompt, prompt_before = (sum(tokens for tokens, _ in shape.chunks) for shape in (waited_for, before))
    if (prompt > 0) != (prompt_before > 0):
        return "pb2"
    return "pb3" if prompt == prompt_before else "pb1"
