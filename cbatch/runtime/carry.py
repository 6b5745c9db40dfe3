"""Carry-over: tokens sampled in one iteration become inputs of a later iteration without passing through the host.

With drafts the host does not know either how many of them the source iteration accepted. It packs the later iteration as if all were
accepted, and the device takes back what was rejected:

    source iteration N   row    f      f + 1    f + 2    f + 3
                         input  token  draft 1  draft 2  draft 3
                         sample a      b        c        d          a = draft 1, b != draft 2: 1 draft is accepted, 2 are rejected
    iteration N + 1      input  b, and drafts that continue ... a b; each position is 2 less than packed

New keys and values overwrite those of rejected drafts. All shapes are fixed and nothing is read from the device, so a graph can capture all of it.
"""

from typing import Protocol

import torch

from cbatch.drafts import NO_DRAFT, Drafter
from cbatch.errors import PolicyError, call
from cbatch.limits import Limits
from cbatch.runtime.batch import Fields, Work
from cbatch.runtime.slots import RankSlot


def carry_over(token_ids: torch.Tensor, carry: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Returns the inputs, int32 [tokens], with the source iteration's tokens in place of the placeholder 0.

    Args:
        token_ids: int32 [tokens].
        carry: int [tokens]; for each input the index of its token in `sampled`, or 0 if the input is not carried over.
        sampled: int32 [1 + rows]; a 0, then the source iteration's tokens. Tokens without an index in `carry` may be anything.
    """
    return token_ids + sampled.index_select(0, carry)


def count_accepted(carry: torch.Tensor, sampled: torch.Tensor, guesses: torch.Tensor, most: int) -> torch.Tensor:
    """Returns how many drafts the source iteration accepted for each input's request, int64 [tokens]; 0 if nothing is carried over.

    sampled: at least [1 + rows + most]. guesses: the same size; for each token of `sampled` the draft that it is compared with, or `NO_DRAFT`.
    """
    equal = (sampled == guesses).unfold(0, most, 1)  # of each index, those from there on
    return equal[carry].cumprod(1).sum(1)


def step_back(batch: Fields[torch.Tensor], rejected: torch.Tensor, block_size: int) -> None:
    """Moves inputs back by the rejected drafts before them, int32 [tokens], in place. Such inputs are in rows of one token each."""
    rows, last = _rows_of_tokens(batch), last_tokens(batch)
    batch.positions.sub_(rejected)
    # that of padding is 0
    batch.context_lens.sub_(rejected if last is None else rejected[last] * (batch.context_lens > 0))
    blocks = batch.block_tables[rows, batch.positions // block_size]
    moved = torch.add(batch.positions % block_size, blocks, alpha=block_size)
    torch.where(batch.behind > 0, moved, batch.kv_indices, out=batch.kv_indices)


class Proposer(Protocol):
    """Makes the drafts of an iteration on the device; a graph captures the call."""

    def __call__(
        self, inputs: torch.Tensor, batch: Fields[torch.Tensor], work: Work, request: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        """Returns drafts, int32 [requests, at least `work.shape.num_drafts`].

        inputs: int32 [tokens]; those of rows that are drafts may be any token. request: the number of each row's request, [rows]. first: the first
        row of each request, [requests]; where there is no such request, the last row.
        """


class TextProposer:
    """Proposes from the tokens of the requests, of which `texts` has all; see `Drafting`."""

    def __init__(self, drafter: Drafter, texts: torch.Tensor, limits: Limits, vocabulary: int = 2**31 - 1) -> None:
        """vocabulary: its size; on a CPU, drafts beyond are refused."""
        self._drafter, self._texts, self._most, self._vocabulary = drafter, texts, limits.max_drafts, vocabulary

    def __call__(
        self, inputs: torch.Tensor, batch: Fields[torch.Tensor], work: Work, request: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        """Raises PolicyError if the drafter fails or, on a CPU, proposes what is no token."""
        known = self._texts[batch.block_tables[first]].flatten(1)  # [requests, tokens]
        name, most = f"drafter {type(self._drafter).__name__}", self._most
        found: torch.Tensor = call(name, self._drafter.propose_each, known, batch.context_lens[first], most)
        if not isinstance(found, torch.Tensor) or found.shape != (len(known), most):
            problem = f"propose_each() returned {list(getattr(found, 'shape', [])) or type(found).__name__}"
            raise PolicyError(f"{name}: {problem}; return an int32 tensor {[len(known), most]}")
        if found.is_cpu and ((found < NO_DRAFT) | (found >= self._vocabulary)).any():
            tokens = f"from {found.min()} to {found.max()}"
            raise PolicyError(f"{name}: proposed tokens {tokens}; the vocabulary is from 0 to {self._vocabulary - 1}")
        return found


class Drafting:
    """Carries over in the first stage, and puts drafts into their rows.

    texts: int32 [blocks + 1, block size], the token of each place in the KV cache.
    """

    def __init__(self, propose: Proposer, texts: torch.Tensor, limits: Limits) -> None:
        self._propose, self._texts, self._limits = propose, texts, limits

    def begin(self, batch: Fields[torch.Tensor], rank: RankSlot, work: Work) -> torch.Tensor:
        """Returns the inputs, int32 [tokens]: those of the host, those carried over, and drafts."""
        rejected = rank.rejected[: len(batch.carry)]
        accepted = count_accepted(batch.carry, rank.arriving, rank.arriving_guesses, self._limits.max_drafts)
        torch.sub(batch.behind, accepted, out=rejected)
        step_back(batch, rejected, self._texts.shape[1])
        inputs = carry_over(batch.token_ids, batch.carry + accepted, rank.arriving)
        return self._fill(inputs, batch, work, rank.guesses)

    def _fill(
        self, inputs: torch.Tensor, batch: Fields[torch.Tensor], work: Work, guesses: torch.Tensor
    ) -> torch.Tensor:
        """Returns the inputs with drafts in their rows. Writes the iteration's tokens to `texts`, and drafts to `guesses`.

        inputs: int32 [tokens]. guesses: as in `count_accepted`, for the tokens that this iteration samples.
        """
        texts, places, num_rows = self._texts.view(-1), batch.kv_indices.long(), len(batch.context_lens)
        texts.index_copy_(0, places, inputs)
        request = (batch.drafts == 0).cumsum(0) - 1  # [rows]
        most = min(self._limits.max_batch, num_rows, work.shape.num_requests)
        numbers = torch.arange(most, device=inputs.device)
        first = torch.searchsorted(request, numbers).clamp(max=num_rows - 1)  # row of each request
        found = self._propose(inputs, batch, work, request, first)
        found = torch.nn.functional.pad(found, (1, 0), value=NO_DRAFT)  # the first row of a request has none
        drafts = found[request.clamp(max=len(numbers) - 1), batch.drafts]
        guesses[1:num_rows].copy_(drafts[1:])
        guesses[num_rows:].fill_(NO_DRAFT)
        is_draft, last = batch.drafts > 0, last_tokens(batch)
        if last is None:
            inputs = torch.where(is_draft, drafts.clamp(min=0), inputs)
        else:
            # Added, not written: rows of padding have the last token of another row.
            inputs.index_add_(0, last, (drafts.clamp(min=0) - inputs[last]) * is_draft)
        texts.index_copy_(0, places, inputs)
        return inputs


def last_tokens(batch: Fields[torch.Tensor]) -> torch.Tensor | None:
    """Returns the place of each row's last token, int32 [rows]; None if each row has one token."""
    if len(batch.positions) == len(batch.context_lens):
        return None
    return (batch.query_starts[1:] - 1).clamp(min=0)


def _rows_of_tokens(batch: Fields[torch.Tensor]) -> torch.Tensor:
    """Returns the row of each token, int64 [tokens]; that of padding is any."""
    tokens = torch.arange(len(batch.positions), device=batch.positions.device)
    if len(tokens) == len(batch.context_lens):
        return tokens
    rows = torch.searchsorted(batch.query_starts, tokens.int(), right=True) - 1
    return rows.clamp(max=len(batch.context_lens) - 1)
