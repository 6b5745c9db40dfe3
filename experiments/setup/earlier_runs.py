"""Memory of the runs that a process has served."""

import gc
import sys


class EarlierRuns:
    """The runs that this process has served: frozen whenever the collector runs by itself, which would keep all of them to the end."""

    def __init__(self) -> None:
        self._most = 0.0

    def collect(self) -> None:
        """Frees what earlier runs have left, once memory has grown by a half since the latest collection. Call while nothing is frozen."""
        if self._most and sys.getallocatedblocks() > self._most:
            gc.collect()
            self._most = 0.0
        self._most = self._most or 1.5 * sys.getallocatedblocks()
