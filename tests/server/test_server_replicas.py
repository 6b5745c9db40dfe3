"""A server over several replicas, as its door sees it: answers, cancellations, failures and the end are those of one engine."""

from collections import Counter
from collections.abc import Sequence, Sized
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from commands import command, summary
from test_turns import SIMULATED, TINY, converse, spec, until_all_ended

from cbatch import FinishReason
from cbatch.cluster import ClusterView, Reject, RoundRobin
from cbatch.moves import Room
from cbatch.request import Request, RequestSpec
from experiments.report.run_text import run_text
from experiments.server import engine as server_engine
from experiments.server.clients import Message, Refused, Turn
from experiments.server.engine import serve_replicas
from experiments.server.meters import Meters
from experiments.store.tables import read_requests, read_steps

TWO = ("backend.replicas=2",)


class Sends:
    """Sends even requests to the first replica, fails at request 7, and sees no report of the future."""

    def choose(self, request: Request, view: ClusterView) -> int:
        assert all(replica.at <= view.now for replica in view) and request.arrival_time <= view.now
        return request.id % 2 if request.id != 7 else len(view)


class Rejects(Sends):
    def choose(self, request: Request, view: ClusterView) -> Any:
        return super().choose(request, view) if request.id != 7 else Reject("full")


def answers(turns: Sequence[Turn]) -> dict[int, list[int]]:
    """Returns the tokens of each request."""
    tokens: dict[int, list[int]] = {}
    for turn in turns:
        for id_, token in zip(turn.ids, turn.tokens, strict=True):
            tokens.setdefault(id_, []).append(token)
    return tokens


@pytest.mark.long
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


PAIR = (("p", "prefill"), ("d", "decode"))
ROLES = ("backend.pools={p: {role: prefill}, d: {role: decode}}", "prefix_cache=true", "block_size=4")


@pytest.mark.parametrize("push", ["false", "true"])
def test_prompts_are_computed_by_one_replica_and_answers_continued_by_another(push: str, tmp_path: Path) -> None:
    told = dict[str, list[Any]]()
    for name, keys in (("one", ()), ("two", (*ROLES, f"backend.transfers.push={push}"))):
        specs = [spec(id_, [*range(3 + 9 * id_)], 1 + 2 * id_) for id_ in range(6)]
        _, *told[name], figures = converse(tmp_path / name, until_all_ended(specs), *TINY, *keys)
        assert figures["run"]["requests"] == 6
    assert answers(told["one"]) == answers(told["two"])
    firsts = [id_ for turn in told["two"] for id_ in turn.ids if turn.replica == 0]
    assert sorted(firsts) == [*range(6)], "the first token of each"
    rows = read_requests(tmp_path / "two").set_index("id")
    assert rows["replica"].to_dict() == {0: 0, **dict.fromkeys(range(1, 6), 1)}, "request 0 has one token"
    meters = Meters(2)
    for turn in told["two"]:
        meters.count(turn)
    names = ("generation_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")
    counts = [
        [meters.get_sample_value(f"cbatch:{name}_total", {"replica": each}) for name in names] for each in ("0", "1")
    ]
    prompts = sum(3 + 9 * id_ for id_ in range(6))
    assert counts[0] == [6, prompts, prompts, rows["cached_tokens"].sum()] and counts[0][-1]
    assert counts[1] == [sum(2 * id_ for id_ in range(6)), 0, 0, 0]


@pytest.mark.parametrize("push", ["false", "true"])
@pytest.mark.parametrize("small", ["p", "d"])
def test_a_request_fits_a_prefiller_and_a_decoder(small: str, push: str, tmp_path: Path) -> None:
    """One of both has KV cache for 64 tokens. A longer request would end the server, as the router finds no replica for it."""
    pools = [f"{name}: {{role: {role}, kv_tokens: {64 if name == small else 4096}}}" for name, role in PAIR]
    specs = [spec(0, [*range(30)], 35), spec(1, [*range(64)], 1)]
    keys = f"backend.pools={{{', '.join(pools)}}}", *ROLES[1:], f"backend.transfers.push={push}"
    longest, *turns, _ = converse(tmp_path / "run", until_all_ended(specs), *TINY, *keys)
    assert longest == 65, "the last token never enters the KV cache"
    assert {end.id: end.num_output_tokens for turn in turns for end in turn.ended} == {0: 35, 1: 1}


def twelve() -> list[RequestSpec]:
    return [spec(id_, [*range(3 + 7 * id_)], 12) for id_ in range(12)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Returns the tokens that one engine gives to each of `twelve`."""
    _, *turns, _ = converse(tmp_path_factory.mktemp("whole") / "one", until_all_ended(twelve()), *TINY)
    return answers(turns)


@pytest.mark.parametrize("push", ["false", "true"])
@pytest.mark.parametrize("seed", range(5))
def test_clients_leave_anywhere_and_the_end_cuts_the_rest(
    seed: int, push: str, whole: dict[int, list[int]], tmp_path: Path
) -> None:
    """Before, beside and after the move, whose blocks are all free at the end; who stays has the tokens of one engine."""
    draw = Random(seed)
    specs = twelve()
    leaving = draw.sample(range(12), 6)

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        if isinstance(message, int):
            return [*specs[:8], *leaving[:2]]
        if not isinstance(message, Turn):
            return []
        if len(turns) == 3:
            return [*specs[8:], leaving[2]]
        ended = {end.id for turn in turns for end in turn.ended}
        return [None] if len(ended) > 9 else leaving[3 + len(turns) % 3 :][:1] if draw.random() < 0.3 else []

    _, *turns, figures = converse(tmp_path / "run", answer, *TINY, *ROLES, f"backend.transfers.push={push}")
    reasons = Counter(end.finish_reason for turn in turns for end in turn.ended)
    assert reasons[FinishReason.CANCELLED] == figures["about"]["cut"] + figures["about"]["cancelled"]
    assert sum(reasons.values()) == 12 and reasons[FinishReason.CANCELLED] >= 3
    for id_, tokens in answers(turns).items():
        assert tokens == whole[id_][: len(tokens)]
    for end in (end for turn in turns for end in turn.ended):
        assert end.output == answers(turns).get(end.id, [])


@pytest.mark.parametrize("push", ["false", "true"])
def test_nothing_is_kept_of_a_request_but_its_results(
    push: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 12 requests, of which some leave, also as they end, tables are as long as after 3: those of results alone grow, and the index of cached blocks."""
    seen: list[Any] = []
    monkeypatch.setattr(
        server_engine, "serve_replicas", lambda *served: (seen.extend(served), serve_replicas(*served))[1]
    )
    lengths = []
    for number in (3, 12):
        specs = [spec(id_, [*range(3 + 7 * id_)], 12) for id_ in range(number)]

        def answer(message: Any, turns: list[Turn], specs: Any = specs, number: int = number) -> Sequence[Message]:
            if isinstance(message, int):
                return [*specs, *range(0, number, 3)]
            ended = {end.id for turn in turns for end in turn.ended}
            late = [end.id for end in message.ended] if isinstance(message, Turn) else []
            return [None] if late and len(ended) == len(specs) else late

        converse(tmp_path / str(number), answer, *TINY, *ROLES, f"backend.transfers.push={push}")
        cluster, clients, _ = seen[-3:]
        cluster._view.update(inf)  # reads the last reports
        engines = cluster.engines
        parts = [cluster, cluster.transfers, cluster._view, *cluster._views, *clients]
        parts += [part for each in engines for part in (each, each.inbox, each._waiting, each.observer, each.state)]
        parts += [each._waiting.departures for each in engines]
        lengths.append(
            [
                (part, {key: len(value) for key, value in vars(part).items() if isinstance(value, Sized)})
                for part in parts
            ]
        )
    few, many = lengths
    grown = {
        f"{type(part).__name__}.{name}"
        for (_, before), (part, after) in zip(few, many, strict=True)
        for name in after
        if after[name] > before.get(name, 0)
    }
    results = {"LiveCluster.replica_of", "LiveCluster.prefilled_on", "LiveTransfers.done"}
    results |= {"ClientArrivals.requests", "ClientArrivals._ids"}
    assert grown - {"ReplicaView._hashes"} == results


class TakesOne(RoundRobin):
    """Decoders take a request when they have no other."""

    def accepts(self, room: Room) -> bool:
        return room.is_idle


def test_who_leaves_while_no_blocks_are_kept_leaves_at_once(tmp_path: Path) -> None:
    """With push: request 0 is decoded, 1 and 2 wait for blocks of the decoder. 1 ends before 0 does, and leaves 2 where it is."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        if isinstance(message, int):
            return [spec(0, [*range(9)], 4000), spec(1, [*range(20)], 9), spec(2, [*range(30)], 9), 1]
        ended = [end.id for turn in turns for end in turn.ended]
        return (
            {(1,): [0], (1, 0): [], (1, 0, 2): [None]}[tuple(ended)]
            if isinstance(message, Turn) and message.ended
            else []
        )

    router = ("backend.router._target_=test_server_replicas.TakesOne", "backend.transfers.push=true")
    _, *turns, _ = converse(tmp_path / "run", answer, *TINY, *ROLES, *router)
    ends = [(end.id, end.finish_reason) for turn in turns for end in turn.ended]
    assert ends == [(1, FinishReason.CANCELLED), (0, FinishReason.CANCELLED), (2, FinishReason.LENGTH)]


def test_a_failure_ends_replicas_between_which_requests_move(tmp_path: Path) -> None:
    """Whichever replica has a request, its client is told; requests amid a move do not keep the server."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        return [spec(id_, [*range(5 + id_)], 400) for id_ in range(6)] if isinstance(message, int) else []

    keys = "policy=orca", "policy._target_=failing_policies.Fails", *TINY[1:4], *ROLES, "backend.transfers.push=true"
    _, *turns, said = converse(tmp_path / "run", answer, *keys)
    figures = summary(tmp_path / "run")
    assert "the policy's fault" in said and "the policy's fault" in figures["about"]["error"]
    assert figures["about"]["cut"] == figures["run"]["cancelled_requests"]
    ended = [end for turn in turns for end in turn.ended]
    assert {end.finish_reason for end in ended} == {FinishReason.CANCELLED} and len(ended) <= 6


@pytest.mark.parametrize("keys", [(), TWO])
def test_who_has_left_is_not_cut_by_the_end(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Request 1 leaves just before the end, which cuts 0 and 2. Request 3 has ended by itself. The door has refused three more."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        if isinstance(message, int):
            return [*(spec(id_, [1, 2], 3000) for id_ in range(3)), spec(3, [1], 1)]
        has_ended = isinstance(message, Turn) and any(end.id == 3 for end in message.ended)
        return [Refused(2), 1, Refused(1), None] if has_ended else []

    *_, figures = converse(tmp_path / "run", answer, *SIMULATED, *keys)
    assert [figures["about"][name] for name in ("cut", "cancelled", "refused")] == [2, 1, 3]
    assert "requests refused beyond max_open, and in no figure: 3 of 7\n" in run_text(figures)
    assert summary(tmp_path / "run")["about"]["refused"] == 3


def test_requests_do_not_move_between_simulated_replicas_of_a_server(tmp_path: Path) -> None:
    [said] = converse(tmp_path / "run", lambda message, turns: [None], *SIMULATED, *ROLES[:2])
    assert said.startswith("backend.pools: requests do not move between a server's simulated replicas")


def test_who_leaves_and_who_stays_are_on_their_replica(tmp_path: Path) -> None:
    """Request 1 leaves, and 2 has ended before; the end cuts 0 and 3. Meters count each replica's own."""

    def answer(message: Any, turns: list[Turn]) -> Sequence[Message]:
        if isinstance(message, int):
            return [spec(0, [1, 2], 3000), spec(1, [3], 3000), spec(2, [4], 3), spec(3, [5], 3000)]
        begun = {id_ for turn in turns for id_ in turn.ids}
        if {1, 3} <= begun and any(turn.ended for turn in turns) and due:
            return due.pop()
        return [None] if isinstance(message, Turn) and 1 in [end.id for end in message.ended] else []

    due: list[Sequence[Message]] = [[1, 1, 9]]  # said once
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
        left = meters.get_sample_value("cbatch:request_success_total", {**own, "finished_reason": "abort"})
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
    cut = [turn for turn in turns if any(end.finish_reason is FinishReason.CANCELLED for end in turn.ended)]
    assert all(turn.failed for turn in cut), "clients hear of a failure, not of a server that ends"


def test_a_request_that_the_router_rejects_ends_alone(tmp_path: Path) -> None:
    specs = [spec(id_, [1], 9) for id_ in (0, 7, 1)]
    rejects = ("backend.router._target_=test_server_replicas.Rejects",)
    *turns, figures = converse(tmp_path / "run", until_all_ended(specs), "policy=orca", *SIMULATED[1:], *TWO, *rejects)[
        1:
    ]
    ends = {end.id: (end.finish_reason, end.reject_reason) for turn in turns for end in turn.ended}
    served = FinishReason.LENGTH, ""
    assert ends == {0: served, 1: served, 7: (FinishReason.REJECTED, "full")}
    assert not any(turn.failed for turn in turns)
    assert figures["run"]["rejected_requests"] == 1 and figures["replicas"]["most_requests"] == 1
