"""Drafts by a smaller model of the same vocabulary (Leviathan et al. 2211.17192, Chen et al. 2302.01318; greedy, as vLLM's `draft_model`).

The draft model has a KV cache of the target's blocks, and uses the target's block tables. Each iteration writes its keys and values at the same
places, so they are right wherever the target's are: chunks, the prefix cache, preemption and rejected drafts need nothing of their own.

    rows of a request           token  draft 1  draft 2
    pass 0 reads the token            -> draft 1             in an iteration with chunks, pass 0 also reads all other inputs
    pass 1 reads draft 1                       -> draft 2
    pass 2 reads draft 2                                     writes its keys and values

Pass j has one row per request, as many as the shape has (`Shape.num_requests`); requests with fewer than j drafts write to the dummy block.
"""

from dataclasses import replace

import torch

from cbatch.runtime.batch import Extents, Fields, Work
from cbatch.runtime.carry import last_tokens
from cbatch.runtime.gpu.ranks import finish
from cbatch.runtime.stage_model import Model


class ModelProposer:
    """Proposes the likeliest tokens of a draft model. Implements `Proposer`."""

    def __init__(self, model: Model) -> None:
        """model: whole, on one device; its cache has as many blocks as the target's."""
        self._model = model

    def __call__(
        self, inputs: torch.Tensor, batch: Fields[torch.Tensor], work: Work, request: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        last, size = last_tokens(batch), self._model.cache.size
        number, place = (
            torch.arange(length, device=first.device) for length in (len(first), work.shape.num_drafts + 1)
        )
        rows = (first + place[:, None]).clamp(max=len(request) - 1)  # [passes, requests]
        absent = (request[rows] != number) | (batch.drafts[rows] != place[:, None])
        tokens = rows if last is None else last[rows]
        positions = batch.positions[tokens].masked_fill(absent, 0)
        kv_indices = batch.kv_indices[tokens].masked_fill(absent, size.num_blocks * size.block_size)
        context_lens = batch.context_lens[rows].masked_fill(absent, 0)
        single = replace(
            batch,
            query_starts=torch.arange(len(first) + 1, dtype=torch.int32, device=first.device),
            drafts=torch.zeros_like(context_lens[0]),
            block_tables=batch.block_tables[first],
        )
        drafts, newest = list[torch.Tensor](), inputs[first]
        bounds = Extents(1, work.bounds.max_context_len, 0)
        for j, (at, index, context) in enumerate(zip(positions, kv_indices, context_lens, strict=True)):
            fields = replace(single, positions=at, kv_indices=index, context_lens=context)
            if j == 0 and last is not None:
                newest = self._likeliest(inputs, batch, work.bounds)[first]
            elif j < work.shape.num_drafts:
                newest = self._likeliest(newest, fields, bounds)
            else:  # without the output head
                states = torch.empty((len(first), self._model.hidden_size), device=first.device)
                finish(self._model.steps(newest, fields, bounds, states))
            drafts.append(newest)
        return torch.stack(drafts, 1)  # the last column is no draft

    def _likeliest(self, inputs: torch.Tensor, batch: Fields[torch.Tensor], bounds: Extents) -> torch.Tensor:
        """Returns the likeliest token after each row, int32 [rows]."""
        likeliest = torch.empty_like(batch.context_lens)
        finish(self._model.choose(finish(self._model.steps(inputs, batch, bounds)), likeliest))
        return likeliest
