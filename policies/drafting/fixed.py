"""The same number of drafts for every decode: vLLM's `num_speculative_tokens`, SGLang's `--speculative-num-steps`."""

from collections.abc import Sequence

from cbatch import PlanBuilder, Request, View
from policies.drafting.rule import DraftingRule, check_counts


class Fixed(DraftingRule):
    def __init__(self, k: int = 3) -> None:
        check_counts("k", k)
        self.k = k

    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> int:
        return self.k
