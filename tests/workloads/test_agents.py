"""Recorded conversations of agents: what each request repeats and waits for, sub-agents that never return, and clients that leave them."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_sessions import serve

from cbatch import WorkloadError
from cbatch.request import SERVED
from experiments.workloads import Agents, Turn


def call(time: float, prompt: int, output: int, hashes: list[int], seconds: float = 1.0, **keys: Any) -> dict[str, Any]:
    return {"type": "n", "t": time, "in": prompt, "out": output, "hash_ids": hashes, "api_time": seconds, **keys}


def agent(time: float, duration: float | None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"type": "subagent", "t": time, "duration_ms": duration, "requests": calls}


REQUESTS = [
    call(0.0, 10, 3, [1, 2], 2.0, stop="tool_use"),
    call(5.0, 16, 1, [1, 2, 3, 4], think_time=3.0),
    agent(8.0, 20_000.0, call(0.0, 6, 2, [9]), call(4.0, 12, 1, [9, 10, 11], think_time=0.5)),
    call(10.0, 20, 1, [1, 2, 3, 7, 8], 2.0),
    call(30.0, 24, 1, [1, 2, 3, 7, 8, 5], think_time=9.0),
    agent(31.0, None, call(0.0, 4, 30, [20])),
    call(40.0, 26, 1, [1, 2, 3, 7, 8, 5]),
]
TURNS = [
    (6, 3, (), 0.0, None, None, "tool_use"),  # after 4 tokens of tools and system prompt
    (3, 1, (0,), 3.0, 0, None, ""),  # all of 10 and 3 tokens
    (6, 2, (1,), 2.0, 1, 0, ""),  # the sub-agent has nothing in common with the others
    (4, 1, (2,), 0.5, 2, None, ""),
    (
        8,
        1,
        (1,),
        4.0,
        1,
        12,
        "",
    ),  # three blocks of the second prompt: the context was compacted; the sub-agent runs until 28 s
    (3, 1, (4, 3), 17.0, 4, None, ""),  # after both: at 13 s the sub-agent's last call ended
    (4, 30, (5,), 0.0, 5, 0, ""),
    (1, 1, (5,), 9.0, 5, None, ""),  # the second sub-agent never returns
]


def workload(folder: Path, requests: list[dict[str, Any]], **keys: Any) -> Agents:
    path = folder / "agents.jsonl"
    record = {"id": "a", "tool_tokens": 3, "system_tokens": 1, "block_size": 4, "requests": requests}
    path.write_text("".join(json.dumps({**record, "id": name}) + "\n" for name in "ab"))
    return Agents(path=str(path), order="recorded", sessions=1, **keys)


def test_requests_repeat_and_follow_what_was_recorded(tmp_path: Path) -> None:
    [session, _] = workload(tmp_path, REQUESTS).scripts()
    assert (session.name, session.system) == ("a", 4)
    assert session.turns == [Turn(*turn[:-1], {"tool": turn[-1]}) for turn in TURNS]


def test_lengths_and_pauses_are_scaled(tmp_path: Path) -> None:
    """16 tokens at a half are 8, of which 5 and 2 are repeated; a pause of 3 s at a quarter is 0.75, limited to 0.6 s."""
    [session, _] = workload(tmp_path, REQUESTS[:2], length_scale=0.5, pause_scale=0.25, max_pause=0.6).scripts()
    assert (session.system, session.turns[1]) == (2, Turn(1, 1, (0,), 0.6, 0, None, {"tool": ""}))


def test_no_turn_waits_for_a_sub_agent_that_never_returns(tmp_path: Path) -> None:
    """It is served to its end, 30 iterations of a second; the session ends then, and only then does the next one begin."""
    requests = serve(workload(tmp_path, REQUESTS)).requests
    ended = {(each.session, each.turn): each for each in requests}
    assert len(ended) == 16 and all(each.finish_reason in SERVED for each in requests)
    lost, last = ended["a", 6], ended["a", 7]
    assert last.arrival_time == (ended["a", 5].finished_at or 0.0) + 9.0 and last.last
    assert (last.finished_at or 0.0) < (lost.finished_at or 0.0) == ended["b", 0].arrival_time


def test_a_client_that_leaves_a_sub_agent_ends_the_session(tmp_path: Path) -> None:
    """The sub-agent's first call is not served within 5 s: neither its second nor the join comes, and the main request beside it is served."""
    requests = [
        *REQUESTS[:2],
        agent(8.0, 20_000.0, call(0.0, 6, 9, [9]), call(4.0, 12, 1, [9, 10, 11])),
        *REQUESTS[3:5],
    ]
    served = serve(workload(tmp_path, requests, timeout=5.0)).requests
    ended = {(each.session, each.turn): each for each in served}
    of_a = {turn: each for (name, turn), each in ended.items() if name == "a"}
    assert {turn: each.finish_reason in SERVED for turn, each in of_a.items()} == {0: True, 1: True, 2: False, 4: True}
    assert ended["b", 0].arrival_time == max(each.finished_at or 0.0 for each in of_a.values())


@pytest.mark.parametrize(
    ("requests", "keys", "problem"),
    [
        ([], {}, "line 1: the conversation has no requests"),
        ([{"type": "n", "t": 0}], {}, "line 1: not a recorded conversation"),
        (REQUESTS, {"start": 1, "num_sessions": 2}, "the file has 2 conversations"),
        (REQUESTS, {"num_requests": 3}, "conversations are whole; give workload.num_sessions="),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, requests: list[dict[str, Any]], keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(WorkloadError, match=problem):
        workload(tmp_path, requests, **keys).scripts()
