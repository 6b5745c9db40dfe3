"""A chunk of constant size beside the decodes: SARATHI without tile alignment (arXiv 2308.16369, section 4.2).

Decodes are added to the chunk, so 256 prompt tokens and 17 decodes make 273 tokens: three tiles of 128, the last nearly empty.
"""

from cbatch import ConfigError, Limits, View
from policies.chunking.selector import ChunkSelector


class Fixed(ChunkSelector):
    steady = True

    def __init__(self, chunk: int) -> None:
        """chunk: prompt tokens per iteration, at least 1.

        Raises:
            ConfigError: the chunk is below 1.
        """
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ConfigError(f"chunk={chunk} must be a whole number of tokens, at least 1")
        self.chunk = chunk

    def num_tokens(self, view: View, num_decodes: int) -> int:
        return self.chunk

    def check(self, limits: Limits) -> None:
        if self.chunk > limits.max_tokens:
            raise ConfigError(
                f"chunk={self.chunk} exceeds max_tokens={limits.max_tokens} of an iteration; "
                "lower chunk or raise max_tokens"
            )
