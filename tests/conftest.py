"""Settings of every test: hypothesis draws the same examples in every run, and a slow machine fails none of them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("cbatch", derandomize=True, deadline=None, database=None)
settings.load_profile("cbatch")
