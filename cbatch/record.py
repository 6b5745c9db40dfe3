"""The record of a run: one row per iteration, and the requests that received a token in it.

Rows hold plain numbers; arrays and tables are made once, at the end. `cbatch.results` derives figures from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.executor import BlockCopies, CopyTimes, StageSpans, Step, StepResult
from cbatch.request import Ints, Request


class StepRecord(NamedTuple):
    """One iteration. Times are seconds on the executor's clock.

    planned_at, launched_at: the host began to plan; the step was handed to the device, or the first operations of a launch without a graph.
    waited_at, received_at: the host began to wait for this step; its tokens were on the host.
    done_at: the host had absorbed the tokens.
    started, ended: the device began and finished computing.
    num_prefill_tokens: prompt tokens (after a preemption or a move, also recomputed output); num_decode_tokens: the others.
    num_padding_tokens: computed for no request: up to `Plan.pad_to`, and up to a captured graph's tokens.
    num_sampled: tokens generated and received.
    kv_blocks_used, num_waiting, num_running: after the plan was carried out.
    num_scores, num_kv_reads: see `BatchShape`; 0 inside vLLM.
    num_drafted: requests with drafts that had not ended. most_drafts: of one request. num_drafts, num_accepted: their drafts, part of num_decode_tokens, and those that became tokens.
    """

    iteration: int
    planned_at: float
    launched_at: float
    waited_at: float
    received_at: float
    done_at: float
    started: float
    ended: float
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_padding_tokens: int
    num_sampled: int
    num_preempted: int
    kv_blocks_used: int
    num_waiting: int
    num_running: int
    note: str
    num_scores: int = 0
    num_kv_reads: int = 0
    num_drafted: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    most_drafts: int = 0


class InFlight(NamedTuple):
    """A launched iteration: the step, the executor's handle, and the values of `StepRecord` known at its launch.

    times: planned_at, launched_at. state: num_preempted, kv_blocks_used, num_waiting, num_running.
    """

    step: Step
    handle: Any
    times: tuple[float, float]
    state: tuple[int, int, int, int]


@dataclass
class Life:
    """One lifetime of a replica, which is paid for from `asked` to `closed`.

    asked, ready, draining, closed: seconds at which it was asked for, could get requests, got none any more, and had ended; inf: never.
    """

    replica: int
    asked: float
    ready: float = inf
    draining: float = inf
    closed: float = inf


class Transfer(NamedTuple):
    """KV cache that was sent from one replica to another.

    num_tokens, num_bytes: sent. started, ended: seconds. hidden: share of the bytes that was sent during the prefill.
    """

    request: int
    sender: int
    receiver: int
    num_tokens: int
    num_bytes: int
    started: float
    ended: float
    hidden: float = 0.0


class RunRecord:
    """The steps of a run, its requests, and when each of them received its tokens."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.requests: list[Request] = []  # in the order of their ends
        self.receivers: list[Ints] = []  # ids of the requests that received a token, once for each token, of each step
        self.copies: list[CopyTimes] = []  # of each step, if the executor times copies
        self.stages: list[StageSpans] = []  # of each step, if a pipeline computed real tokens
        self.blocks: list[BlockCopies] = []  # between host memory and device, of the steps with such copies
        self.replicas: list[int] = []  # that computed each step, if there are several
        self.replica_of: dict[int, int] = {}  # the replica of each request, by the request's id, if there are several
        self.prefilled_on: Mapping[int, int] | None = None  # by id, of those that have moved; None: no request may move
        self.pools: Sequence[str] = ()  # the name of each replica's pool, if there are several
        self.lives: Sequence[Life] = ()  # of all replicas, with an autoscaler
        self.transfers: Sequence[Transfer] = ()  # in the order of their ends, if replicas have roles
        self.lost: Sequence[Transfer] = ()  # not begun: the lease was over (`ended`) before the blocks could be read
        self._num_taken = 0  # of the steps

    def add(
        self,
        launched: InFlight,
        result: StepResult,
        waited_at: float,
        received_at: float,
        done_at: float,
        receivers: Ints,
    ) -> StepRecord:
        """Adds an iteration that has ended; returns its row. receivers: as in `add_step`."""
        step, _, times, state = launched
        num_tokens, num_decodes, drafted = step.num_batch_tokens, step.num_decode_tokens, (0, 0, 0, 0)
        if step.drafts is not None:
            received, num_drafts = {*receivers.tolist()}, int(step.drafts.sum())
            num_drafted = sum(step.requests[place].id in received for place in step.drafts.nonzero()[0].tolist())
            drafted = num_drafted, num_drafts, len(receivers) - len(received), int(step.drafts.max(initial=0))
            num_decodes += num_drafts
        num_prefill, num_padding = num_tokens - num_decodes, (result.num_computed_tokens or step.pad_to) - num_tokens
        batch = (len(step.rows), num_prefill, num_decodes, num_padding, len(receivers))
        spans = (waited_at, received_at, done_at, result.started, result.ended)
        shape = step.shape()
        attended = (shape.num_scores, shape.num_kv_reads)
        record = StepRecord(step.index, *times, *spans, *batch, *state, step.note, *attended, *drafted)
        self.add_step(record, receivers)
        if result.copies is not None:
            self.copies.append(result.copies)
        if result.stages is not None:
            self.stages.append(result.stages)
        if result.blocks is not None:
            self.blocks.append(result.blocks)
        return record

    def add_step(self, step: StepRecord, receivers: Ints) -> None:
        """receivers: ids of the requests that received a token, once for each token, [tokens]."""
        self.steps.append(step)
        self.receivers.append(receivers)

    def take(self) -> "RunRecord":
        """Returns the part added since the last call, and drops it except the latest iteration, which views read."""
        taken, first = RunRecord(), self._num_taken
        for name in ("steps", "receivers", "copies", "stages"):
            kept: list[Any] = getattr(self, name)
            setattr(taken, name, kept[first:])
            del kept[:-1]
        taken.requests, self.requests[:] = self.requests[:], ()
        taken.blocks, self.blocks[:] = self.blocks[:], ()
        self._num_taken = len(self.steps)
        return taken

    def tokens(self) -> tuple[Ints, NDArray[np.float64]]:
        """Returns request ids and times on the host, in seconds, of all tokens that requests received, by time, [tokens] each."""
        if not self.steps:
            return np.zeros(0, np.int64), np.zeros(0)
        times = np.repeat([step.received_at for step in self.steps], [len(ids) for ids in self.receivers])
        return np.concatenate(self.receivers), times
