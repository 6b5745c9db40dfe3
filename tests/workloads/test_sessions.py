"""Sessions in closed loop: what each turn waits for, repeats and finds, with and without token values."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LLAMA, make_executor

from cbatch import CostFunction, Engine, KVSize, Limits, RunRecord, Server, WorkloadError
from cbatch.kv.hashes import prompt_hashes
from cbatch.request import SERVED
from cbatch.sim import SimExecutor
from experiments.workloads import AllAtOnce, Chat, ClosedLoop, FixedLengths, Session, Turn
from experiments.workloads.scripts import draw_open, resumed
from experiments.workloads.sessions import words
from policies.evictions import LRU
from policies.orca import Orca

SECOND = CostFunction(lambda shape: 1.0)
COPIED = [0]  # tokens that real requests have found in host memory


@dataclass(frozen=True, kw_only=True, repr=False)
class Scripted(ClosedLoop):
    """Sessions as given."""

    given: Sequence[Session]
    sessions: int | None = 1
    arrivals: None = None

    def scripts(self) -> Sequence[Session]:
        return self.given


def serve(
    workload: ClosedLoop,
    block_size: int = 1,
    blocks: int = 10_000,
    batch: int = 64,
    tokens: int = 64,
    cost: CostFunction = SECOND,
) -> RunRecord:
    server = Server(
        SimExecutor(cost), Limits(batch, tokens, 10_000), cost, KVSize(blocks, block_size), prefix_cache=LRU()
    )
    return server.engine(Orca(), workload.source(None)).run()


@pytest.mark.parametrize(("block", "found"), [(1, 5), (2, 4), (4, 4), (8, 0)])
def test_a_turn_finds_what_entered_the_cache(block: int, found: int) -> None:
    """4 + 2 tokens from 0 s on, one second per iteration: the last answer's token never enters. A pause of 3 s, 3 new tokens."""
    script = Session("s", [Turn(4, 2), Turn(3, 1, (0,), 3.0, 0)])
    first, second = serve(Scripted(given=[script]), block, batch=1).requests
    assert (first.finished_at, second.arrival_time, second.num_prompt_tokens) == (2.0, 5.0, 9)
    assert second.num_cached_tokens == found


def test_a_join_waits_for_the_last_end_and_its_own_pause() -> None:
    """A sub-agent runs beside the main turn 1; turn 3 follows both, and repeats the main turn."""
    turns = [
        Turn(4, 1),
        Turn(2, 1, (0,), 1.0, 0),
        Turn(3, 5, (0,), 0.5),
        Turn(1, 1, (1, 2), 2.0, 1, extra={"tool": "x"}),
    ]
    main, side, agent, join = sorted(
        serve(Scripted(given=[Session("s", turns, system=2)])).requests, key=lambda each: each.id
    )
    assert [each.num_prompt_tokens for each in (main, side, agent, join)] == [6, 9, 5, 11]
    assert (main.finished_at, side.arrival_time, agent.arrival_time) == (1.0, 2.0, 1.5)
    assert side.finished_at is not None and agent.finished_at is not None and side.finished_at < agent.finished_at
    assert join.arrival_time == agent.finished_at + 2.0
    assert [each.num_cached_tokens for each in (main, side, agent, join)] == [0, 6, 2, 9]
    assert [(each.turn, each.last, each.pause) for each in (main, join)] == [(0, False, 0.0), (3, True, 2.0)]
    assert [each.follows for each in (main, side, agent, join)] == [(), (0,), (0,), (1, 2)]
    assert join.extra == {"tool": "x"}


def test_as_many_sessions_at_a_time_as_asked_for() -> None:
    scripts = [Session(str(number), [Turn(1, 1 + number), Turn(1, 1, (0,), 1.0, 0)]) for number in range(5)]
    record = serve(Scripted(given=scripts, sessions=2))
    ends = {(each.session, each.turn): each.finished_at for each in record.requests}
    begins = {each.session: each.arrival_time for each in record.requests if not each.turn}
    assert begins == {"0": 0, "1": 0, "2": ends["0", 1], "3": ends["1", 1], "4": ends["2", 1]}


@pytest.mark.parametrize(("too_long", "served"), [("clip", [2, 1, 2]), ("drop", [2, 2])])
def test_a_session_longer_than_the_positions(too_long: Any, served: list[int]) -> None:
    """The second session's second turn has 3 + 1 + 6 + 1 tokens, and its third does not come either."""
    long = Session("long", [Turn(3, 1), Turn(6, 1, (0,), 0.0, 0), Turn(1, 1, (1,))])
    short = [Session(name, [Turn(3, 1), Turn(5, 1, (0,), 0.0, 0)]) for name in "ab"]
    workload = Scripted(given=[short[0], long, short[1]], too_long=too_long).within(10)
    names = [each.session for each in serve(workload).requests]
    assert [names.count(name) for name in dict.fromkeys(names)] == served
    with pytest.raises(WorkloadError, match="session long: turn 1 has 11 tokens"):
        serve(Scripted(given=[long], max_length=10))


def test_a_turn_that_is_not_served_ends_its_session() -> None:
    """Turn 1's client leaves after a second; a sub-agent that runs goes on, but nothing follows, and the next session begins."""
    turns = [Turn(1, 9), Turn(1, 30, (), 0.0), Turn(1, 1, (0, 1)), Turn(1, 1, (0,), 50.0)]
    scripts = [Session("left", turns), Session("next", [Turn(1, 1)])]
    record = serve(Scripted(given=scripts, timeout=20.0))
    ended = {(each.session, each.turn): each for each in record.requests}
    assert set(ended) == {("left", 0), ("left", 1), ("left", 3), ("next", 0)}
    assert ended["left", 1].finish_reason not in SERVED and ended["left", 3].finish_reason in SERVED
    assert ended["next", 0].arrival_time == ended["left", 3].finished_at


@pytest.mark.parametrize("timeout", [None, 0.5])
def test_a_steady_start_is_warm(timeout: float | None) -> None:
    """All sessions have said something when the measured part begins, even if clients wait for less; each turn finds all but its new tokens."""
    workload = Chat(num_requests=48, turns=(6, 6), sessions=4, steady=True, system=8, pause=5.0, arrivals=AllAtOnce(), seed=3,
                    lengths=FixedLengths(length=12, pd_ratio=1), timeout=timeout)  # fmt: skip
    arrivals = workload.source(None)
    assert arrivals.facts.num_warming == 4
    server = Server(SimExecutor(SECOND), Limits(64, 640, 10_000), SECOND, KVSize(10_000, 1), prefix_cache=LRU())
    requests = server.engine(Orca(), arrivals).run().requests
    warming = [each for each in requests if each.turn == 0 and (each.session or "").startswith("open")]
    assert {each.num_output_tokens for each in warming} == {1} and set(requests[:4]) == set(warming)
    measured = max(each.finished_at or 0.0 for each in warming)
    assert all(each.arrival_time >= measured for each in requests[4:])
    turns = {each.session: each.num_prompt_tokens for each in warming}
    assert len(set(turns.values())) > 1, "the sessions are at different turns"
    left = sum(6 - (number - 8) // 12 for number in turns.values())
    assert timeout is not None or len(requests) == 4 + left + 4 * 6 < 48, "one request for all turns before"
    later = [each for each in requests[4:] if each.turn and each.admitted_at]
    assert {each.num_prompt_tokens - each.num_cached_tokens for each in later} <= {6, 7}


EVEN = [((which + 0.5) / 60, (share + 0.5) / 100) for share in range(100) for which in range(60)]
"""Draws of a steady start that are spread evenly: shares of them are probabilities."""


def test_an_open_session_is_a_random_point_of_a_long_run() -> None:
    """Pauses of 1 and 4 s, or of 1 s: 5 of 6 points lie in the former. Three pauses end in 6 s: 0.5 per second from the begin on."""
    long = Session("long", [Turn(4, 1), Turn(2, 1, (0,), 1.0, 0), Turn(3, 1, (1,), 4.0, 1)])
    short = Session("short", [Turn(1, 1), Turn(1, 1, (0,), 1.0, 0)])
    found = [session.turns[1:] for session in draw_open([long, short], EVEN)]
    kinds = [(len(turns), turns[0].new) for turns in found]
    shares = {(2, 2): 1 / 6, (1, 3): 4 / 6, (1, 1): 1 / 6}
    assert {kind: kinds.count(kind) / len(kinds) for kind in shares} == pytest.approx(shares, abs=1e-3)
    left = np.array([turns[0].pause for turns in found])
    for seconds, ended in ((0.1, 0.05), (0.5, 0.25), (1.0, 0.5), (2.0, 4 / 6), (4.0, 1.0)):
        assert np.mean(left <= seconds) == pytest.approx(ended, abs=2e-3)


def test_turns_without_pauses_are_equally_often_open() -> None:
    session = Session("s", [Turn(1, 1), *(Turn(1, 1, (place,)) for place in range(3))])
    found = [session.turns[1:] for session in draw_open([session], EVEN[::60])]
    assert [sum(len(turns) == number for turns in found) for number in (4, 3, 2, 1)] == [25] * 4
    assert {turn.pause for turns in found for turn in turns} == {0.0}


def test_a_sub_agent_that_has_ended_is_not_served_again() -> None:
    """At 5 s the sub-agent has ended at 1 s, and 15 s of the main turn's pause are left. The join waits for the main turn, then 3 s."""
    turns = [Turn(4, 1), Turn(2, 1, (0,), 20.0, 0), Turn(9, 5, (0,), 1.0), Turn(1, 1, (1, 2), 3.0, 1)]
    history, main, join = resumed(Session("s", turns, system=2), 5.0).turns
    assert history == Turn(9 + 5, 1), "without the system prompt; the longest said so far"
    assert (main.new, main.after, main.repeats, main.kept) == (2, (0,), 0, 7) and main.pause == pytest.approx(15.0)
    assert (join.new, join.after, join.repeats, join.kept, join.pause) == (1, (0, 1), 1, None, 3.0)


@pytest.mark.long
def test_a_steady_start_has_no_opening_burst() -> None:
    """Four turns and three pauses of 1,000 s on average: 4/3 arrivals per session and pause. Answers take few of these seconds."""
    counts, ends = list[Any](), np.arange(9) * 250.0
    for seed in range(24):
        chat = Chat(num_requests=300, turns=(4, 4), sessions=32, steady=True, system=0, pause=1000.0, arrivals=AllAtOnce(),
                    lengths=FixedLengths(length=2, pd_ratio=1), seed=seed)  # fmt: skip
        requests = serve(chat).requests
        begin = max(each.finished_at or 0.0 for each in requests[:32])
        counts.append(np.histogram([each.arrival_time - begin for each in requests[32:]], ends)[0] / (32 * 0.25))
    for mean, deviation in zip(np.mean(counts, axis=0), np.std(counts, axis=0), strict=True):
        assert abs(mean - 4 / 3) < 3 * deviation / np.sqrt(24) < 0.4


# -- any session ------------------------------------------------------------------------------------------------------


@st.composite
def scripts(draw: st.DrawFn) -> Session:
    turns = list[Turn]()
    for number in range(draw(st.integers(1, 7))):
        earlier = st.integers(0, number - 1) if number else st.nothing()
        after = tuple(sorted(draw(st.sets(earlier, max_size=3)))) if number else ()
        repeats = draw(st.none() | st.sampled_from(after)) if after else None
        kept = None if repeats is None else draw(st.none() | st.integers(1, 12))
        pause = draw(st.sampled_from([0.0, 0.5, 4.0]))
        turns.append(Turn(draw(st.integers(1, 6)), draw(st.integers(1, 5)), after, pause, repeats, kept))
    return Session(draw(st.uuids()).hex, turns, draw(st.integers(0, 5)))


class Spoken:
    """The independent model: what each turn says, token by token."""

    def __init__(self, sessions: Sequence[Session], draw: Any) -> None:
        self.prompts: list[list[Any]] = []
        for session in sessions:
            first = len(self.prompts)
            for place, turn in enumerate(session.turns):
                id_ = first + place
                before = [*draw(0, session.system)]
                if turn.repeats is not None:
                    said = first + turn.repeats
                    before = [
                        *self.prompts[said],
                        *(("answer", said, k) for k in range(session.turns[turn.repeats].output)),
                    ]
                    before = before[: len(before) if turn.kept is None else turn.kept]
                self.prompts.append([*before, *draw(1 + id_, turn.new)])


@pytest.mark.long
def test_any_sessions_wait_repeat_and_share(num_sessions: int) -> None:
    """Turns wait for all they follow; two prompts share as many block hashes as leading blocks of equal tokens."""
    several = st.lists(scripts(), min_size=1, max_size=4, unique_by=lambda session: session.name)
    check = given(several, st.integers(1, 3), st.integers(1, 5))(_check_sessions)
    settings(max_examples=max(num_sessions // 2, 100))(check)()


def _check_sessions(sessions: list[Session], at_once: int, block: int) -> None:
    workload = Scripted(given=sessions, sessions=at_once)
    requests = sorted(serve(workload, block).requests, key=lambda each: each.id)
    assert len(requests) == sum(len(session.turns) for session in sessions)
    turns = [(first, turn) for first, session in firsts(sessions) for turn in session.turns]
    for request, (first, turn) in zip(requests, turns, strict=True):
        ends = [requests[first + before].finished_at or 0.0 for before in turn.after]
        assert not ends or request.arrival_time == max(ends) + turn.pause
    spoken = Spoken(sessions, lambda text, number: [(text, place) for place in range(number)])
    assert [each.num_prompt_tokens for each in requests] == [len(prompt) for prompt in spoken.prompts]
    hashes = [prompt_hashes(each, block) for each in requests]
    for one, other in ((random.Random(place).randrange(len(requests)), place) for place in range(len(requests))):
        shared = common(spoken.prompts[one], spoken.prompts[other]) // block
        assert common(hashes[one], hashes[other]) == shared


def firsts(sessions: Sequence[Session]) -> list[tuple[int, Session]]:
    places = [sum(len(session.turns) for session in sessions[:place]) for place in range(len(sessions))]
    return list(zip(places, sessions, strict=True))


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def real(
    workload: Scripted, blocks: int, cached: bool, is_async: bool, on_host: int = 0
) -> dict[int, tuple[Sequence[int], list[int]]]:
    """Returns prompt and output of each request, served by a tiny model. on_host: blocks in host memory."""
    limits = Limits(3, 128, 128)
    executor: Any = make_executor(LLAMA, limits, blocks, 4, on_host)
    vocabulary: Any = type("Vocabulary", (), {"size": LLAMA.vocab_size, "stop_tokens": ()})()
    engine = Engine(
        Orca(),
        executor,
        limits,
        SECOND,
        num_blocks=blocks,
        block_size=4,
        asynchronous=is_async,
        prefix_cache=LRU() if cached else None,
        num_host_blocks=on_host,
    )
    engine.attach(workload.source(vocabulary))
    ended = engine.run().requests
    executor.close()
    COPIED[0] += sum(each.num_host_tokens for each in ended)
    return {each.id: (each.prompt or (), each.output) for each in ended}


@pytest.mark.long
def test_tokens_are_equal_whatever_the_cache_holds(num_sessions: int) -> None:
    """Prompts are the concatenation of what was said, and the tokens those of a run without a cache. Host memory is tiny or large."""
    for seed in range(-(-num_sessions // 5)):
        _check_tokens(random.Random(seed))
    assert COPIED[0]


def _check_tokens(numbers: random.Random) -> None:
    sessions = [
        Session(str(name), [Turn(numbers.randint(2, 9), numbers.randint(1, 8)), *(
            Turn(numbers.randint(1, 9), numbers.randint(1, 8), (place,), 0.0, place, numbers.choice([None, None, 7])) for place in range(3)
        ), Turn(3, 2, (1, 3), 0.001, 1)], 6)
        for name in range(5)
    ]  # fmt: skip
    workload = Scripted(given=sessions, sessions=3)
    plain, *others = (
        real(workload, *setting)
        for setting in (
            *((64, False, True), (64, True, True), (24, True, True), (64, True, False)),
            *((24, True, True, 12), (24, True, True, 200), (24, True, False, 200)),
        )
    )
    draw = words(0, LLAMA.vocab_size)
    prompts = Spoken(sessions, draw).prompts
    for prompt, (asked, _) in zip(prompts, (plain[id_] for id_ in sorted(plain)), strict=True):
        assert [plain[token[1]][1][token[2]] if isinstance(token, tuple) else token for token in prompt] == list(asked)
    assert all(other == plain for other in others)


@given(scripts(), st.floats(0, 0.999))
def test_a_session_resumed_in_the_middle_goes_on_as_before(session: Session, share: float) -> None:
    """The turns that would arrive after `passed` seconds have the lengths of before, and arrive so much earlier. Answers take microseconds."""
    brief = CostFunction(lambda shape: 1e-9)
    whole = serve(Scripted(given=[session]), cost=brief).requests
    passed = int(2 * share * max(each.arrival_time for each in whole)) / 2 + 0.25
    times = [(round(each.arrival_time - passed, 3), each.num_prompt_tokens) for each in whole]
    if expected := sorted(pair for pair in times if pair[0] > 0):
        later = serve(Scripted(given=[resumed(session, passed)]), cost=brief).requests
        assert sorted((round(each.arrival_time, 3), each.num_prompt_tokens) for each in later if each.turn) == expected
