"""Lower bounds that no policy can beat, for any requests and cost model. See docs/bounds.md."""

from cbatch.bounds.lower import Bounds
from cbatch.bounds.minorants import Minorant, minorants_of

__all__ = ["Bounds", "Minorant", "minorants_of"]
