"""Chunk and decodes together fill whole tiles of the matrix products: SARATHI, section 4.4 (arXiv 2308.16369).

`chunk` is the total number of tokens: with 17 decodes and chunk = 256, 239 prompt tokens are computed.
"""

from cbatch import ConfigError, Limits, View
from policies.chunking.fixed import Fixed


class TileAligned(Fixed):
    steady = True
    inlined = True  # the usual selector: sarathi(chunk=256)

    def num_tokens(self, view: View, num_decodes: int) -> int:
        return max(self.chunk - num_decodes, 0)

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if self.chunk % limits.tile:
            nearest = max(round(self.chunk / limits.tile), 1) * limits.tile
            raise ConfigError(
                f"chunk={self.chunk} must be a multiple of the tile of {limits.tile} tokens; "
                f"use chunk={nearest}, or chunking=fixed"
            )
        if self.chunk < limits.max_batch:
            raise ConfigError(
                f"chunk={self.chunk} leaves no room for a prompt beside {limits.max_batch - 1} decodes; "
                "raise chunk or lower batch"
            )
