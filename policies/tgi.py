"""Prompts of several waiting requests at once, when enough wait or have waited long enough: Hugging Face TGI's router.

While nothing runs, an iteration computes the prompts of the first waiting requests. While a batch runs, waiting requests pause it
for their prompts if they are at least `waiting_served_ratio` times the running ones, or if `max_waiting_tokens` tokens have passed
since the last prompts; then every running request decodes at least once. First come, first served. KV cache is reserved for
the longest output, so nothing is preempted.

Source: `batching_task` and `State::next_batch` of backends/v2 in huggingface/text-generation-inference, and its launcher's defaults.

Differs from the code: a prompt above `max_batch_prefill_tokens` is computed alone, and a request above `max_batch_total_tokens` runs
alone, where TGI's validation refuses both. Prompt tokens are counted exactly, where TGI rounds each prompt up to whole blocks.
TGI's newer backend (v3), which computes prompts in chunks and reuses prefixes, is not modelled.
"""

from math import ceil, inf

from cbatch import ConfigError, Plan, PlanBuilder, Request, View, WholePrompts


class Tgi(WholePrompts):
    steady = False

    def __init__(
        self,
        waiting_served_ratio: float = 0.3,
        max_batch_prefill_tokens: int = 4096,
        max_batch_total_tokens: int | None = None,
        max_waiting_tokens: int = 20,
    ) -> None:
        """
        waiting_served_ratio: waiting over running requests from which the waiting ones may pause the batch.
        max_batch_prefill_tokens: most prompt tokens of an iteration. max_batch_total_tokens: most tokens, prompts and longest
            outputs, of all running requests; None: the size of the KV cache.
        max_waiting_tokens: tokens of the running batch after which one waiting request is enough.
        """
        limits = (max_batch_prefill_tokens, max_waiting_tokens, max_batch_total_tokens or 1)
        if not 0 <= waiting_served_ratio < inf or min(limits) < 1 or max_batch_total_tokens == 0:
            raise ConfigError("policy: need a finite waiting_served_ratio of at least 0, and limits of at least 1")
        self.waiting_served_ratio, self.max_waiting_tokens = waiting_served_ratio, max_waiting_tokens
        self.max_batch_prefill_tokens, self.max_batch_total_tokens = max_batch_prefill_tokens, max_batch_total_tokens
        self._latest = -1  # iteration of prompts
        self._joined = False  # those prompts paused a batch, which decodes next
        self._admits, self._before = list[Request](), (-1, False)  # of the last plan; these two before it

    def plan(self, view: View) -> Plan:
        self.steady = not view.waiting
        if self._admits and all(map(view.is_waiting, self._admits)):  # in vain
            self._latest, self._joined = self._before
        self._admits = []
        plan = self._prompts(view) if view.waiting else None
        if plan is None:
            plan = view.plan()
            plan.add_decodes()
            self._joined &= not plan.num_requests
        return plan.build()

    def _prompts(self, view: View) -> PlanBuilder | None:
        """Returns an iteration of prompts, or None if the running batch goes on."""
        running, least = len(view.running), 1
        if running and self._joined:
            return None
        if running and view.iteration - self._latest < self.max_waiting_tokens:
            least = max(int(running * self.waiting_served_ratio), 1)
        if len(view.waiting) < least:
            return None
        plan, total = view.plan(), sum(_reserved(request, view) for request in view.running)
        for request in view.waiting:
            total += _reserved(request, view)
            if not self._fits(request, plan, total, view) or not plan.add(
                request, whole=True, reserve=request.max_tokens
            ):
                break
        if plan.num_requests < least:
            return None
        self._admits, self._before = plan.plan.requests, (self._latest, self._joined)
        self._latest, self._joined = view.iteration, running > 0
        return plan

    def _fits(self, request: Request, plan: PlanBuilder, total: int, view: View) -> bool:
        """Returns whether a request fits into the budgets. total: tokens of the running requests, of the plan's and of this one."""
        if not plan.num_requests and not view.running:
            return True
        most = self.max_batch_total_tokens or view.kv.num_tokens
        prompts = plan.num_tokens + request.num_ready
        return total <= most and (prompts <= self.max_batch_prefill_tokens or not plan.num_requests)


def _reserved(request: Request, view: View) -> int:
    """Returns the tokens of a request's longest output and prompt, in whole blocks."""
    return ceil(request.max_tokens / view.kv.block_size) * view.kv.block_size
