"""Benchmarks: each a command, `python -m reproduction.bench NAME`, each writing reproduction/results/<hardware>/NAME.json."""
