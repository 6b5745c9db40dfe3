"""One whole iteration as the device sees it: carry-over, model, sampling, from a slot's inputs to its sampled tokens.

This is the unit that a captured graph replays. `EagerIteration` runs it operation by operation, for any shape.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from cbatch.executor import Step
from cbatch.runtime.batch import Bounds, Fields, Shape, Work, device_views
from cbatch.runtime.carry import carry_over
from cbatch.runtime.sampling import greedy, sample
from cbatch.runtime.slots import Slot

Greedy = Callable[[torch.Tensor], torch.Tensor]


class Model(Protocol):
    """Computes the logits of each row's last token; see `PagedModel`."""

    def __call__(self, token_ids: torch.Tensor, batch: Fields[torch.Tensor], bounds: Bounds) -> torch.Tensor: ...


class Iteration(Protocol):
    """Computes iterations; called on the compute stream, never synchronizes."""

    def shape(self, step: Step) -> Shape:
        """The padded shape in which a step is to be packed and computed."""

    def __call__(self, slot: Slot, source: torch.Tensor, work: Work) -> None:
        """Compute `slot.sampled[:rows]` from the inputs in `slot.device`.

        source: int32 [rows]; the tokens sampled `num_stages` iterations before, which carry-over reads.
        """


class EagerIteration:
    """Runs an iteration operation by operation."""

    def __init__(self, model: Model, *, greedy: Greedy = greedy) -> None:
        """greedy: finds the likeliest tokens, as `sampling.greedy`."""
        self._model = model
        self._greedy = greedy

    def shape(self, step: Step) -> Shape:
        return Shape.of(step)

    @torch.inference_mode()
    def __call__(self, slot: Slot, source: torch.Tensor, work: Work) -> None:
        self.sample(slot, self.logits(slot, source, work), work)

    def logits(self, slot: Slot, source: torch.Tensor, work: Work) -> torch.Tensor:
        """Carry-over and model: [rows, vocabulary]."""
        batch = device_views(slot.device, work.shape)
        token_ids = carry_over(batch.token_ids, batch.carry, source)
        return self._model(token_ids, batch, work.bounds)

    def sample(self, slot: Slot, logits: torch.Tensor, work: Work) -> None:
        tokens = sample(logits, device_views(slot.device, work.shape)) if work.sampling else self._greedy(logits)
        slot.sampled[: work.shape.num_rows] = tokens
