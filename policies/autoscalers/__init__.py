"""Autoscalers: how many replicas of each pool there are, decided from dated reports."""

from policies.autoscalers.arrivals import Arrivals
from policies.autoscalers.fixed import Fixed
from policies.autoscalers.wva_v1 import WVAv1
from policies.autoscalers.wva_v2 import WVAv2

__all__ = ["Arrivals", "Fixed", "WVAv1", "WVAv2"]
