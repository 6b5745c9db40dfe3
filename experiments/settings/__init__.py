"""Converts the command line to validated settings: Hydra composition, construction, error lines."""
