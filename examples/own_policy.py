"""Runs a policy of one's own beside a built-in one in simulation: `python examples/own_policy.py`."""

from cbatch import Plan, Policy, View
from experiments.api import compare, simulate


class ShortestFirst:
    """Schedules decodes first, then prompt chunks, shortest remaining prompt first."""

    def __init__(self, budget: int = 256) -> None:
        self.budget = budget  # tokens of an iteration

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        for request in sorted([*view.prefilling, *view.waiting], key=lambda request: request.num_ready):
            if plan.num_tokens < self.budget:
                plan.add(request, self.budget - plan.num_tokens, reserve=request.num_tokens)
        return plan.build()


def main() -> None:
    result = simulate(ShortestFirst(), "open_loop", rate=40, requests=100, batch=64)
    print(result)
    print(result.requests[["arrival", "prompt_tokens", "ttft_seconds"]].head(), end="\n\n")
    policies: list[Policy | str] = ["sarathi_serve", ShortestFirst()]
    print(compare(policies, "open_loop", rate=40, requests=100, batch=64, seeds=3, metric="ttft_seconds.p50"))


if __name__ == "__main__":
    main()
