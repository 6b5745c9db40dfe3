"""requests.csv and steps.csv of a run, written while it goes on, for `Server.serve_stream`."""

import csv
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from cbatch import FinishReason, RunRecord, StepRecord
from cbatch.results.metrics import Served, arrival_of
from experiments.store.csv_tables import REQUEST_COLUMNS, request_rows, step_rows
from experiments.store.run_folder import REQUESTS, STEPS


class StreamedTables:
    """The two tables in a folder, row for row as a run's; closed at the end of a `with`. Keeps nothing but counts.

    Requests that arrive by iteration, and attributes of their own, are not provided for.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.num_requests = self.num_iterations = self.num_tokens = 0
        self._files = [(folder / name).open("w", newline="", encoding="utf-8") for name in (REQUESTS, STEPS)]
        self._requests, self._steps = map(csv.writer, self._files)
        self._requests.writerow(REQUEST_COLUMNS)
        self._steps.writerow(StepRecord._fields)

    def take(self, record: RunRecord) -> None:
        """Appends results that `RunRecord.take` has returned."""
        if record.steps:
            self._steps.writerows(step_rows(record.steps))
        self._requests.writerows(request_rows(record, _without_tokens(record)))
        self.num_requests += len(record.requests)
        self.num_iterations += len(record.steps)
        self.num_tokens += sum(step.num_sampled for step in record.steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()


def _without_tokens(record: RunRecord) -> Served:
    """The requests that have ended; their tokens, which may have been taken before, are left out."""
    requests = [request for request in record.requests if request.finish_reason is not FinishReason.REJECTED]
    first, last = np.array([request.token_times for request in requests], np.float64).reshape(-1, 2).T
    return Served(
        id=np.array([request.id for request in requests], np.int64),
        arrival=np.array([arrival_of(request, ()) for request in requests], np.float64),
        admitted=np.array([request.admitted_at for request in requests], np.float64),
        first_token=first,
        last_token=last,
        prompt_tokens=np.array([request.num_prompt_tokens for request in requests], np.int64),
        output_tokens=np.array([request.num_output_tokens for request in requests], np.int64),
        token_ids=np.zeros(0, np.int64),
        token_times=np.zeros(0),
    )
