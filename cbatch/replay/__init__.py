"""Recorded runs: what a policy saw and decided, and what another policy would have decided."""
