"""The evidence: figures and claims of papers, benchmarks, simulation against measurement, and what they wrote.

Runs in a clone of the repository. Nothing imports it.
"""

RESULTS = "reproduction/results"
"""Folder of stored results, from the root of the repository."""

BENCH, VALIDATION = "python -m reproduction.bench", "python -m reproduction.validation"
"""Commands, as results files name them."""
