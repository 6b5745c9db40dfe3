"""T-LRU (arXiv 2510.15152): evicts blocks that a conversation's next turn can recompute within its first-token objective."""

from collections.abc import Sequence

from cbatch import CachedBlock, ConfigError, Eviction


class TLRU(Eviction):
    """Evicts blocks first without which the next turn has at most `threshold` tokens to compute."""

    depends_on = ("turns",)

    def __init__(self, threshold: int, next_prompt: int) -> None:
        """threshold: tokens that a turn may compute before its first token. next_prompt: new tokens predicted for a turn.

        Raises:
            ConfigError: a number is below 0.
        """
        if threshold < 0 or next_prompt < 0:
            raise ConfigError(f"threshold={threshold} and next_prompt={next_prompt} must be at least 0 tokens")
        self.threshold, self.next_prompt = threshold, next_prompt

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[bool]:
        spare = self.next_prompt - self.threshold
        return [block.start < max(block.holder_tokens + spare, 0) for block in blocks]
