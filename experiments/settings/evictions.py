"""What an eviction has to be, and needs."""

from cbatch import ConfigError, Eviction
from policies.evictions import LRU


def check_eviction(eviction: object, prefix_cache: bool) -> Eviction:
    """Returns the eviction. Raises ConfigError if it is none, orders nothing, or has no cache to order."""
    name = f"eviction={type(eviction).__name__}"
    if not isinstance(eviction, Eviction):
        raise ConfigError(f"{name}: is no eviction; derive it from cbatch.Eviction")
    if type(eviction).keys is Eviction.keys and type(eviction) is not LRU:
        raise ConfigError(f"{name}: defines no keys(blocks, now), so that it would be lru")
    hooks = [hook for hook in dir(Eviction) if hook.startswith("on_")]
    if unknown := [hook for hook in dir(eviction) if hook.startswith("on_") and hook not in hooks]:
        raise ConfigError(f"{name}: {unknown[0]} would never be called; the hooks are {', '.join(hooks)}")
    check_evicts(name, prefix_cache)
    return eviction


def check_evicts(text: str, prefix_cache: bool) -> None:
    if not prefix_cache:
        raise ConfigError(
            f"{text}: has no effect with prefix_cache=false, which keeps no block; give prefix_cache=true"
        )
