"""Figures and claims of published papers against our own runs: `python -m experiments.paper NAME`. See docs/papers.md."""
