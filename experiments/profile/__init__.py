"""Measures a hardware profile with the runtime that serves requests: `python -m experiments.profile model=...`."""
