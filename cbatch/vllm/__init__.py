"""Policies inside vLLM: its own scheduler, steered by a policy's plans. Imports vLLM, of the versions in `support.TESTED`.

    vllm serve MODEL --scheduler-cls experiments.vllm.PolicyScheduler

takes the policy from the CBATCH variable; `make_scheduler` takes a policy as it is.
"""

from cbatch.vllm.scheduler import make_scheduler
from cbatch.vllm.settings import Adapter, Counts

__all__ = ["Adapter", "Counts", "make_scheduler"]
