"""Measures a hardware profile through the runtime that serves: `python -m experiments.profile model=...`."""
