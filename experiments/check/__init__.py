"""Checks a policy for properties from the literature, and finds the smallest schedule that violates each."""
