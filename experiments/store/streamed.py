"""requests.csv and steps.csv of a run, written while it goes on: with `stream=on`, and for `Server.serve_stream`."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakSet

from cbatch import Request, RunRecord, StepRecord
from cbatch.results.streamed import StreamedRun
from experiments.store.csv_tables import EXTRA, REQUEST_COLUMNS, request_rows, step_lines
from experiments.store.run_folder import REQUESTS, STEPS


class StreamedTables:
    """The two tables in a folder, row for row as a run's; closed at the end of a `with`.

    extra: names of attributes of the requests' own. run: what a summary needs. Requests that arrive by iteration are not
    supported. num_made, alive: requests that `watch` has passed on, and those of them that somebody still holds.
    """

    def __init__(self, folder: Path, extra: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run = StreamedRun()
        self.num_made, self.alive = 0, WeakSet[Request]()
        self._extra = extra
        self._files = [(folder / name).open("w", newline="", encoding="utf-8") for name in (REQUESTS, STEPS)]
        self._requests, steps = map(csv.writer, self._files)
        self._requests.writerow((*REQUEST_COLUMNS, *(f"{EXTRA}{name}" for name in extra)))
        steps.writerow(StepRecord._fields)

    def watch(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            self.num_made += 1
            self.alive.add(request)
            yield request

    def take(self, record: RunRecord) -> None:
        """Appends results that `RunRecord.take` has returned."""
        served = self.run.take(record)
        if record.steps:
            self._files[1].writelines(step_lines(record.steps))
        self._requests.writerows(request_rows(record, served, self._extra))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
