"""The shape of a model, its distribution over GPUs, and its checkpoint's configuration and vocabulary. Does not import torch."""

from cbatch.model.spec import DTYPE_BYTES, FAMILIES, Layers, ModelSpec, Rank, split_layers

__all__ = ["DTYPE_BYTES", "FAMILIES", "Layers", "ModelSpec", "Rank", "split_layers"]
