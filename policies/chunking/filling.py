"""Large chunks until the batch is full of decodes, then smaller chunks: for queues that are complete from the start.

While places are free, large chunks fill them fastest. Once all places are taken, a prompt can begin only when a request ends. Chunks
larger than these prompts require would leave iterations without prompts, whose few tokens use the GPU poorly. The rule is ours: it
applies SARATHI's balance of prompts and decodes (arXiv 2308.16369, section 4.3) to the two phases of a batch.
"""

from cbatch import ConfigError, Limits, View
from policies.chunking.tile_aligned import TileAligned


class Filling(TileAligned):
    steady = True

    def __init__(self, chunk: int, full: int | None = None, share: float = 0.95) -> None:
        """
        Args:
            chunk: total tokens of an iteration, including decodes; a multiple of the tile.
            full: total tokens once the batch is full; None: half of `chunk`.
            share: share of decoding places from which on the batch counts as full.

        Raises:
            ConfigError: the chunk is below 1, `full` is not from 1 to `chunk`, or the share is outside (0, 1].
        """
        super().__init__(chunk)
        full = chunk // 2 if full is None else full
        if isinstance(full, bool) or not isinstance(full, int) or not 1 <= full <= chunk:
            raise ConfigError(f"chunking.full={full} must be a whole number of tokens from 1 to chunk={chunk}")
        if not 0 < share <= 1:
            raise ConfigError(f"chunking.share={share} must be above 0 and at most 1")
        self.full, self.share = full, share

    def num_tokens(self, view: View, num_decodes: int) -> int:
        is_full = num_decodes >= self.share * view.limits.max_batch
        return max((self.full if is_full else self.chunk) - num_decodes, 0)

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if self.full % limits.tile or self.full < limits.max_batch:
            needed = f"a multiple of the tile of {limits.tile} tokens and at least batch={limits.max_batch}"
            raise ConfigError(f"chunking.full={self.full} must be {needed}")
