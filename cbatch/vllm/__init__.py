"""Policies inside vLLM: a policy's plans steer vLLM's scheduler. Imports vLLM, in the versions of `support.TESTED`.

    vllm serve MODEL --scheduler-cls experiments.vllm.PolicyScheduler

reads the policy from the CBATCH variable; `make_scheduler` takes a policy object.
"""

try:
    from cbatch.vllm.scheduler import make_scheduler
    from cbatch.vllm.settings import Adapter, Counts
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise
    problem = "cbatch.vllm: vLLM is not installed; pip install vllm, in a version of docs/vllm.md"
    raise ModuleNotFoundError(problem, name="vllm") from None

__all__ = ["Adapter", "Counts", "make_scheduler"]
