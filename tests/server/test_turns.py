"""What an engine makes of the messages of a server, without threads: each answer of the engine decides the next messages."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
import pytest
from commands import PATIENCE, summary

from cbatch import SLO, FinishReason, RequestSpec
from cbatch.replay.decisions import Decision
from experiments.server.clients import Inbox, Message, Turn
from experiments.server.engine import serve_clients
from experiments.server.meters import Meters
from experiments.server.settings import read_server_settings
from experiments.settings.compose import compose
from experiments.store.decisions_file import read_decisions
from experiments.store.run_folder import DECISIONS
from experiments.workloads import TraceReplay

SIMULATED = ("policy=sarathi_serve", "backend=sim", "time_scale=20", "batch=64")
REASONS, CACHE = ("length", "abort", "stop"), ("prefix_cache_queries", "prefix_cache_hits")
TIMES = {
    "time_to_first_token": "ttft_seconds",
    "e2e_request_latency": "end_to_end_seconds",
    "request_time_per_output_token": "tpot_seconds",
}
TINY = ("policy=sarathi_serve", "backend=cpu", "model=tiny", "batch=6", "chunk=16", "chunking=fixed")


class Alone(Inbox):
    """An inbox that stays empty while the engine waits: the engine would wait forever."""

    def get(self, block: bool = True, timeout: float | None = None) -> Message:
        assert not self.empty() or (timeout or 0) < 60, "the engine waits forever"
        return super().get(block, timeout)


def spec(id_: int, prompt: Sequence[int], new: int, **fields: Any) -> RequestSpec:
    return RequestSpec(id_, len(prompt), new, arrival_time=perf_counter(), prompt=prompt, **fields)


def converse(folder: Path, answer: Callable[[Any, list[Turn]], Sequence[Message]], *arguments: str) -> list[Any]:
    """Returns all messages of an engine. answer: returns what is said to a message, which comes with the turns so far."""
    settings, inbox, messages = read_server_settings(compose(*arguments, name="server")), Alone(), list[Any]()

    def send(message: Any) -> None:
        messages.append(message)
        assert len(messages) < 1000, "turns without end"
        for said in answer(message, [turn for turn in messages if isinstance(turn, Turn)]):
            inbox.put(said)

    serve_clients(settings, folder, inbox, send)
    return messages


def until_all_ended(specs: Sequence[RequestSpec], gap: float = 0.0) -> Callable[[Any, list[Turn]], Sequence[Message]]:
    """Asks for all, `gap` seconds apart, and closes the door when they have ended."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        num_ended, now = sum(len(turn.ended) for turn in turns), perf_counter()
        asked = [replace(spec, arrival_time=now + gap * place) for place, spec in enumerate(specs)]
        return asked if isinstance(message, int) else [None] if turns and num_ended == len(specs) else []

    return answer


DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")


@pytest.mark.parametrize("drafts", [(), ("drafter=ngram", "drafter.min_n=1", "drafting=fixed")])
def test_turns_have_the_tokens_of_the_outputs_and_the_ends(drafts: tuple[str, ...], tmp_path: Path) -> None:
    """With drafts a request may get several tokens in a turn."""
    specs = [spec(id_, [*range(3 + 20 * id_)], 100 + id_) for id_ in range(3)]
    longest, *turns, figures = converse(tmp_path / "run", until_all_ended(specs), *TINY, *drafts)
    assert longest == 4096 and figures["run"]["requests"] == 3
    streams: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for turn in turns:
        for id_, token in zip(turn.ids, turn.tokens, strict=True):
            streams[id_].append(token)
        for end in turn.ended:
            assert end.output == streams[end.id] and end.finish_reason is FinishReason.LENGTH
    assert {id_: len(tokens) for id_, tokens in streams.items()} == {0: 100, 1: 101, 2: 102}
    assert any(len(set(turn.ids)) < len(turn.ids) for turn in turns) == bool(drafts)
    meters, figures = Meters(), figures.get("drafts", {"drafts": 0, "accepted": 0, "acceptance_length": 1.0})
    for turn in turns:
        meters.count(turn)
    counts = (meters.get_sample_value(f"cbatch:spec_decode_num_{name}_total") for name in DRAFTS)
    drafted, made, accepted = map(int, counts)
    assert (made, accepted) == (figures["drafts"], figures["accepted"]) and (drafted > 0) == bool(drafts)
    assert drafted * (figures["acceptance_length"] - 1) == pytest.approx(accepted)
    lines = (json.loads(line) for line in (tmp_path / "run" / "outputs.jsonl").read_text().splitlines())
    assert {line["id"]: line["output"] for line in lines} == streams
    assert turns[0].state[0] >= 1 and turns[-1].state == (0, 0, 0)
    assert any(turn.state[:2] == (3, 0) and 0 < turn.state[2] < 1 for turn in turns)


def test_times_are_scaled_and_the_run_has_what_was_asked(tmp_path: Path) -> None:
    began = perf_counter()
    specs = [spec(0, [1, 2], 40, client="a", session="s", tier="t", priority=3, slo=SLO(ttft=1)), spec(1, [3], 1)]
    *_, last, figures = converse(tmp_path / "run", until_all_ended(specs, 0.02), *SIMULATED, "decisions=true")
    seconds = perf_counter() - began
    rows = pd.read_csv(tmp_path / "run" / "requests.csv").set_index("id")
    named = ("client", "session", "tier", "priority", "slo_ttft_seconds")
    assert (
        rows.loc[0, [*named]].tolist() == ["a", "s", "t", 3, 1]
        and sorted(rows.output_tokens) == [1, 40]
        and set(last.tokens) == {-1}
    )
    assert rows.arrival[1] - rows.arrival[0] == pytest.approx(20 * 0.02)
    assert 0.1 < rows.end_to_end_seconds[0] < 20 * seconds
    scale, late = figures["about"]["chosen"]["time_scale"].split(" (iterations ended at most ")
    assert scale == "20" and 0 < float(late.split(" s")[0]) < seconds
    assert (tmp_path / "run" / "decisions.jsonl.gz").is_file()


@pytest.mark.parametrize("keys", [(), ("backend.replicas=2",)], ids=["one", "two"])
def test_who_leaves_before_a_plan_is_in_the_decisions(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Request 1 has left when the first plan is made; served again, it has its prompt and all its tokens."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        if isinstance(message, int):
            return [spec(0, [1, 2], 3), spec(1, [3, 4, 5], 7, client="a"), 1]
        return [None] if sum(len(turn.ended) for turn in turns) == 2 and turns[-1].ended else []

    converse(tmp_path / "run", answer, *SIMULATED, *keys, "decisions=true")
    files = read_decisions(tmp_path / "run" / DECISIONS)
    assert [[request.id for request in file.requests] for file in files] in ([[1, 0]], [[0], [1]])
    seen = [event.seen.waiting for file in files for event in file.recorded.events if isinstance(event, Decision)]
    assert keys or not any(1 in waiting for waiting in seen)
    asked = TraceReplay(path=str(tmp_path / "run" / DECISIONS)).requests(None)
    assert [(each.num_prompt_tokens, each.max_new_tokens, each.client) for each in asked] == [(2, 3, None), (3, 7, "a")]


def test_requests_are_cancelled_once_and_the_end_cuts_the_others(tmp_path: Path) -> None:
    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        if isinstance(message, int):
            return [spec(id_, [1, 2], 300) for id_ in range(3)]
        if len(turns) == 3:
            return [1, 1, 7]  # twice, and an unknown one
        return [None, None, 2] if len(turns) == 6 else []

    *turns, figures = converse(tmp_path / "run", answer, *SIMULATED)[1:]
    ends = [[end.id for end in turn.ended] for turn in turns]
    assert [id_ for ended in ends[:6] for id_ in ended] == [1] and sorted(ends[-1]) == [0, 2]
    assert {end.finish_reason for turn in turns for end in turn.ended} == {FinishReason.CANCELLED}
    assert figures["run"]["cancelled_requests"] == 3
    assert (figures["about"]["cut"], figures["about"]["cancelled"]) == (2, 1)
    rows = pd.read_csv(tmp_path / "run" / "requests.csv").set_index("id")
    assert rows.ended[1] < rows.ended[0] == rows.ended[2] and (rows.ended >= rows.arrival).all()
    assert not (rows.ended < rows.last_token).any()


def test_an_idle_engine_waits_for_messages_and_says_nothing(tmp_path: Path) -> None:
    longest, figures = converse(tmp_path / "run", lambda message, turns: [None], *SIMULATED)
    assert longest == 8192 and figures["run"]["requests"] == 0 and figures["about"]["cut"] == 0


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ("Fails", "the policy's fault"),
        ("Idles", "policy Idles, iteration 0: empty plan with 1 waiting and 0 running requests (request 0)"),
    ],
)
def test_a_policy_that_fails_or_idles_ends_the_run_which_is_written(policy: str, problem: str, tmp_path: Path) -> None:
    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        return [spec(0, [1], 500)] if isinstance(message, int) else []

    began = perf_counter()
    arguments = ("policy=orca", f"policy._target_=failing_policies.{policy}", "patience.seconds=0.2", *SIMULATED[1:])
    *_, last, said = converse(tmp_path / "run", answer, *arguments)
    assert problem in said
    assert said.endswith(f"; results: {tmp_path / 'run'}; see about.traceback in its summary.json")
    assert [end.id for end in last.ended] == [0] and perf_counter() - began < PATIENCE
    assert problem in summary(tmp_path / "run")["about"]["error"]
    assert summary(tmp_path / "run")["run"]["cancelled_requests"] == 1


def test_metrics_are_those_of_the_run(tmp_path: Path) -> None:
    """The third of four requests waits for a place, and leaves; the fourth has its prompt."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        ended = [end.id for turn in turns for end in turn.ended]
        if isinstance(message, int):
            first = spec(0, [1, 2], 4)
            others = spec(1, [1, 2, 3], 2), spec(2, range(20), 300)
            return [first, *(replace(other, arrival_time=first.arrival_time) for other in others)]
        if ended and ended[-1] == 2:
            return [spec(3, range(20), 2)] if len(ended) == 3 and turns[-1].ended else []
        return [None] if len(ended) == 4 else [2] if len(turns) == 12 else []

    cached = ("prefix_cache=true", "block_size=4", "batch=2")
    _, *turns, figures = converse(tmp_path / "run", answer, *SIMULATED[:-1], *cached)
    meters, states = Meters(), set()
    for turn in turns:
        meters.count(turn)
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        states.add(tuple(meters.get_sample_value(f"cbatch:{name}") for name in names))
    assert states == {turn.state for turn in turns} and any(state[:2] == (2, 1) for state in states)
    value: Any = meters.get_sample_value
    reasons = {reason: value("cbatch:request_success_total", {"finished_reason": reason}) for reason in REASONS}
    assert reasons == {"length": 3, "abort": 1, "stop": None} and figures["run"]["cancelled_requests"] == 1
    counted = {name: value(f"cbatch:{name}_total") for name in ("prompt_tokens", "generation_tokens", *CACHE)}
    num_tokens = sum(len(turn.ids) for turn in turns)
    assert counted == {"prompt_tokens": 45, "generation_tokens": num_tokens, CACHE[0]: 45, CACHE[1]: 16}
    assert value("cbatch:num_preemptions_total") == value("cbatch:admission_rejections_total") == 0
    for name, group in TIMES.items():
        assert value(f"cbatch:{name}_seconds_count") == 3
        assert value(f"cbatch:{name}_seconds_sum") / 3 == pytest.approx(figures[group]["mean"])


def test_preemptions_and_prompts_are_counted_once(tmp_path: Path) -> None:
    """Two requests of 4 + 40 tokens in a cache of 60: one is preempted, and finds its prompt again. A third leaves amid its prompt, without a token."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        ended = [end.id for turn in turns for end in turn.ended]
        if isinstance(message, int):
            return [spec(0, range(4), 40), spec(1, range(4), 40)]
        if len(ended) == 2 and turns[-1].ended:
            return [spec(2, range(50, 90), 4)]
        return [None] if 2 in ended else [2] if len(ended) == 2 and turns[-1].state[0] else []

    small = ("kv_tokens=60", "max_request_tokens=60", "prefix_cache=true", "block_size=4", "policy=sarathi_serve")
    _, *turns, figures = converse(tmp_path / "run", answer, *SIMULATED[1:], *small, "chunk=16", "chunking=fixed")
    meters = Meters()
    for turn in turns:
        meters.count(turn)
    value = [meters.get_sample_value(f"cbatch:{name}_total") for name in ("num_preemptions", "prompt_tokens", *CACHE)]
    assert figures["run"]["preemptions"] == 1 and figures["prefix_cache"]["cached_again_tokens"] > 0
    assert value == [1, 4 + 4, 4 + 4 + 40, 0], "of an admission again nothing counts"
