"""The shape of a model, how it is distributed over GPUs, and what a checkpoint says of it. Loads no torch."""

from cbatch.model.spec import DTYPE_BYTES, FAMILIES, Layers, ModelSpec, Rank, split_layers

__all__ = ["DTYPE_BYTES", "FAMILIES", "Layers", "ModelSpec", "Rank", "split_layers"]
