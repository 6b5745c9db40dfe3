"""The interface of chunk selectors."""

from abc import ABC, abstractmethod

from cbatch import Described, Limits, Request, View


class ChunkSelector(Described, ABC):
    """Chooses the prompt tokens of each iteration. May keep state, updated by `observe`.

    `steady = True` in its own class says that the number stays the same until a request arrives or ends: see `Policy`.
    """

    @abstractmethod
    def num_tokens(self, view: View, num_decodes: int) -> int:
        """Prompt tokens for an iteration that already holds `num_decodes` decodes; 0 for none."""

    def check(self, limits: Limits) -> None:
        """Called once, before anything runs.

        Raises:
            ConfigError: the chunk does not fit these limits.
        """

    def observe(self, request: Request) -> None:
        """Called when a request has ended and its lengths are known."""
