"""Computes metrics, summaries and timelines from a record."""
