"""Commands, with their workloads, trace readers and results on disk."""

import atexit
import gc
import os
import sys

# `python -m experiments.run` begins; in a notebook or inside vLLM the collector is the process's own
if sys.argv[0] == "-m":
    gc.set_threshold(200_000)  # allocations: objects of imports, settings and requests are hardly ever garbage
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise numpy starts threads that poll for work
    atexit.register(gc.freeze)  # a process that ends need not look for garbage once more
