"""cbatch: a research framework for LLM-inference scheduling policies.

This is the public face that a policy or a program imports; it loads neither torch nor Hydra. `simulate`, `serve` and `compare`
run a policy from Python: they load the package `experiments` when they are first read.
"""

from typing import TYPE_CHECKING, Any

from cbatch.cost import BatchShape, CostFunction, CostModel
from cbatch.described import Described
from cbatch.engine import Engine
from cbatch.errors import CbatchError, ConfigError, PlanError, PolicyError, WorkloadError
from cbatch.executor import Executor, Step, StepResult
from cbatch.kv import CachedBlock, Eviction, KVSize, KVView, Name
from cbatch.limits import Limits
from cbatch.model import ModelSpec
from cbatch.plan import Plan, Refusal
from cbatch.plan_builder import PlanBuilder
from cbatch.policy import Policy, WholePrompts, is_steady
from cbatch.record import RunRecord, StepRecord
from cbatch.request import SERVED, FinishReason, Request, Status
from cbatch.request_spec import SLO, RequestSpec, Sampling
from cbatch.server import Server
from cbatch.view import View

if TYPE_CHECKING:
    from experiments.api import compare, serve, simulate

__all__ = ["Engine", "Executor", "KVSize", "Limits", "ModelSpec", "RunRecord", "Server", "Step", "StepRecord"]
__all__ += ["BatchShape", "CostFunction", "CostModel", "Described", "KVView", "Plan", "PlanBuilder"]
__all__ += ["CachedBlock", "Eviction", "Name", "Policy", "Refusal", "View", "WholePrompts"]
__all__ += ["SERVED", "SLO", "FinishReason", "Request", "RequestSpec", "Sampling", "Status", "StepResult"]
__all__ += ["CbatchError", "ConfigError", "PlanError", "PolicyError", "WorkloadError", "is_steady"]
__all__ += ["compare", "serve", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in ("compare", "serve", "simulate"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from experiments import api  # the only arrow that runs upwards, and not before somebody follows it

    return getattr(api, name)
