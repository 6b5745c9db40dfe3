"""Checks policies, evictions and routers for properties, and finds a small counterexample for each that is violated."""
