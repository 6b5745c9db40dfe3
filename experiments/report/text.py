"""Text that commands print: a run on one line, a comparison, a figure."""

import json
import math
from collections.abc import Mapping
from typing import Any

from experiments.report.headings import flat
from experiments.report.intervals import Compared, Mean, significant

Summary = Mapping[str, Any]


def run_line(name: str, summary: Summary) -> str:
    """Describes one run of a sweep on one line."""
    rate = format_number(summary["throughput"]["total_tokens_per_second"])
    mark = "simulated" if summary["about"]["simulated"] else "measured"
    return f"{name}: {rate} tokens/s, TTFT P50 {format_number(summary['ttft_seconds']['p50'])} s ({mark})"


def count_text(number: int, noun: str) -> str:
    """Returns a number with its noun, as in 1 request or 2 requests."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_mean(mean: Mean, is_share: bool = False) -> str:
    """Returns a mean, with half the width of its interval if it has one; with the ends, cut at 0 and 100, of a share's that passes them."""
    low, high = mean.mean - mean.half, mean.mean + mean.half
    if is_share and (low < 0 or high > 100):
        return f"{format_number(mean.mean)} [{format_number(max(low, 0))}, {format_number(min(high, 100))}]"
    half = f"{mean.half:,.0f}" if mean.half >= 99.5 else f"{mean.half:.2g}"
    return format_number(mean.mean) + (f" ± {half}" if mean.half > 0 else "")


def disagree(compared: Compared) -> bool:
    """Returns whether the intervals disagree: only one of them excludes equality (ratio 1, difference 0)."""
    low, high = compared.ratio[1:]
    return low <= high and compared.significant == (low <= 1 <= high)


def values_text(compared: Compared) -> list[str]:
    """Returns the ratio and the difference as text."""
    ratio, difference = compared.ratio[0], compared.difference[0]
    ratio_text = "-" if math.isnan(ratio) else f"{_ratios(compared)[0]}x"
    return [ratio_text, "+" * (difference > 0) + format_number(difference)]


def _ratios(compared: Compared) -> list[str]:
    """Returns the ratio and its ends with the fewest significant digits, at least four, in which only a ratio of 1 reads as 1."""
    apart = [value for value in compared.ratio if value != 1]
    digits = next(digits for digits in range(4, 18) if all(f"{value:.{digits}g}" != "1" for value in apart))
    return [f"{value:.{digits}g}" for value in compared.ratio]


def intervals_text(compared: Compared, most: float = math.inf, error: float = 0.0) -> list[str]:
    """Returns the ratio and the difference with their intervals, and whether the difference is significant.

    most: the largest difference that there can be, as between shares; the ends of its interval are cut there.
    error: of simulated ratios; the remark says if the difference is smaller.
    """
    ratio, difference = values_text(compared)
    low, high = (format_number(min(max(end, -most), most)) for end in compared.difference[1:])
    ratio += f" [{', '.join(_ratios(compared)[1:])}]" * (ratio != "-")
    remark = "significant" if compared.significant else not_significant(compared)
    remark += f"; below {error:.0%}" * (compared.significant and 1 / (1 + error) < compared.ratio[0] < 1 + error)
    return [ratio, f"{difference} [{low}, {high}]", remark]


def not_significant(compared: Compared) -> str:
    """Returns the remark that a difference is not significant, and how many replications would show a difference of this size."""
    if compared.difference == (0, 0, 0):
        return "equal in every replication"
    number = f"about {math.ceil(compared.needed):,}" if compared.needed < 1_000_000 else "more than 1,000,000"
    return f"not significant; {number} replications would show this difference (80% power)"


def figures_text(summary: Summary) -> str:
    """Returns all figures of a run as text, which is equal for runs that differ only by rounding."""
    figures = flat({key: value for key, value in summary.items() if key != "about"})
    rounded = {key: significant(value) if isinstance(value, float) else value for key, value in figures}
    return json.dumps(rounded, sort_keys=True, default=str)


def format_number(value: float | None, factor: float = 1.0) -> str:
    """Returns value x factor with three significant digits, or all digits before the decimal point: 30,960 or 4.76 or 0.0384."""
    if value is None or math.isnan(value):
        return "-"
    scaled = factor * value
    return f"{scaled:,.0f}" if abs(scaled) >= 999.5 else f"{scaled:.3g}"


def format_share(value: float | None) -> str:
    """Returns a share in percent with one decimal; small shares above 0 with two significant digits."""
    if value is None or math.isnan(value):
        return "-"
    return f"{100 * value:.2g}%" if 0 < value < 0.0005 else f"{100 * value:.1f}%"
