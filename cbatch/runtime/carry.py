"""Carry-over: tokens sampled in one iteration become inputs of a later iteration without passing through the host."""

import torch


def carry_over(token_ids: torch.Tensor, carry: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Returns the inputs, int32 [tokens], with the source iteration's tokens in place of the placeholder 0.

    A graph can capture the two operations, since their shapes are fixed.

    Args:
        token_ids: int32 [tokens].
        carry: int32 [tokens]; for each input the index of its token in `sampled`, or 0 if the input is not carried over.
        sampled: int32 [1 + rows]; a 0, then the source iteration's tokens. Tokens without an index in `carry` may be anything.
    """
    return token_ids + sampled.index_select(0, carry)
