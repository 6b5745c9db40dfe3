"""The interface of chunk selectors."""

from abc import ABC, abstractmethod

from cbatch import Described, Limits, Request, View


class ChunkSelector(Described, ABC):
    """Chooses the prompt tokens of each iteration. May keep state, updated by `observe`.

    `steady = True` in a selector's own class declares that the number stays the same until a request arrives or ends: see `Policy`.
    """

    @abstractmethod
    def num_tokens(self, view: View, num_decodes: int) -> int:
        """Returns the prompt tokens for an iteration that already holds `num_decodes` decodes; may be 0."""

    def check(self, limits: Limits) -> None:
        """Called once, before the run.

        Raises:
            ConfigError: the chunk does not fit these limits.
        """

    def observe(self, request: Request) -> None:
        """Called when a request has ended and its lengths are known."""
