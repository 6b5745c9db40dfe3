"""Figures and claims of published papers against our own runs: `python -m reproduction.papers NAME`. README.md beside this file explains them."""
