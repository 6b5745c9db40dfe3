"""Conversations from a prompt file in closed loop: a turn's prompt is the whole conversation so far, with the model's own answers.

line 1   user: u1                                   answer a1, as text
line 2         pause -> user: u1, assistant: a1, user: u2        through the chat template      answer a2
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from cbatch import Request, RequestSpec, WorkloadError
from cbatch.arrivals import Listed
from cbatch.facts import facts_of
from cbatch.request import SERVED
from experiments.text import up_to_stop

Said = Mapping[str, str]  # a message: role and content


class Line(NamedTuple):
    """A turn. spec: its request without a prompt. says: its messages; if empty, `prompt` is the only turn's prompt. pause: seconds."""

    spec: RequestSpec
    says: Sequence[Said]
    prompt: Sequence[int]
    pause: float


class Dialogues(Listed):
    """The arrivals of turns, each a pause after the previous answer. A session ends at a turn that is not served, or is too long."""

    follow_ends = True

    def __init__(
        self,
        sessions: Sequence[Sequence[Line]],
        encode: Callable[[int, Sequence[Said]], list[int]],
        decode: Callable[[Sequence[int]], str],
        most: float = inf,
    ) -> None:
        """
        Args:
            encode: returns the tokens of a line's prompt, by its id and all messages.
            most: maximum tokens of a turn, answer included; a session ends before a longer turn.
        """
        super().__init__()
        self._encode, self._decode, self._most = encode, decode, most
        self._turns = {line.spec.id: (session, turn) for session in sessions for turn, line in enumerate(session)}
        self._said: dict[int, list[Said]] = {}  # messages of each turn's prompt, by its id
        firsts = [spec for session in sessions if (spec := self._spec(session, 0, [])) is not None]
        if not firsts:
            raise WorkloadError(f"workload: no prompt fits max_length={most:g}; raise it")
        self.facts = replace(facts_of(map(Request.from_spec, firsts)), number=None, is_open=True)
        self.facts.stated.update(("turns", "pauses"))
        self.add([Request.from_spec(spec) for spec in firsts])

    def ended(self, request: Request) -> None:
        super().ended(request)
        session, turn = self._turns[request.id]
        said = self._said.pop(request.id)
        if turn + 1 < len(session) and request.finish_reason in SERVED:
            answer, _ = up_to_stop(self._decode(request.output), request.stop_strings)
            spec = self._spec(session, turn + 1, [*said, {"role": "assistant", "content": answer}])
            if spec is not None:
                time = (request.finished_at or 0.0) + session[turn + 1].pause
                self.add([Request.from_spec(replace(spec, arrival_time=time))])

    def _spec(self, session: Sequence[Line], turn: int, before: Sequence[Said]) -> RequestSpec | None:
        """Returns the request of a turn after these messages; None if it is too long."""
        line = session[turn]
        said = self._said[line.spec.id] = [*before, *line.says]
        prompt = self._encode(line.spec.id, said) if line.says else line.prompt
        if len(prompt) + line.spec.max_new_tokens > self._most:
            return None
        spec = replace(line.spec, prompt=prompt, num_prompt_tokens=len(prompt))
        if spec.session is None:
            return spec
        follows = (session[turn - 1].spec.id,) if turn else ()
        return replace(spec, turn=turn, last=turn == len(session) - 1, follows=follows, pause=line.pause)
