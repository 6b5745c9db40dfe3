"""Carry-over: tokens that one iteration sampled become inputs of a later one without passing through the host."""

import torch


def carry_over(token_ids: torch.Tensor, carry: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Returns the inputs, int32 [tokens], with the source iteration's tokens in place of the placeholder 0.

    Four operations on fixed shapes, so that they can be captured in a graph: select the source row of each input, zero what
    is not carried, truncate to this iteration's inputs, add.

    Args:
        token_ids: int32 [tokens].
        carry: int32 [tokens or more]; for each input the row of `sampled` that it takes, -1 where it takes none.
        sampled: int32 [rows]; the source iteration's tokens. Rows that no input takes may hold anything.
    """
    selected = sampled[carry.clamp(min=0)]  # [tokens or more]
    zeroed = torch.where(carry >= 0, selected, 0)
    truncated = zeroed[: token_ids.shape[0]]
    return token_ids + truncated
