"""The file of a run's decisions, `decisions.jsonl.gz`: one JSON object per line, written during the run.

    {"run": ...}        limits, KV cache, the command line
    {"request": ...}    a request of the workload, by the fields of `cbatch.RequestSpec`, and its `arrival_iteration`
    {"plan": ...}       a `cbatch.replay.decisions.Decision`, by its fields
    {"step": ...}       a `cbatch.replay.decisions.StepEnd`, by its fields
    {"finish": ...}     the output tokens of a request that vLLM has served

Together with the policy and the cost model in config.yaml, the file suffices to replay the run without workload files, weights or GPUs.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from cbatch import SLO, ConfigError, Engine, Request, RequestSpec, Sampling
from cbatch.errors import ReplayError, ResultsError
from cbatch.replay.decisions import Decision, Recorded, StepEnd, record_decisions
from cbatch.request import spec_of
from cbatch.validation import read


class DecisionsFile(NamedTuple):
    """The contents of a file. overrides: of the command line, such as `policy=orca`, and --config-dir. cut: the file is truncated."""

    recorded: Recorded
    requests: list[Request]
    overrides: list[str]
    cut: bool


class DecisionsWriter:
    """Writes the lines of a file during the run. If the process is killed, the file is truncated.

    Raises:
        ResultsError: from every method, if the file cannot be written or a request's `extra` cannot be written as JSON.
    """

    def __init__(self, path: Path, overrides: Sequence[str] = ()) -> None:
        self._path, self._overrides = path, overrides
        with _writing(path):
            self._file = gzip.open(path, "wt", encoding="utf-8", compresslevel=4)  # noqa: SIM115 - closed by `close`

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
        with _writing(self._path):  # otherwise, inside a call of the policy, an error would name the policy
            self._file.write(json.dumps(line) + "\n")


@contextmanager
def write_decisions(
    path: Path, engine: Engine, requests: Iterable[Request], overrides: Sequence[str]
) -> Iterator[DecisionsWriter]:
    """Writes the decisions that an engine makes inside the `with` to a file, up to an error if one occurs.

    requests: requests known at the start; pass later requests to the yielded writer.
    """
    with closing(DecisionsWriter(path, overrides)) as writer:
        writer.begin(Recorded.of(engine))
        for request in requests:
            writer.request(spec_of(request))
        with record_decisions(engine, writer.event):
            yield writer


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror or error}; make room, or set decisions=false") from error


def read_decisions(path: Path) -> DecisionsFile:
    """Reads a file, up to where it is truncated. Raises ReplayError if it is missing or malformed."""
    run: dict[str, Any] = {}
    cut = False
    requests, iterations = list[Request](), dict[int, int]()
    events: list[Decision | StepEnd] = []
    for number, (kind, fields) in enumerate(_lines(path), 1):
        try:
            match kind:
                case "run":
                    run = fields
                case "request":
                    spec, iteration = read_spec(fields)
                    requests.append(Request.from_spec(spec))
                    iterations |= {spec.id: iteration} if iteration else {}
                case "plan":
                    events.append(read(Decision, fields, "plan."))
                case "step":
                    events.append(read(StepEnd, fields, "step."))
                case "cut":
                    cut = True
        except (ConfigError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ReplayError(f"{path}, line {number}: is damaged ({error}); record the run again") from error
    try:
        overrides = run.pop("overrides")
        recorded = read(Recorded, {**run, "events": ()}, "run.")._replace(events=events, iterations=iterations)
    except (ConfigError, TypeError, KeyError, AttributeError) as error:
        raise ReplayError(f"{path}: its first line does not describe a run ({error}); record the run again") from error
    return DecisionsFile(recorded, requests, overrides, cut)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the kind and the fields of each line, and "cut" at the end if a killed writer has left the file truncated."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                ((kind, fields),) = json.loads(line).items()
                yield kind, fields
    except EOFError:
        yield "cut", None
    except FileNotFoundError as error:
        raise ReplayError(f"{path}: no such file; record a run's decisions with decisions=true") from error
    except (OSError, ValueError, AttributeError, RecursionError, zlib.error) as error:
        raise ReplayError(f"{path}: cannot be read ({error}); record the run again") from error


def read_spec(fields: dict[str, Any]) -> tuple[RequestSpec, int]:
    """Returns the request of a line, and the iteration at which it arrives."""
    for name in ("id", "num_prompt_tokens", "max_new_tokens"):
        read(int, fields[name], name)
    iteration: int = read(int, fields.pop("arrival_iteration"), "arrival_iteration")
    fields["arrival_time"] = read(float, fields["arrival_time"], "arrival_time")
    if (chat := fields.pop("conversation", None)) is not None:  # of an older version
        fields["texts"] = ((chat, 0),)
    fields |= {"texts": tuple(map(tuple, fields.get("texts", ())))}
    of_several = ("stop_tokens", "stop_strings", "prefix_hashes", "follows")
    fields |= {name: tuple(fields[name]) for name in of_several if name in fields}
    fields |= {name: made(**fields[name]) for name, made in (("slo", SLO), ("sampling", Sampling)) if name in fields}
    return RequestSpec(**fields), iteration
