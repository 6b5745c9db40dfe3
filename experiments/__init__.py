"""Commands, with their workloads, trace readers and results on disk."""

import atexit
import gc
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import policies  # noqa: F401 - this one: a user's folder of this name comes first where it is the current one

del sys.path[0]

# a command begins; in a notebook or inside vLLM the collector is the process's own
if Path(sys.argv[0]).name in ("-m", "cbatch"):
    gc.set_threshold(200_000)  # allocations: objects of imports, settings and requests are hardly ever garbage
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise numpy starts threads that poll for work
    atexit.register(gc.freeze)  # a process that ends need not look for garbage once more
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not so under nohup, where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load, Ctrl-C ends the process without a traceback
