"""Policies inside vLLM: a policy's plans steer vLLM's scheduler. `make_scheduler` imports vLLM, in the versions of `support.TESTED`.

    vllm serve MODEL --scheduler-cls experiments.vllm.PolicyScheduler

reads the policy from the CBATCH variable; `make_scheduler` takes a policy object.
"""

from typing import TYPE_CHECKING, Any

from cbatch.vllm.settings import Adapter, Counts

if TYPE_CHECKING:
    from cbatch.vllm.scheduler import make_scheduler


def __getattr__(name: str) -> Any:
    if name != "make_scheduler":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        from cbatch.vllm.scheduler import make_scheduler
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        problem = "cbatch.vllm: vLLM is not installed; pip install vllm, in a version of docs/vllm.md"
        raise ModuleNotFoundError(problem, name="vllm") from None
    return make_scheduler


__all__ = ["Adapter", "Counts", "make_scheduler"]
