"""Commands and what they need: workloads, trace readers, results on disk. Nothing imports this package."""

import atexit
import gc

gc.set_threshold(200_000)  # allocations: what imports, settings and requests make is hardly ever garbage
atexit.register(gc.freeze)  # a process that ends need not look for garbage once more
