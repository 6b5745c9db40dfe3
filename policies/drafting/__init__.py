"""Drafting rules: how many tokens to draft for each decode."""

from policies.drafting.adaptive import Adaptive
from policies.drafting.ema import Ema
from policies.drafting.fixed import Fixed
from policies.drafting.goodput import Goodput
from policies.drafting.part import WithDrafts
from policies.drafting.rule import DraftingRule
from policies.drafting.table import Table
from policies.drafting.throughput_aware import ThroughputAware

__all__ = ["Adaptive", "DraftingRule", "Ema", "Fixed", "Goodput", "Table", "ThroughputAware", "WithDrafts"]
