"""Recorded conversations in closed loop: a request that continues an earlier one waits for the answer that this run gives.

recorded   |= prompt p, answer a =|  pause  |= prompt p a u =|            again   |= p, answer b =|  pause  |= p b u =|
"""

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cbatch import RequestSpec, WorkloadError
from cbatch.arrivals import Arrivals
from cbatch.replay.decisions import StepEnd
from cbatch.request import spec_of
from experiments.store.decisions_file import read_decisions
from experiments.store.run_folder import OUTPUTS
from experiments.workloads.base import Vocabulary, Workload
from experiments.workloads.scripts import SYSTEM, Session, Turn, places_of, prompts_of
from experiments.workloads.sessions import ClosedLoop, Sessions


class _Recorded(NamedTuple):
    """A request, the seconds at which it ended, and its answer's tokens."""

    spec: RequestSpec
    end: float
    answer: Sequence[int]

    @property
    def prompt(self) -> Sequence[int]:
        return self.spec.prompt or ()

    def said_in(self, other: "_Recorded") -> tuple[int, set[int]] | None:
        """Returns how many leading tokens of another prompt repeat this prompt and answer, and the answer's tokens that it omits.

        None: the other request does not continue this one, since it repeats less than half of the answer.
        """
        size, found, dropped = len(self.prompt), len(self.prompt), set[int]()
        if self.end > other.spec.arrival_time or other.prompt[:size] != self.prompt:
            return None
        for token in self.answer:
            if other.prompt[found : found + 1] == [token]:
                found += 1
            else:
                dropped.add(token)
        continues = size < len(other.prompt) > found and 2 * (found - size) >= len(self.answer)
        return (found, dropped) if continues else None


@dataclass(frozen=True, kw_only=True, repr=False)
class RecordedSessions(ClosedLoop):
    """The conversations of a decisions file, such as a server's. Requests that name a session, or continue each other, form a session.

    Sessions begin at their recorded times; with `sessions`, that many at a time. In a prompt that continues another request, this
    run's answer replaces the recorded answer; the request follows it after the recorded pause. With real tokens, the recorded limits
    and stop tokens end an answer; in simulation, its recorded length does.
    """

    path: str
    arrivals: None = None

    def __post_init__(self) -> None:
        if self.slo is not None:  # `capacity` and `arena` always set it
            problem = "requests keep their objectives, and have no replications for a capacity or an arena"
            remedy = "leave out workload.slo, or give workload=chat or workload=agents"
            raise WorkloadError(f"workload=recorded_sessions: {problem}; {remedy}")
        Workload.__post_init__(self)
        if self.steady:
            raise WorkloadError("workload.steady=true: recorded sessions begin at their first turn; leave it out")

    @property
    def unread(self) -> tuple[str, Collection[str]]:
        names = [key.name for key in fields(Workload) if key.name != "seed"]
        return "recorded sessions, whose requests are as recorded", names

    def scripts(self) -> Sequence[Session]:
        prompts = [turn.prompt for turns in self._turns_of.values() for turn in turns]
        first = min(prompts, key=len)
        shared = sum(1 for _ in takewhile(lambda tokens: len({*tokens}) == 1, zip(*prompts, strict=False)))
        system = min(shared, len(first) - 1) if len(self._turns_of) > 1 else 0
        return [Session(name, [*self._script(turns, system)], system) for name, turns in self._turns_of.items()]

    def source(self, vocabulary: Vocabulary | None) -> Arrivals:
        sessions, specs, tails = self._fitting(), list[RequestSpec](), list[Sequence[int]]()
        for session in sessions:
            recorded = self._turns_of[session.name]
            said = zip(recorded, session.turns, prompts_of(session, len(specs)), strict=False)
            places = places_of(session, len(specs))
            for place, (of, script, prompt) in zip(places, said, strict=False):
                tails.append(of.prompt[len(of.prompt) - script.new :])
                length = len(of.answer) if vocabulary is None else None
                place |= {"num_prompt_tokens": prompt.num_tokens, "texts": prompt.texts, "prompt": None}
                specs.append(replace(of.spec, id=len(specs), true_new_tokens=length, **place))
        first = self._turns_of[sessions[0].name][0].prompt
        starts = [self._turns_of[session.name][0].spec.arrival_time for session in sessions]

        def draw(text: int, number: int) -> list[int]:
            return [*(first if text == SYSTEM else tails[text - 1])[:number]]

        begins = np.zeros(self.sessions).tolist() if self.sessions else starts
        if vocabulary is None:
            return Sessions(sessions, specs, begins)
        whole = [each._replace(turns=[turn._replace(kept=None) for turn in each.turns]) for each in sessions]
        arrivals = Sessions(whole, specs, begins, draw, dropped=self._dropped)
        arrivals.facts.is_open = True  # answers may be longer than the recorded ones
        return arrivals

    @cached_property
    def _turns_of(self) -> dict[str, list[_Recorded]]:
        """Returns the requests of each session in the order of their arrivals."""
        ends, specs, outputs = dict[int, float](), dict[int, RequestSpec](), self._outputs()
        for file in read_decisions(Path(self.path)):
            specs |= {request.id: spec_of(request) for request in file.requests}
            for step in (event for event in file.recorded.events if isinstance(event, StepEnd)):
                ends |= dict.fromkeys(step.received, step.record.received_at)
        sessions = defaultdict[str, list[_Recorded]](list)
        for spec in sorted(specs.values(), key=lambda spec: (spec.arrival_time, spec.id)):
            if not spec.prompt:
                remedy = "record a server, or serve the workload of the recorded run again"
                raise WorkloadError(f"{self.path}: request {spec.id} has no token ids; {remedy}")
            if spec.id in ends:
                request = _Recorded(spec, ends[spec.id], outputs.get(spec.id, ()))
                earlier = (name for name, turns in sessions.items() if any(turn.said_in(request) for turn in turns))
                name = next(earlier, f"request {spec.id}") if spec.session is None else spec.session
                sessions[name].append(request)
        if not sessions:
            raise WorkloadError(f"{self.path}: no request received a token; record a run that serves some")
        return dict(sessions)

    def _outputs(self) -> dict[int, list[int]]:
        """Returns the tokens of each answer, from the file beside the decisions."""
        file = Path(self.path).with_name(OUTPUTS)
        try:
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            return {line["id"]: line["output"] for line in lines}
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "give the decisions file of a run of real tokens, in its run's folder"
            raise WorkloadError(f"{file}: cannot be read ({error}); {remedy}") from error

    @cached_property
    def _dropped(self) -> set[int]:
        """Returns tokens of answers that clients do not send back, such as stop tokens."""
        pairs = (pair for turns in self._turns_of.values() for pair in combinations(turns, 2))
        return set().union(*(said[1] for before, later in pairs if (said := before.said_in(later)) is not None))

    def _script(self, turns: Sequence[_Recorded], system: int) -> Sequence[Turn]:
        script = list[Turn]()
        for place, request in enumerate(turns):
            ended = [before for before in range(place) if turns[before].end <= request.spec.arrival_time]
            latest = max(ended, key=lambda before: turns[before].end, default=None)
            since = turns[0].spec.arrival_time if latest is None else turns[latest].end
            said = {before: part[0] for before in ended if (part := turns[before].said_in(request)) is not None}
            repeats = max(said, key=said.__getitem__, default=None)
            known = system if repeats is None else said[repeats]
            after = tuple(sorted({before for before in (latest, repeats) if before is not None}))
            new, pause = len(request.prompt) - known, request.spec.arrival_time - since
            kept = None if repeats is None else known
            script.append(Turn(new, len(request.answer), after, pause, repeats, kept))
        return script
