"""One iteration in one pipeline stage as its device sees it, from the inputs in a slot to what leaves the stage.

The first stage begins with carry-over, the last ends with sampling; a single stage does both. This is the unit that a
captured graph replays. `EagerIteration` runs it operation by operation, for any shape.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from cbatch.executor import Step
from cbatch.model import Layers
from cbatch.runtime.batch import Bounds, Fields, Shape, Work, device_views
from cbatch.runtime.carry import carry_over
from cbatch.runtime.sampling import greedy, sample
from cbatch.runtime.slots import StageSlot

Greedy = Callable[[torch.Tensor, torch.Tensor], object]
Send = Callable[[torch.Tensor, torch.Tensor], None]


def copy(values: torch.Tensor, out: torch.Tensor) -> None:
    """Writes what leaves a stage to `out`, of the same shape, on the same device."""
    out.copy_(values)


class Model(Protocol):
    """Computes a stage's layers; see `PagedModel`."""

    layers: Layers

    def __call__(
        self, inputs: torch.Tensor, batch: Fields[torch.Tensor], bounds: Bounds, leaving: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class Iteration(Protocol):
    """Computes a stage's part of iterations; called on its compute stream, never synchronizes."""

    def shape(self, step: Step) -> Shape:
        """The padded shape in which a step is to be packed and computed."""

    def __call__(self, stage: StageSlot, work: Work) -> None:
        """Compute from the inputs in `stage.device` and from `stage.arriving` what belongs in `stage.leaving`."""


class EagerIteration:
    """Runs an iteration operation by operation."""

    def __init__(self, model: Model, *, greedy: Greedy = greedy, send: Send = copy) -> None:
        """
        Args:
            greedy: finds the likeliest tokens, as `sampling.greedy`.
            send: writes other tokens where they leave for, as `copy`.
        """
        self.is_last = model.layers.is_last
        self._is_first = model.layers.is_first
        self._model = model
        self._greedy = greedy
        self._send = send

    def shape(self, step: Step) -> Shape:
        return Shape.of(step)

    @torch.inference_mode()
    def __call__(self, stage: StageSlot, work: Work) -> None:
        outputs = self.compute(stage, work)
        if self.is_last:
            self.sample(stage, outputs, work)

    def compute(self, stage: StageSlot, work: Work) -> torch.Tensor:
        """Carry-over and layers; returns logits, [rows, vocabulary], in the last stage, else what has left."""
        batch, num_tokens = device_views(stage.device, work.shape), work.shape.num_tokens
        if self._is_first:
            inputs = carry_over(batch.token_ids, batch.carry, stage.arriving)
        else:
            inputs = stage.arriving[:num_tokens]
        leaving = None if self.is_last else stage.leaving[:num_tokens]
        return self._model(inputs, batch, work.bounds, leaving)

    def sample(self, stage: StageSlot, logits: torch.Tensor, work: Work) -> None:
        self._choose(device_views(stage.device, work.shape), logits, work, stage.leaving[: work.shape.num_rows])

    def _choose(self, batch: Fields[torch.Tensor], logits: torch.Tensor, work: Work, out: torch.Tensor) -> None:
        """Write each row's token to `out`, int32 [rows]."""
        if work.sampling:
            self._send(sample(logits, batch), out)
        else:
            self._greedy(logits, out)
