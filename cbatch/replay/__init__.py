"""Recorded decisions of a run, and the decisions that another policy would have made."""
