"""Request-level batching: NVIDIA FasterTransformer, as described in Orca (Yu et al., OSDI 2022, section 2).

A batch is formed from the waiting requests, its prompts are computed, then all decode together until the last one has
ended; only then is the next batch formed. KV cache is reserved to each request's maximum length. It is the baseline of
SARATHI (arXiv 2308.16369): prefill-only iterations, then decode-only ones.

Differs from FasterTransformer, which computes every request as long as the longest of its batch and returns the batch
as a whole: here a request that has ended is returned at once and costs nothing more. With equal lengths, as in SARATHI,
both are the same. `workload.pad_outputs=B` computes FasterTransformer's way; see "The baselines" in reproduction/papers/README.md for
what it costs.
"""

from itertools import islice

from cbatch import Plan, Request, View, WholePrompts


class RequestLevel(WholePrompts):
    steady = True

    def __init__(self) -> None:
        self._prompts_left: list[Request] = []  # of the batch being formed

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        if not view.running:
            self._prompts_left = list(islice(view.waiting, view.limits.max_batch))
        self._prompts_left = [*filter(view.is_waiting, self._prompts_left)]
        while self._prompts_left:
            request = self._prompts_left[0]
            if not plan.add(request, whole=True, reserve=request.max_tokens):
                break
            self._prompts_left.pop(0)
        if not plan.num_requests:
            self._prompts_left = []  # the KV cache holds no more: the batch is complete
            plan.add_decodes()
        return plan.build()
