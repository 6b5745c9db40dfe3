"""Figures and claims of published papers against our own runs: `python -m reproduction.papers NAME`. See docs/papers.md."""
