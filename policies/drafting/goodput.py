"""The number of drafts with the most expected tokens per second of the batch: goodput (SmartSpec, TurboSpec; arXiv 2406.14066).

    k* = argmax  (sum over decodes of 1 + S_1 + ... + S_k) / (draft(n, k) + iteration(k drafts each))

0 is a candidate, so speculation ends where it costs more than it yields. Of several best numbers the least is taken.
Differs from the paper, where S_i = a^i with one moving mean a and times come from a line fitted to measured iterations: here survivals
are measured by position and request, and the cost model predicts.
"""

from collections.abc import Sequence

import numpy as np

from cbatch import PlanBuilder, Request, View
from policies.drafting.rule import DraftingRule, Floats, survivals_of_decodes
from policies.shared.step_times import shape_of


class Goodput(DraftingRule):
    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> int:
        shape, num_decodes = shape_of(plan.plan), len(decodes)
        seconds = [
            view.cost.predict(shape.with_drafts(k * num_decodes)) + view.drafts.seconds(num_decodes, k)
            for k in range(view.drafts.most + 1)
        ]
        return best_number(survivals_of_decodes(view, decodes), seconds)


def best_number(survivals: Floats, seconds: Sequence[float]) -> int:
    """Returns the drafts per decode with the most tokens per second. survivals: [decodes, drafts]. seconds: with 0, 1, ... drafts each."""
    expected = len(survivals) + np.concatenate(([0.0], np.cumsum(survivals.sum(axis=0))))
    return int(np.argmax(expected / np.array(seconds)))
