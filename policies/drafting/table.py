"""Drafts by the number of decodes: vLLM's `num_speculative_tokens_per_batch_size`. Batches outside all ranges get none."""

from collections.abc import Sequence

from cbatch import ConfigError, PlanBuilder, Request, View
from policies.drafting.rule import DraftingRule


class Table(DraftingRule):
    def __init__(self, ranges: Sequence[Sequence[int]] = ((1, 64, 3), (65, 128, 1), (129, 512, 0))) -> None:
        """ranges: of decodes, (fewest, most, drafts) each, ascending; the default is the example of vLLM's documentation.

        Raises:
            ConfigError: a range is not three whole numbers, is empty or begins within the range before.
        """
        end = 0
        for each in ranges if isinstance(ranges, Sequence) else [ranges]:
            three = isinstance(each, Sequence) and len(each) == 3 and all(type(number) is int for number in each)
            if not three or not end < each[0] <= each[1]:
                raise ConfigError(f"drafting.ranges: {each} is not [fewest, most, drafts] beyond {end} decodes")
            if each[2] < 0:
                raise ConfigError(f"drafting.ranges: {each} has fewer than 0 drafts")
            end = each[1]
        self.ranges = tuple(tuple(each) for each in ranges)

    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> int:
        return next((k for fewest, most, k in self.ranges if fewest <= len(decodes) <= most), 0)
