"""Request-level batching: NVIDIA FasterTransformer, as described in Orca (Yu et al., OSDI 2022, section 2).

A batch is formed from the waiting requests. Its prompts are computed, then all requests decode together until the last has
ended; only then is the next batch formed. KV cache is reserved for each request's maximum length. This is the baseline of
SARATHI (arXiv 2308.16369): prefill-only iterations, then decode-only iterations.

Differs from FasterTransformer, which computes every request as long as the longest in its batch and returns the batch as a
whole: here an ended request is returned at once and costs no further time. With equal lengths, as in SARATHI, both are the same.
`workload.pad_outputs=B` computes as FasterTransformer does; for the cost see "The baselines" in reproduction/papers/README.md.
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
