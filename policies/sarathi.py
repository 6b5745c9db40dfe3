"""Chunked prefills with decode-maximal batches: SARATHI (Agrawal et al., arXiv 2308.16369, sections 4.1 to 4.4).

Every iteration holds one chunk of one prompt and all decodes, at most B - 1, which piggyback at the marginal cost of a few
more rows in the matrix products. KV cache is reserved for the maximum length at admission.

Differs from the paper: a prompt's last chunk is the rest of the prompt, so a prompt's last iteration may not fill its tiles.
"""

from itertools import chain, islice

from cbatch import Described, Limits, Plan, Request, View, is_steady
from policies.chunking import ChunkSelector


class Sarathi(Described):
    def __init__(self, chunking: ChunkSelector) -> None:
        self.chunking = chunking

    @property
    def steady(self) -> bool:
        return is_steady(self.chunking)

    def check(self, limits: Limits) -> None:
        self.chunking.check(limits)

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()  # a request in prefill leaves at most B - 1 others
        for request in islice(chain(view.prefilling, view.waiting), 1):
            plan.add(request, self.chunking.num_tokens(view, plan.num_tokens), reserve=request.max_tokens)
        return plan.build()

    def on_finish(self, request: Request) -> None:
        self.chunking.observe(request)
