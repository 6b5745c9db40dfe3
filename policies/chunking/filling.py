"""Large chunks until the batch is full of decodes, smaller ones then: for queues that are complete from the start.

While places are free, large chunks fill them soonest. Once all are taken, a prompt can begin only when a request ends; larger
chunks than those prompts need would then leave iterations without any, whose few tokens use the GPU badly. It is SARATHI's balance
of prompts and decodes (arXiv 2308.16369, section 4.3) applied to the two phases of a batch; the rule is ours.
"""

from cbatch import ConfigError, Limits, View
from policies.chunking.tile_aligned import TileAligned


class Filling(TileAligned):
    steady = True

    def __init__(self, chunk: int, full: int | None = None, share: float = 0.95) -> None:
        """
        Args:
            chunk: total tokens of an iteration, decodes included, a multiple of the tile.
            full: the same, once the batch is full; None: half of it.
            share: of the places in the batch that decode when it counts as full.

        Raises:
            ConfigError: a chunk below 1, `full` not from 1 to `chunk`, or a share outside of (0, 1].
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
