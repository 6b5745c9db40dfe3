"""Simulated runs against real ones."""
