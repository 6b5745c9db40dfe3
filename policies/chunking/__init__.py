"""Chunk selectors: how many prompt tokens an iteration computes beside its decodes."""

from policies.chunking.filling import Filling
from policies.chunking.fixed import Fixed
from policies.chunking.pd_aware import PDAware
from policies.chunking.selector import ChunkSelector
from policies.chunking.slack import Slack
from policies.chunking.tile_aligned import TileAligned

__all__ = ["ChunkSelector", "Filling", "Fixed", "PDAware", "Slack", "TileAligned"]
