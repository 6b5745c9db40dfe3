"""How likely drafts are accepted, by their place after the newest token: see `Drafts.survivals`."""

import numpy as np
from numpy.typing import NDArray

from cbatch.request import NEVER, Ints

WEIGHT = 0.125  # weight of the latest outcome in a request's moving means


class Shares:
    """The moving means of `Drafts.survivals`. A request has a row, which a later request may take over.

    The means of the run are quotients, by place: of the drafts accepted, and of those whose predecessors were; each count begins as 1.
    """

    def __init__(self, most: int) -> None:
        self._run = np.ones((2, most))
        self._of_rows, self._owners = np.ones((0, most)), np.zeros(0, np.int64)

    @property
    def counts(self) -> NDArray[np.float64]:
        """Returns the drafts of the run that were accepted, and those whose predecessors were, [2, places]."""
        return self._run - 1

    def survivals(self, row: int, id_: int) -> list[float]:
        known = 0 <= row < len(self._owners) and self._owners.item(row) == id_
        shares = self._of_rows[row] if known else self._run[0] / self._run[1]
        survivals: list[float] = shares.cumprod().tolist()
        return survivals

    def note(self, rows: Ints, ids: Ints, drafts: Ints, accepted: Ints) -> None:
        """Takes in outcomes, [requests] each."""
        if (more := int(rows.max(initial=-1)) + 1 - len(self._owners)) > 0:
            self._owners = np.append(self._owners, np.full(more, NEVER))
            self._of_rows = np.concatenate([self._of_rows, np.ones((more, self._run.shape[1]))])
        new = rows[self._owners[rows] != ids]
        self._of_rows[new], self._owners[rows] = self._run[0] / self._run[1], ids
        places = np.arange(self._run.shape[1])
        tried = (places < drafts[:, None]) & (places <= accepted[:, None])  # a draft after a rejected one was not tried
        succeeded = places < accepted[:, None]
        self._of_rows[rows] += WEIGHT * tried * (succeeded - self._of_rows[rows])
        self._run += (succeeded & tried).sum(0), tried.sum(0)
