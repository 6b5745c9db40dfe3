"""What an iteration, and a drafter that is a model, expect of a model."""

from typing import Protocol

import torch

from cbatch.model import Layers
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Extents, Fields
from cbatch.runtime.gpu.ranks import Steps


class Model(Protocol):
    """Computes a stage's layers, or one rank's share of them; see `PagedModel`."""

    layers: Layers
    cache: PagedCache
    hidden_size: int

    def steps(
        self, inputs: torch.Tensor, batch: Fields[torch.Tensor], bounds: Extents, leaving: torch.Tensor | None = None
    ) -> Steps[torch.Tensor]: ...

    def choose(self, logits: torch.Tensor, out: torch.Tensor) -> Steps[None]: ...
