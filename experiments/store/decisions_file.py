"""The file of a run's decisions, `decisions.jsonl.gz`: one JSON object per line, written during the run.

    {"run": ...}        limits, KV cache, the command line
    {"request": ...}    a request of the workload, by the fields of `cbatch.RequestSpec`, and its `arrival_iteration`
    {"plan": ...}       a `cbatch.replay.decisions.Decision`, by its fields
    {"step": ...}       a `cbatch.replay.decisions.StepEnd`, by its fields
    {"finish": ...}     the output tokens of a request that vLLM has served

With several replicas each line also has the number of its `replica`.
Together with the policy and the cost model in config.yaml, the file suffices to replay the run without workload files, weights or GPUs.
"""

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from cbatch import ConfigError, Engine, Request, RequestSpec
from cbatch.errors import ReplayError, ResultsError
from cbatch.replay.decisions import Decision, Recorded, StepEnd, record_decisions
from cbatch.request import spec_of
from cbatch.validation import read


class DecisionsFile(NamedTuple):
    """The contents of a file, of one replica.

    overrides: of the command line, such as `policy=orca`, and --config-dir. cut: the file is truncated.
    """

    recorded: Recorded
    requests: list[Request]
    overrides: list[str]
    cut: bool


class DecisionsWriter:
    """Writes the lines of a file during the run. If the process is killed, the file is truncated.

    Raises ResultsError: from every method, if the file cannot be written or a request's `extra` cannot be written as JSON.
    """

    def __init__(self, path: Path, overrides: Sequence[str] = ()) -> None:
        self._path, self._overrides, self._lock, self._place = path, overrides, Lock(), dict[str, int]()
        with _writing(path):
            self._file = gzip.open(path, "wt", encoding="utf-8", compresslevel=4)  # noqa: SIM115 - closed by `close`

    def of_replica(self, replica: int) -> "DecisionsWriter":
        """Returns a writer to the same file; replicas may write at the same time."""
        writer = copy(self)
        writer._place = {"replica": replica}
        return writer

    def begin(self, recorded: Recorded) -> None:
        """Writes the facts about the run. recorded: its events are ignored."""
        run = {**recorded._asdict(), "limits": asdict(recorded.limits), "overrides": list(self._overrides)}
        del run["events"], run["iterations"]
        self._iterations = recorded.iterations
        self._write(run=run)

    def request(self, spec: RequestSpec) -> None:
        try:
            fields = {**asdict(replace(spec, prompt=None)), "arrival_iteration": self._iterations.get(spec.id, 0)}
            if spec.prompt is not None:
                fields["prompt"] = list(map(int, spec.prompt))
            self._write(request={name: value for name, value in fields.items() if value not in (None, {}, ())})
        except (TypeError, ValueError) as error:  # asdict copies `extra`, which may hold any object
            problem = f"request {spec.id}: extra cannot be written as JSON ({error})"
            raise ResultsError(f"{self._path}: {problem}; give plain values, or set decisions=false") from error

    def event(self, event: Decision | StepEnd) -> None:
        if isinstance(event, StepEnd):
            self._write(step=event._asdict())
        else:
            self._write(plan={**event._asdict(), "seen": event.seen._asdict(), "decided": event.decided._asdict()})

    def finish(self, id_: int, num_output_tokens: int) -> None:
        """Writes the end of a request whose spec does not state its output length."""
        self._write(finish={"id": id_, "num_output_tokens": num_output_tokens})

    def close(self) -> None:
        with _writing(self._path):
            self._file.close()

    def _write(self, **line: Any) -> None:
        text = json.dumps({**line, **self._place}) + "\n"
        with self._lock, _writing(self._path):  # otherwise, inside a call of the policy, an error would name the policy
            self._file.write(text)


@contextmanager
def write_decisions(path: Path, engines: Sequence[Engine], overrides: Sequence[str]) -> Iterator[None]:
    """Writes the decisions that engines make inside the `with` to a file, up to an error if one occurs.

    Requests that are known at the start are written first, the others as they arrive.
    """
    with closing(DecisionsWriter(path, overrides)) as whole, ExitStack() as recording:
        for replica, engine in enumerate(engines):
            writer = whole.of_replica(replica) if len(engines) > 1 else whole
            recording.enter_context(_recorded(engine, writer))
        yield


def _recorded(engine: Engine, writer: DecisionsWriter) -> AbstractContextManager[None]:
    known = {request.id for request in engine.arrivals.known}

    def write(request: Request) -> None:
        if request.id not in known:
            writer.request(spec_of(request))

    writer.begin(Recorded.of(engine))
    for request in engine.arrivals.known:
        writer.request(spec_of(request))
    return record_decisions(engine, writer.event, write)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror or error}; make room, or set decisions=false") from error


class _Replica:
    """What a file holds of one replica. run: the fields of the line "run"."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {}
        self.requests, self.iterations, self.events = list[Request](), dict[int, int](), list[Decision | StepEnd]()

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Adds a line."""
        match kind:
            case "run":
                self.run = fields
            case "request":
                spec, iteration = read_spec(fields)
                self.requests.append(Request.from_spec(spec))
                self.iterations |= {spec.id: iteration} if iteration else {}
            case "plan":
                self.events.append(read(Decision, fields, "plan."))
            case "step":
                self.events.append(read(StepEnd, fields, "step."))

    def file(self, cut: bool) -> DecisionsFile:
        overrides: list[str] = read(list[str], self.run.pop("overrides"), "run.overrides")
        recorded = read(Recorded, {**self.run, "events": ()}, "run.")
        recorded = recorded._replace(events=self.events, iterations=self.iterations)
        return DecisionsFile(recorded, self.requests, overrides, cut)


def read_decisions(path: Path) -> list[DecisionsFile]:
    """Reads a file, up to where it is truncated; returns its contents by replica. Raises ReplayError if it is missing or malformed."""
    replicas: defaultdict[int, _Replica] = defaultdict(_Replica)
    cut = False
    for number, (kind, fields, replica) in enumerate(_lines(path), 1):
        try:
            replicas[replica].add(kind, fields)
        except (ConfigError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ReplayError(f"{path}, line {number}: is damaged ({error}); record the run again") from error
        cut |= kind == "cut"
    try:
        return [part.file(cut) for _, part in sorted((replicas or {0: _Replica()}).items())]
    except (ConfigError, TypeError, KeyError, AttributeError) as error:
        raise ReplayError(f"{path}: its first line does not describe a run ({error}); record the run again") from error


def _lines(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Yields kind, fields and replica of each line, and "cut" at the end if a killed writer has left the file truncated."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                content = dict(json.loads(line).items())
                replica = content.pop("replica", 0)
                ((kind, fields),) = content.items()
                yield kind, fields, replica
    except EOFError:
        yield "cut", None, 0
    except FileNotFoundError as error:
        raise ReplayError(f"{path}: no such file; record a run's decisions with decisions=true") from error
    except (OSError, ValueError, AttributeError, RecursionError, zlib.error) as error:
        raise ReplayError(f"{path}: cannot be read ({error}); record the run again") from error


def read_spec(fields: dict[str, Any]) -> tuple[RequestSpec, int]:
    """Returns the request of a line, and the iteration at which it arrives. Raises ConfigError and KeyError for a damaged line."""
    iteration: int = read(int, fields.pop("arrival_iteration"), "arrival_iteration")
    if (chat := fields.pop("conversation", None)) is not None:  # of an older version
        fields["texts"] = [(chat, 0)]
    return read(RequestSpec, fields), iteration
