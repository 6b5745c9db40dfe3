"""The token budget of policies that take a number, not a chunk selector."""

from cbatch import ConfigError


def check_budget(budget: object) -> None:
    """Raises ConfigError unless the value is a whole number."""
    if not isinstance(budget, int):
        raise ConfigError(f"policy.budget={budget}: give a number of tokens; chunk=auto is for policies with chunking")
