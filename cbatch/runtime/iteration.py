"""One iteration in one pipeline stage, from the inputs in a slot to the output of the stage.

The first stage begins with carry-over, the last stage ends with sampling, and a single stage does both. A captured graph replays
the iteration on each rank. `EagerIteration` runs the iteration operation by operation, for any shape.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from cbatch.drafts import Drafter
from cbatch.executor import Step
from cbatch.limits import Limits
from cbatch.runtime.batch import Shape, Work, device_views
from cbatch.runtime.carry import Drafting, Proposer, TextProposer, carry_over, step_back
from cbatch.runtime.draft_model import ModelProposer
from cbatch.runtime.gpu.ranks import Steps, finish, lockstep
from cbatch.runtime.sampling import sample, uniform
from cbatch.runtime.slots import RankSlot, StageSlot
from cbatch.runtime.stage_model import Model

Send = Callable[[torch.Tensor, torch.Tensor], None]


def copy(values: torch.Tensor, out: torch.Tensor) -> None:
    """Writes a stage's output to `out`, on the same device."""
    out.copy_(values)


class Iteration(Protocol):
    """Computes one stage of each iteration. Calls run on the stage's compute stream and never synchronize."""

    def shape(self, step: Step) -> Shape:
        """Returns the padded shape in which a step is packed and computed."""

    def __call__(self, stage: StageSlot, work: Work) -> Iterator[None] | None:
        """Computes each rank's output from the rank's packed inputs and its `arriving` data.

        Returns what the host has left to enqueue, in parts between which it may do other work; None: nothing.
        """


def make_drafting(
    drafter: Drafter | None, models: Sequence[Model], draft_models: Sequence[Model], limits: Limits, vocabulary: int
) -> list[Drafting]:
    """Returns what carries over and drafts on each rank of a stage; empty without a drafter.

    draft_models: one per rank, in the first stage, if the drafter is a model. vocabulary: its size, to check drafts.
    """
    if drafter is None:
        return []
    texts = [model.cache.texts for model in models]
    proposers: list[Proposer] = [ModelProposer(model) for model in draft_models]
    proposers = proposers or [TextProposer(drafter, of_rank, limits, vocabulary) for of_rank in texts]
    return [Drafting(*source, limits) for source in zip(proposers, texts, strict=True)]


class EagerIteration:
    """Runs an iteration operation by operation, one rank after the other."""

    def __init__(self, models: Sequence[Model], *, send: Send = copy, drafting: Sequence[Drafting] = ()) -> None:
        """models: one per rank. send: writes drawn tokens to their destination, like `copy`. drafting: one per rank; empty: no drafts."""
        self.models, self._drafting = models, drafting
        self.is_last = models[0].layers.is_last
        self._is_first = models[0].layers.is_first
        self._send = send

    def shape(self, step: Step) -> Shape:
        return Shape.of(step)

    def __call__(self, stage: StageSlot, work: Work) -> None:
        finish(self.parts(stage, work))

    @torch.inference_mode()
    def parts(self, stage: StageSlot, work: Work) -> Steps[None]:
        """Computes the same in parts."""
        steps = [self.steps(index, rank, work) for index, rank in enumerate(stage.ranks)]
        outputs = yield from lockstep(steps, [rank.device for rank in stage.ranks])
        if self.is_last and work.sampling:
            self.sample(stage, outputs, work)

    def steps(self, index: int, rank: RankSlot, work: Work) -> Steps[torch.Tensor]:
        """Computes one rank's carry-over and layers, and in the last stage the most likely tokens.

        Returns the rank's logits, [rows, rank's share of the vocabulary], in the last stage; else the stage's output.
        """
        batch, num_tokens = device_views(rank.device, work.shape), work.shape.num_tokens
        if not self._is_first:
            inputs = rank.arriving[:num_tokens]
        elif self._drafting:
            inputs = self._drafting[index].begin(batch, rank, work)
        else:
            inputs = carry_over(batch.token_ids, batch.carry, rank.arriving)
        if self._drafting and not self._is_first:
            step_back(batch, rank.rejected[:num_tokens], self.models[index].cache.size.block_size)
        if self._drafting and rank.leaving_rejected is not None:
            self._send(rank.rejected[:num_tokens], rank.leaving_rejected[:num_tokens])
        leaving = None if self.is_last else rank.leaving[:num_tokens]
        outputs = yield from self.models[index].steps(inputs, batch, work.bounds, leaving)
        if self.is_last:
            yield from self.models[index].choose(outputs, rank.leaving[: work.shape.num_rows])
        return outputs

    def sample(self, stage: StageSlot, outputs: Sequence[torch.Tensor], work: Work) -> None:
        """Replaces the most likely tokens by drawn tokens, on the first rank's device. outputs: the logits of each rank."""
        first, *others = stage.ranks
        whole = torch.cat([logits.to(outputs[0].device) for logits in outputs], -1) if others else outputs[0]
        batch = device_views(first.device, work.shape)
        tokens = sample(whole, batch, uniform(batch.seeds, batch.context_lens))
        self._send(tokens, first.leaving[: work.shape.num_rows])
        for rank in others:
            rank.leaving[: work.shape.num_rows].copy_(tokens)
