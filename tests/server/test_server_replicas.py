"""A server over several replicas, as its door sees it: answers, cancellations, failures and the end are those of one engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import command, summary
from test_turns import SIMULATED, TINY, converse, spec, until_all_ended

from cbatch import FinishReason
from cbatch.cluster import ClusterView
from cbatch.request import Request
from experiments.server.engine import Message, Turn
from experiments.server.meters import Meters
from experiments.store.tables import read_requests, read_steps

TWO = ("backend.replicas=2",)


class Sends:
    """Sends even requests to the first replica, fails at request 7, and sees no report of the future."""

    def choose(self, request: Request, view: ClusterView) -> int:
        assert all(replica.at <= view.now for replica in view) and request.arrival_time <= view.now
        return request.id % 2 if request.id != 7 else len(view)


def answers(turns: Sequence[Turn]) -> dict[int, list[int]]:
    """Returns the tokens of each request."""
    tokens: dict[int, list[int]] = {}
    for turn in turns:
        for id_, token in zip(turn.ids, turn.tokens, strict=True):
            tokens.setdefault(id_, []).append(token)
    return tokens


def test_replicas_answer_as_one_engine_does(tmp_path: Path) -> None:
    """Also where a replica has another batch and another chunk."""
    pools = "backend.pools={a: {batch: 2}, b: {replicas: 2, policy: {chunking: {chunk: 8}}}}"
    told = dict[str, list[Any]]()
    for name, keys in (("one", ()), ("three", (pools, "decisions=true"))):
        specs = [spec(id_, [*range(3 + 9 * id_)], 4 + id_) for id_ in range(6)]
        longest, *told[name], figures = converse(tmp_path / name, until_all_ended(specs), *TINY, *keys)
        assert longest == 4096 and figures["run"]["requests"] == 6
    assert answers(told["one"]) == answers(told["three"])
    assert command("replay", "three", cwd=tmp_path).stdout.count("SarathiServe makes the same") == 3
    rows = read_requests(tmp_path / "three")
    assert dict(zip(rows["id"], rows["replica"], strict=True)) == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    assert all({*turn.ids} <= {turn.replica, turn.replica + 3} for turn in told["three"])
    assert read_steps(tmp_path / "three").groupby("pool")["num_requests"].max().to_dict().keys() == {"a", "b"}


def test_who_leaves_and_who_stays_are_on_their_replica(tmp_path: Path) -> None:
    """Request 1 leaves, and 2 has ended before; the end cuts 0 and 3. Meters count each replica's own."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        if isinstance(message, int):
            return [spec(0, [1, 2], 3000), spec(1, [3], 3000), spec(2, [4], 3), spec(3, [5], 3000)]
        ended = [end.id for turn in turns for end in turn.ended]
        told = message.ended if isinstance(message, Turn) else []
        return [1, 1, 9] if 2 in [end.id for end in told] else [None] if ended[-1:] == [1] and told else []

    router = ("backend.router._target_=test_server_replicas.Sends",)
    _, *turns, figures = converse(tmp_path / "run", answer, *SIMULATED, *TWO, *router)
    assert [end.id for turn in turns for end in turn.ended][:2] == [2, 1]
    assert (figures["about"]["cut"], figures["about"]["cancelled"]) == (2, 1)
    rows = read_requests(tmp_path / "run").set_index("id")
    assert rows["replica"].to_dict() == {0: 0, 1: 1, 2: 0, 3: 1}
    meters = Meters(2)
    for turn in turns:
        meters.count(turn)
    for replica in (0, 1):
        own = {"replica": str(replica)}
        assert meters.get_sample_value("cbatch:num_requests_running", own) == 0
        tokens = meters.get_sample_value("cbatch:generation_tokens_total", own)
        assert tokens == rows.loc[rows["replica"] == replica, "output_tokens"].sum() > 0
        left = meters.get_sample_value("cbatch:request_success_total", {**own, "finished_reason": "cancelled"})
        assert left == (1, 2)[replica]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (("policy._target_=failing_policies.Fails",), "the policy's fault"),
        (("backend.router._target_=test_server_replicas.Sends",), "router Sends, request 7: choose() returned 2"),
    ],
    ids=["policy", "router"],
)
def test_a_failure_ends_all_replicas_and_the_run_is_written(
    keys: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    """One replica has failed, or the router; the other one computes a long answer, which is cut."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        return [spec(0, [1], 4000), spec(1, [1], 4000), spec(7, [2], 9)] if isinstance(message, int) else []

    *turns, said = converse(tmp_path / "run", answer, "policy=orca", *SIMULATED[1:], *TWO, *keys)[1:]
    assert problem in said and said.endswith("see about.traceback in its summary.json")
    figures = summary(tmp_path / "run")
    assert problem in figures["about"]["error"] and figures["about"]["cut"] == figures["run"]["cancelled_requests"]
    ends = {end.id: end.finish_reason for turn in turns for end in turn.ended}
    assert {ends[0], ends[1]} == {FinishReason.CANCELLED}
