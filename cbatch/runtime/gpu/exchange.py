"""Exchanges partial sums among tensor-parallel ranks through each other's memory, without an all-reduce or the host.

    rank 0   product: stores its parts for itself and in rank 1's box, counts --+ +--> add_norm: waits for the count, adds
    rank 1   product: stores its parts for itself and in rank 0's box, counts --+-+--> the parts in the order of the ranks

Each program of a product adds 1 to a counter in the memory of every other rank once its parts are stored there (release,
system scope). The kernel that adds the parts waits until its counter for each rank has risen by the number of programs
(acquire). The parts are added in the same order on all ranks, so the residual stream is bit-identical on all ranks.

Counters only rise, and their targets stay on the device, so a captured graph can be replayed: each meeting of an iteration
stores the target of the next meeting, and the last meeting stores the target of the first. Two alternating boxes suffice: a
rank reuses a box only after a meeting before which all other ranks had finished reading the box. Until `start` the targets
are so low that no kernel waits, so ranks may be compiled, captured and timed one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.model import Rank

BLOCK = 4096  # values that one program of `push` stores
NEVER = -(2**62)  # a target below any count

COUNTS = ("base_ptr", "next_ptr")
"""Parameters of kernels that wait. The pointers are 8 bytes apart, so their alignment differs from meeting to meeting."""


@triton.jit
def store_for_others(boxes_ptr, places, part, inside, RANK: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a block in the boxes of the other ranks. boxes_ptr: int64 [RANKS]; addresses."""
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            box = tl.multiple_of(tl.load(boxes_ptr + peer).to(tl.pointer_type(part.dtype)), 16)
            tl.store(box + places, part, inside)


@triton.jit
def signal_others(counters_ptr, RANK: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts this program as done once all its threads have stored. counters_ptr: int64 [RANKS]; addresses."""
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            counter = tl.load(counters_ptr + peer).to(tl.pointer_type(tl.int64))
            tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def wait_for_others(arrived_ptr, base_ptr, next_ptr, num_signals, is_first, RANK: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until all programs of the other ranks have counted. The first program stores the base of the next meeting."""
    target = tl.load(base_ptr) + num_signals
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            count = tl.atomic_add(arrived_ptr + peer, 0, sem="acquire", scope="sys")
            while count < target:
                count = tl.atomic_add(arrived_ptr + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    if is_first:
        tl.store(next_ptr, target)


@triton.jit
def add_parts(  # type: ignore[no-untyped-def]
    values,
    parts_ptr,  # [SPLITS, values], of this rank
    inbox_ptr,  # [RANKS - 1, box]
    num_values,
    box,
    places,
    inside,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Adds the parts of all ranks in the order of the ranks, in float32."""
    for rank in tl.static_range(RANKS):
        if rank < RANK:
            source = inbox_ptr + rank * box
        elif rank == RANK:
            source = parts_ptr
        else:
            source = inbox_ptr + (rank - 1) * box
        for split in tl.static_range(SPLITS):
            values += tl.load(source + split * num_values + places, inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _push_kernel(  # type: ignore[no-untyped-def]
    part_ptr,  # [values]
    boxes_ptr,
    counters_ptr,
    num_values,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_values
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    store_for_others(boxes_ptr, places, tl.load(part_ptr + places, inside), inside, RANK, RANKS)
    signal_others(counters_ptr, RANK, RANKS)


@dataclass(slots=True)
class Meeting:
    """A point in an iteration at which the ranks exchange parts, seen from one rank.

    rank: this rank.
    boxes: int64 [ranks]; address of this rank's box at each rank. counters: address of this rank's counter at each rank.
    inbox: [ranks - 1, values]; the other ranks' boxes at this rank.
    arrived: int64 [ranks]; this rank's counters, one per sending rank.
    base: int64 [1]; the count after the preceding meeting. following: the same for the next meeting.
    num_signals: number of programs of a rank's product; each program counts once; set by `expect`.
    """

    rank: Rank
    boxes: torch.Tensor
    counters: torch.Tensor
    inbox: torch.Tensor
    arrived: torch.Tensor
    base: torch.Tensor
    following: torch.Tensor
    num_signals: int = 0

    def expect(self, part: torch.Tensor, num_programs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Registers a product that stores `part`. Returns boxes and counters for the product's kernel."""
        assert part.dtype == self.inbox.dtype and part.numel() <= self.inbox.shape[1], "parts fit the boxes"
        self.num_signals = num_programs
        return self.boxes, self.counters


class Awaited(NamedTuple):
    """Arguments of a kernel that waits at a meeting. tensors: inbox, arrived, base and following."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    box: int
    num_signals: int
    rank: Rank

    @classmethod
    def at(cls, meeting: Meeting | None, unused: torch.Tensor) -> "Awaited":
        """unused: passed in place of each tensor if there is no meeting."""
        if meeting is None:
            return cls((unused, unused, unused, unused), 0, 0, Rank())
        tensors = meeting.inbox, meeting.arrived, meeting.base, meeting.following
        return cls(tensors, meeting.inbox.shape[1], meeting.num_signals, meeting.rank)


class Exchange:
    """One rank's side of all meetings of its stage; `meet` comes first.

    vocabulary: size of the vocabulary. first_token: first token of this rank's share. num_chunks: chunks searched per rank.
    table: values and tokens, [rows, ranks * chunks] each; the likeliest token of every chunk of all ranks.
    table_addresses: int64 [2, ranks]; addresses of the table at each rank.
    """

    def __init__(
        self,
        rank: Rank,
        device: torch.device,
        dtype: torch.dtype,
        box: int,
        num_meetings: int,
        max_rows: int,
        vocabulary: int,
        chunk: int,
    ) -> None:
        """
        box: number of values in the largest parts that one rank stores for another.
        num_meetings: meetings per iteration.
        chunk: tokens of the vocabulary that one program searches.
        """
        share, size = rank.share(vocabulary), rank.size
        self.rank, self.vocabulary = rank, vocabulary
        self.first_token = share.start
        self.num_chunks = triton.cdiv(triton.cdiv(vocabulary, size), chunk)
        self.inboxes = torch.zeros((2, size - 1, box), dtype=dtype, device=device)
        self.arrived = torch.zeros(size, dtype=torch.int64, device=device)
        self.bases = torch.full((num_meetings,), NEVER, dtype=torch.int64, device=device)
        columns = size * self.num_chunks
        self.table = (
            torch.full((max_rows, columns), -torch.inf, device=device),
            torch.zeros((max_rows, columns), dtype=torch.int32, device=device),
        )

    def meet(self, others: Sequence["Exchange"]) -> None:
        """Stores the addresses of the other ranks' memory. others: the exchanges of all ranks in order, including this one."""
        device, index = self.arrived.device, self.rank.index
        places = [index - (other.rank.index < index) for other in others]  # of this rank's box at each other rank
        boxes = [
            [
                other.inboxes[turn, place].data_ptr() if other is not self else 0
                for place, other in zip(places, others, strict=True)
            ]
            for turn in (0, 1)
        ]
        tables = [[other.table[kind].data_ptr() for other in others] for kind in (0, 1)]
        counters = [other.arrived[index:].data_ptr() for other in others]
        self._boxes = torch.tensor(boxes, dtype=torch.int64, device=device)
        self._counters = torch.tensor(counters, dtype=torch.int64, device=device)
        self.table_addresses = torch.tensor(tables, dtype=torch.int64, device=device)

    def meeting(self, number: int) -> Meeting:
        """Returns the meeting with this index in an iteration."""
        turn, following = number % 2, (number + 1) % len(self.bases)
        return Meeting(
            self.rank,
            self._boxes[turn],
            self._counters,
            self.inboxes[turn],
            self.arrived,
            self.bases[number:],
            self.bases[following:],
        )

    def start(self) -> None:
        """Makes kernels wait for each other from now on. No rank may be computing: the caller synchronizes before and after."""
        self.arrived.zero_()
        self.bases.zero_()


def push(part: torch.Tensor, meeting: Meeting, *, dependent: bool) -> None:
    """Stores a rank's part of a product, contiguous, for the other ranks. With few rows the product's kernel stores its parts itself."""
    grid = (triton.cdiv(part.numel(), BLOCK),)
    boxes, counters = meeting.expect(part, grid[0])
    _push_kernel[grid](
        part,
        boxes,
        counters,
        part.numel(),
        BLOCK=BLOCK,
        DEPENDENT=dependent,
        RANK=meeting.rank.index,
        RANKS=meeting.rank.size,
        num_warps=8,
        launch_pdl=dependent,
    )
