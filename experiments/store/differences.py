"""Text about a comparison: ratio, difference, and whether the two can be told apart."""

import math

from experiments.store.intervals import Compared
from experiments.store.text import format_number

_MOST = 1_000_000  # replications


def disagree(found: Compared) -> bool:
    """Whether 1 is in the ratio's interval and 0 not in that of the difference, or the other way round."""
    return not math.isnan(found.ratio[0]) and found.apart == (found.ratio[1] <= 1 <= found.ratio[2])


def ratio_text(found: Compared) -> str:
    value, low, high = found.ratio
    return "-" if math.isnan(value) else f"{times(value)} [{low:.4g}, {high:.4g}]"


def times(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.4g}x"


def difference_text(found: Compared) -> str:
    value, low, high = found.difference
    return f"{signed(value)} [{format_number(low)}, {format_number(high)}]"


def signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{format_number(value)}"


def not_apart(found: Compared) -> str:
    """Says that the two cannot be told apart, and how many replications would tell them apart if the difference is this large."""
    if found.difference == (0, 0, 0):
        return "equal in every replication"
    number = f"about {math.ceil(found.needed):,}" if found.needed < _MOST else f"more than {_MOST:,}"
    return f"cannot be told apart; {number} replications would (80% power at this difference)"
