"""Times transfers between GPUs with the runtime's kernels: hand-overs between stages, and exchanges between ranks.

Operations are enqueued while the first GPU pauses, which hides the host's launches. The first operations are not timed. If the host
takes longer than the pause, the pause is extended.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from cbatch import Limits, ModelSpec
from cbatch.model import Layers
from cbatch.runtime.fast.fused_model import exchanges_of
from cbatch.runtime.fast.fused_ops import add_norm
from cbatch.runtime.gpu.devices import choose_devices, synchronize
from cbatch.runtime.gpu.exchange import Exchange, Meeting, push
from cbatch.runtime.gpu.peers import send
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links

TOKENS = (1, 8, 32, 64, 256, 1024, 4096, 16384)
NUM_IN_TURN = 32
"""Operations that are timed together; even, so that the last hand-over ends on the GPU where the first began."""

REPEATS = 5
PAUSE_CYCLES = 20_000_000  # about 10 ms


def link_times(spec: ModelSpec, num_gpus: int) -> Links:
    """Times hand-overs between two GPUs, and exchanges among 2, 4, ... GPUs. Raises ConfigError if a GPU cannot access another's memory."""
    counts = [2**power for power in range(1, num_gpus.bit_length())]
    exchanges = {count: _curve(spec, _exchange_seconds(spec, count)) for count in counts}
    return Links(exchanges, within_node=_curve(spec, _hand_over_seconds(spec)))


def _hand_over_seconds(spec: ModelSpec) -> list[float]:
    """Returns the seconds from the end of a stage's last layer to the start of the next stage, for each of `TOKENS`."""
    devices = [device for [device] in choose_devices(2)]
    streams = [torch.cuda.Stream(device) for device in devices]

    def hand_over(place: int, hidden: torch.Tensor, arriving: torch.Tensor) -> None:
        with torch.cuda.stream(streams[place]):
            send(hidden, arriving)
        streams[1 - place].wait_event(streams[place].record_event())

    seconds = []
    for tokens in TOKENS:
        hidden = [_zeros(spec, tokens, device) for device in devices]
        arriving = [_zeros(spec, tokens, device).float() for device in reversed(devices)]
        synchronize([devices])
        in_turn = [partial(hand_over, place, hidden[place], arriving[place]) for place in (0, 1)]
        seconds.append(_seconds(in_turn, streams[0]))
    return seconds


def _exchange_seconds(spec: ModelSpec, num_ranks: int) -> list[float]:
    """Returns the extra seconds that ranks need to add up a product compared to one GPU, for each of `TOKENS`."""
    [devices] = choose_devices(1, num_ranks)
    exchanges = exchanges_of(spec, Limits(2, TOKENS[-1], TOKENS[-1]), Layers(0, 1, 2), devices)
    streams = [torch.cuda.Stream(device) for device in devices]
    synchronize([devices])
    for exchange in exchanges:
        exchange.start()
    return [_added_seconds(spec, tokens, exchanges, streams) for tokens in TOKENS]


def _added_seconds(
    spec: ModelSpec, tokens: int, exchanges: Sequence[Exchange], streams: Sequence[torch.cuda.Stream]
) -> float:
    """Returns `_exchange_seconds` for one number of tokens; each rank has its part of the product and the residual stream."""
    devices = [stream.device for stream in streams]
    parts, residuals = ([_zeros(spec, tokens, device) for device in devices] for _ in range(2))
    weights = [torch.ones(spec.hidden_size, device=device) for device in devices]
    meetings = [[exchange.meeting(turn) for turn in (0, 1)] for exchange in exchanges]

    def add(rank: int, meeting: Meeting | None = None) -> None:
        with torch.cuda.stream(streams[rank]):
            add_norm(parts[rank][None], residuals[rank], weights[rank], 1e-5, dependent=True, meeting=meeting)

    def add_together(turn: int) -> None:
        for part, stream, turns in zip(parts, streams, meetings, strict=True):
            with torch.cuda.stream(stream):
                push(part, turns[turn], dependent=True)
        for rank in range(len(streams)):
            add(rank, meetings[rank][turn])

    synchronize([devices])
    together = _seconds([partial(add_together, turn) for turn in (0, 1)], streams[0])
    return max(together - _seconds([partial(add, 0)], streams[0]), 0.0)


def _zeros(spec: ModelSpec, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.zeros((tokens, spec.hidden_size), dtype=getattr(torch, spec.dtype), device=device)


def _seconds(operations: Sequence[Callable[[], None]], stream: torch.cuda.Stream) -> float:
    """Returns the median seconds per operation if all are enqueued in turn; `stream` waits for the last operation."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    pause = PAUSE_CYCLES
    while len(times) < REPEATS:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(pause)
        for operation in operations:
            operation()
        began.record(stream)
        for number in range(NUM_IN_TURN):
            operations[number % len(operations)]()
        ended.record(stream)
        if began.query():  # the pause ended before all were enqueued
            pause *= 2
            continue
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3 / NUM_IN_TURN)
    return float(median(times))


def _curve(spec: ModelSpec, seconds: Sequence[float]) -> PiecewiseLinear:
    """Returns seconds against the bytes of the hidden states of `TOKENS`."""
    size = spec.hidden_size * getattr(torch, spec.dtype).itemsize
    rounded = tuple(float(f"{value:.4g}") for value in seconds)
    return PiecewiseLinear(tuple(float(tokens * size) for tokens in TOKENS), rounded)
