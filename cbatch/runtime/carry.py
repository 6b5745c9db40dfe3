"""Carry-over: tokens that one iteration sampled become inputs of a later one without passing through the host."""

import torch


def carry_over(token_ids: torch.Tensor, carry: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Returns the inputs, int32 [tokens], with the source iteration's tokens in place of the placeholder 0.

    Two operations on fixed shapes, which a graph can capture.

    Args:
        token_ids: int32 [tokens].
        carry: int32 [tokens]; for each input the place in `sampled` that it takes, 0 where it takes none.
        sampled: int32 [1 + rows]; a 0, then the source iteration's tokens. Those that no input takes may be anything.
    """
    return token_ids + sampled.index_select(0, carry)
