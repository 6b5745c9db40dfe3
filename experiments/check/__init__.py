"""Checks a policy for the properties that the literature names, and finds the smallest schedule that violates one."""
