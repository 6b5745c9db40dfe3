"""Commands and what they need: workloads, trace readers, results on disk. Nothing imports this package."""
