"""Other engines measured on the work of our benchmarks, each in its own environment: nothing here imports Hydra."""
