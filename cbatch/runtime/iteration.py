"""One whole iteration as the device sees it: carry-over, model, sampling, from a slot's inputs to its sampled tokens.

This is the unit that a captured graph replays. `EagerIteration` runs it operation by operation, for any shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray

from cbatch.executor import Step
from cbatch.runtime.batch import Bounds, Fields, Shape, device_views
from cbatch.runtime.carry import carry_over
from cbatch.runtime.sampling import greedy, sample
from cbatch.runtime.slots import Slot


class Work(NamedTuple):
    """What the host knows of an iteration besides its buffers; plain numbers that need not be read from the device.

    shape: padded size.
    bounds: of its rows, padding counted.
    sampling: whether any row's temperature is above 0.
    """

    shape: Shape
    bounds: Bounds
    sampling: bool

    @classmethod
    def of(cls, shape: Shape, packed: Fields[NDArray[Any]]) -> Work:
        """Read off the packed inputs."""
        return cls(shape, Bounds.of(packed), bool(packed.temperature.any()))


Greedy = Callable[[torch.Tensor], torch.Tensor]


class Model(Protocol):
    """Computes the logits of each row's last token; see `PagedModel`, whose calls these are."""

    def __call__(self, token_ids: torch.Tensor, batch: Fields[torch.Tensor], bounds: Bounds) -> torch.Tensor: ...


class Iteration(Protocol):
    """Computes iterations; called on the compute stream, never synchronizes."""

    def shape(self, step: Step) -> Shape:
        """The padded shape under which a step is to be packed and computed."""
        ...

    def __call__(self, slot: Slot, previous: torch.Tensor, work: Work) -> None:
        """Compute `slot.sampled[:rows]` from the inputs in `slot.device`.

        previous: int32 [rows]; what the iteration before has sampled, the source of the carry-over.
        """
        ...


def smallest_shape(step: Step) -> Shape:
    """The step as it is, with the padding that the plan asks for."""
    num_blocks = step.pool.blocks_for(int((step.start + step.num_tokens).max()))
    return Shape(step.pad_to, len(step.rows), num_blocks)


class EagerIteration:
    """Runs an iteration operation by operation."""

    def __init__(self, model: Model, *, greedy: Greedy = greedy, poison: bool = False) -> None:
        """
        Args:
            greedy: finds the likeliest tokens; as `sampling.greedy`.
            poison: sample -1 where logits are not numbers, which the executor reports.
        """
        self._model = model
        self._greedy = greedy
        self._poison = poison

    def shape(self, step: Step) -> Shape:
        return smallest_shape(step)

    @torch.inference_mode()
    def __call__(self, slot: Slot, previous: torch.Tensor, work: Work) -> None:
        self.sample(slot, self.logits(slot, previous, work), work)

    def logits(self, slot: Slot, previous: torch.Tensor, work: Work) -> torch.Tensor:
        """Carry-over and model: [rows, vocabulary]."""
        batch = device_views(slot.device, work.shape)
        token_ids = carry_over(batch.token_ids, batch.carry, previous)
        return self._model(token_ids, batch, work.bounds)

    def sample(self, slot: Slot, logits: torch.Tensor, work: Work) -> None:
        tokens = sample(logits, device_views(slot.device, work.shape)) if work.sampling else self._greedy(logits)
        if self._poison:
            tokens = tokens.masked_fill(logits.isnan().any(dim=-1), -1)
        slot.sampled[: work.shape.num_rows] = tokens
