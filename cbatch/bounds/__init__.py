"""Lower bounds that no policy can beat, for any requests and cost model. See docs/bounds.md."""

from cbatch.bounds.lower import Bounds
from cbatch.bounds.minorants import Minorant, minorants_of
from cbatch.bounds.shared import Findable, findable_tokens

__all__ = ["Bounds", "Findable", "Minorant", "findable_tokens", "minorants_of"]
