"""Simulation: hardware profiles, cost models, and an executor with a virtual clock. Never imports torch."""
