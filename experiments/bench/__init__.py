"""Benchmarks: each a command, `python -m experiments.bench NAME`, each writing results/<hardware>/NAME.json."""
