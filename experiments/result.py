"""What a run has given: its figures, and its tables as frames."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch import RunRecord
from cbatch.results.metrics import Served
from cbatch.results.summary import summarize
from experiments.store.text import run_text, title_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a run has given. Figures and frames are made when they are first read; `print` shows the figures.

    record: the iterations, and the requests in the order of their ends, each with its tokens (`output`); empty if streamed.
    served: the times of the requests that were served, as columns.
    about: where the figures come from. measures: further arguments of `summarize`.
    regret: returns the figures of `bounds=true`; None without.
    streamed: the folder in which a streamed run has its tables.
    """

    record: RunRecord
    served: Served
    about: Mapping[str, Any]
    measures: Mapping[str, Any]
    regret: Callable[[], Mapping[str, float]] | None = None
    streamed: Path | None = None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures by group and name, as summary.json has them; docs/metrics.md defines them."""
        figures = summarize(self.record, requests=self.served, **self.measures)
        return {"about": self.about, **figures, **({"regret": self.regret()} if self.regret else {})}

    @cached_property
    def requests(self) -> "pd.DataFrame":
        """A row for each request, in the order of their ends: the columns of requests.csv, seconds and tokens."""
        from experiments.store.tables import frame_of_requests, read_requests  # loads pandas

        cached = self.measures.get("num_evicted_blocks") is not None
        return read_requests(self.streamed) if self.streamed else frame_of_requests(self.record, self.served, cached)

    @cached_property
    def steps(self) -> "pd.DataFrame":
        """A row for each iteration: the columns of steps.csv, those of `cbatch.StepRecord`; times in seconds."""
        from experiments.store.tables import frame_of_steps, read_steps

        return read_steps(self.streamed) if self.streamed else frame_of_steps(self.record)

    def __str__(self) -> str:
        return run_text(self.summary)

    def __repr__(self) -> str:
        return f"<Result of {title_of(self.about)}>"
