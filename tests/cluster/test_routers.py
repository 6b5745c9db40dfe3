"""Routers that know prefixes: one choice of each by hand, from its source's rule."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from shown_replicas import ASKED, Shown, letters, loads, prompt, replica

from cbatch import ConfigError, Request
from cbatch.cluster import Role, Route, Router
from policies.routers import (
    CacheAware,
    Dynamo,
    KVAware,
    LlmD,
    LMetric,
    LoadAware,
    Preble,
    PrefixAware,
    SessionHash,
    ShortestTTFT,
)
from policies.shared import latest
from policies.shared.sent_prefixes import SentPrefixes


@pytest.mark.parametrize(
    ("left", "right", "matched", "fallback", "chosen"),
    [
        (40, 8, 9, "load", 0),  # 32 > 32 is false: the match
        (41, 8, 9, "load", 1),
        (341, 308, 9, "load", 1),  # 33 > 32, and 341 > 1.1 * 308 = 338.8
        (340, 308, 5, "tree", 1),  # 0.5 > 0.5 is false: the smaller tree, 50 of 100 blocks
        (340, 308, 5, "load", 1),
        (308, 340, 5, "load", 0),
        (308, 340, 5, "tree", 1),
        (340, 308, 6, "tree", 0),
        (440, 405, 9, "load", 0),  # 35 > 32, but 440 > 445.5 is false
    ],
)
def test_cache_aware(left: int, right: int, matched: int, fallback: str, chosen: int) -> None:
    router = CacheAware(0.5, 32, 1.1, fallback)
    router._trees = [SentPrefixes(0), SentPrefixes(1)]
    for tree, number, size in zip(router._trees, (matched, 1), (100, 50), strict=True):
        tree.add(letters(ASKED)[:number])
        tree.add([f"other {index}" for index in range(size - number)])
    assert router.choose(ASKED, loads(left, right)) == chosen
    assert router._trees[chosen].match(letters(ASKED)) == 10, "the prompt is inserted in every case"


def test_trees_lose_their_least_recent_leaves_whole() -> None:
    """abcd, abe and ab: nodes ab, cd and e. cd goes whole, then e, then ab; a match keeps its path."""

    def tree() -> SentPrefixes:
        made = SentPrefixes()
        for text in ("ab", "abcd", "abe"):
            made.add(letters(prompt(text)))
        return made

    sizes = []
    for most in (5, 4, 2, 1):
        trimmed = tree()
        trimmed.trim(most)
        sizes.append(len(trimmed))
    assert sizes == [5, 3, 2, 0]
    touched = tree()
    touched.touch(letters(prompt("abcd")))
    touched.trim(4)
    assert [touched.match(letters(prompt(text))) for text in ("abcd", "abe")] == [4, 2]


def test_cache_aware_trims_after_each_interval() -> None:
    router, view = CacheAware(max_tree_size=3, eviction_interval=9.0), loads(0)
    for now, text, size in ((0.0, "abcd", 4), (8.9, "xy", 6), (9.0, "z", 3)):
        view.now = now
        router.choose(prompt(text), view)
        assert len(router._trees[0]) == size


def dynamo(*states: tuple[int, int, int], **facts: Any) -> Any:
    """cached blocks, prompt tokens left, blocks with the request."""
    return Shown(
        replica(16, 16 * cached, [(7 + index, left)] * (left > 0), blocks=blocks, **facts)
        for index, (cached, left, blocks) in enumerate(states)
    )


@pytest.mark.parametrize(
    ("blocks", "costs"),
    [
        ((80, 45, 45), [90, 85, 155]),  # the hits are cached, and no active request has them
        ((50, 45, 45), [60, 85, 155]),  # the first replica's 30 hits are active
    ],
)
def test_dynamo_adds_prefill_and_decode_blocks(blocks: tuple[int, int, int], costs: list[int]) -> None:
    """640 tokens in blocks of 16. Overlaps 30, 0, 30; 1,600 tokens in prefill at the third."""
    view = dynamo((30, 0, blocks[0]), (0, 0, blocks[1]), (30, 1600, blocks[2]))
    router, asked = Dynamo(ties="first"), Request(0, 640, 5)
    router._uncached = {9: 1600}
    assert [-cost for cost in router._new(asked, view).values()] == costs
    assert router.choose(asked, view) == costs.index(min(costs))
    assert router._uncached[0] == 640 - 16 * view[costs.index(min(costs))].cached_tokens(asked) / 16
    router.on_end(asked)
    assert router._uncached == {9: 1600}


def test_dynamo_lowers_the_credit_of_busy_replicas() -> None:
    """decay = 1 / (1 + 0.5 * 100 / 40) = 4 / 9; the third replica's credit is 30 * 4 / 9."""
    router = Dynamo(falloff=0.5, active=2.0, scale=3.0)
    router._uncached = {9: 1600}
    view = dynamo((30, 0, 80), (0, 0, 45), (30, 1600, 45), num_unfinished=4)
    scores = router._new(Request(0, 640, 5), view)
    assert [-score for score in scores.values()] == pytest.approx(
        [30 + 8 + 80, 120 + 8 + 45, 3 * (140 - 40 / 3) + 8 + 45]
    )


def test_dynamo_once_weighed_overlap_use_and_queue() -> None:
    states = zip((480, 0, 480), (0.4, 0.05, 0.05), (2, 0, 4), strict=True)
    view: Any = Shown(replica(16, cached, kv_use=use, num_waiting=waiting) for cached, use, waiting in states)
    router, asked = Dynamo("old"), Request(0, 640, 5)
    assert router._old(asked, view) == pytest.approx({0: 0.6, 1: -0.05, 2: 0.45})
    assert router.choose(asked, view) == 0


def test_dynamo_draws_at_a_temperature() -> None:
    """Costs 90, 85, 155 at temperature 1: weights exp(-5 / 70), 1, exp(-1)."""
    view, router = dynamo((30, 0, 80), (0, 0, 45), (30, 1600, 45)), Dynamo(temperature=1.0)
    drawn = []
    for _ in range(4000):
        router._uncached = {9: 1600}
        drawn.append(router.choose(Request(0, 640, 5), view))
    weights = [0.931, 1.0, 0.368]
    shares = [drawn.count(index) / 4000 for index in range(3)]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights], abs=0.03)


CHART, SAMPLE, BLIND = {"queue": 2, "kv": 2, "prefix": 3}, {"queue": 1, "kv": 1, "prefix": 2}, {"queue": 2, "kv": 2}


@pytest.mark.parametrize(
    ("weights", "chosen"),
    [(CHART, 0), (SAMPLE, 0), (BLIND, 1)],  # 4.1 3.6 2.5, 2.5 1.8 1.5, 1.4 3.6 1.0
)
def test_llm_d_adds_weighted_scores(weights: dict[str, float], chosen: int) -> None:
    states = zip((2, 0, 4), (0.8, 0.2, 0.5), (9, 0, 5), strict=True)
    view: Any = Shown(replica(num_waiting=waiting, kv_use=use, cached=cached) for waiting, use, cached in states)
    assert LlmD(weights).choose(ASKED, view) == chosen


@pytest.mark.parametrize(
    ("score", "facts", "scores"),
    [
        ("running", [{"num_running": 3}, {"num_running": 1}], [0, 1]),
        ("queue", [{}, {}], [1, 1]),
        ("load_aware", [{}, {"num_waiting": 32}, {"num_waiting": 500}], [0.5, 0.375, 0]),
        ("tokens", [{"outstanding_tokens": 1_048_576}, {"outstanding_tokens": 9_999_999}], [0.75, 0]),
        ("session", [{}, {}], [0, 0]),
        ("prefix", [{"cached": 4}, {}], [0.4, 0]),
    ],
)
def test_a_score_of_llm_d(score: str, facts: list[dict[str, Any]], scores: list[float]) -> None:
    view: Any = Shown(replica(**each) for each in facts)
    assert LlmD()._score(score, range(len(view)), ASKED, view) == scores


def test_llm_d_follows_a_session_and_refuses_unknown_scores() -> None:
    router, view = LlmD({"session": 1.0}), loads(0, 0, 0, 0)
    home = router.choose(prompt("a", session="s"), view)
    assert [router.choose(prompt("a", session="s"), view) for _ in range(5)] == [home] * 5
    with pytest.raises(ConfigError, match="weights has no score cache; known: queue, running"):
        LlmD({"cache": 1.0})


def test_llm_d_forgets_the_session_that_came_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "MOST", 2)
    router, view = LlmD({"session": 1.0}), loads(0, 0)
    for session in "abac":
        router.choose(prompt("a", session=session), view)
    assert [session for _, session in router._life_of] == ["a", "c"]


@pytest.mark.parametrize(
    ("make", "session"),
    [
        (lambda: CacheAware(fallback="tree"), None),
        (Preble, None),
        (SessionHash, None),
        (lambda: LlmD({"queue": 0.5, "session": 1.0}, ties="first"), "s"),
        (lambda: LlmD({"queue": 0.5, "prefix": 1.0}, approximate=True, ties="first"), None),
    ],
)
def test_replicas_that_have_started_again_are_others(make: Callable[[], Router], session: str | None) -> None:
    """A router chooses from them as one that has sent nothing yet. Until then the first replica had the longer queue."""
    router, view, again = make(), loads(0, 0), loads(0, 0)
    view[0].num_waiting = 1
    prompts = [prompt(letter * number, session=session) for letter, number in (("a", 20), ("b", 30), ("c", 40))]
    for asked in prompts:
        router.choose(asked, view)
    fresh, known = make(), deepcopy(router)
    expected = [fresh.choose(asked, again) for asked in reversed(prompts)]
    assert [known.choose(asked, again) for asked in reversed(prompts)] != expected
    for each in again:
        each.life += 2
    assert [router.choose(asked, again) for asked in reversed(prompts)] == expected


def test_llm_d_approximates_by_what_it_sent() -> None:
    """Nothing is reported as cached. Prompts of less than a block match nothing."""
    router, view = LlmD({"prefix": 1.0}, approximate=True), loads(0, 0, 0, 0)
    home = router.choose(ASKED, view)
    assert [router.choose(ASKED, view) for _ in range(5)] == [home] * 5
    assert LlmD()._prefix(0, Request(0, 3, 1), replica(16)) == 0


def test_production_stack_weighs_load_against_the_match() -> None:
    """800, 400 and 0 of 1,000 tokens; loads 6, 2, 1 of mean 3: -0.2, 0.733, 0.667. beta 0: the longest match."""
    view: Any = Shown(replica(cached=cached, num_unfinished=load) for cached, load in ((800, 6), (400, 2), (0, 1)))
    asked = Request(0, 1000, 5)
    assert [router.choose(asked, view) for router in (LoadAware(), LoadAware(0.0))] == [1, 0]
    few: Any = Shown(replica(cached=cached, num_unfinished=load) for cached, load in ((600, 1), (0, 0)))
    assert LoadAware().choose(asked, few) == 1, "0.6 - 0.5 and 0 + 0.5, as a mean below 1 counts as 1"
    close: Any = Shown(replica(cached=cached, num_unfinished=load) for cached, load in ((500, 4), (0, 2)))
    assert [LoadAware(beta).choose(asked, close) for beta in (0.7, 1.0)] == [0, 1], "0.5 - beta / 3, beta / 3"


@pytest.mark.parametrize(("cached", "chosen"), [((0, 1500, 1500), 1), ((0, 999, 500), 0), ((0, 1000, 0), 1)])
def test_production_stack_follows_long_matches(cached: tuple[int, ...], chosen: int) -> None:
    """3,000 tokens: at least 1,000 must be cached; else the least requested replica, of equal ones the first."""
    view: Any = Shown(replica(cached=tokens) for tokens in cached)
    assert KVAware().choose(Request(0, 3000, 5), view) == chosen


def test_production_stack_matches_whole_chunks() -> None:
    """Chunks of 4 letters: abcdxyz matches 1 of abcdefgh's chunks, abcx none."""
    router, view = PrefixAware(4, "first"), loads(0, 0)
    router._sent = [SentPrefixes(0), SentPrefixes(1)]
    router._sent[1].add(letters(prompt("abcdefgh"))[3::4])
    assert router.choose(prompt("abcx"), view) == 0
    assert router.choose(prompt("abcdxyz"), view) == 1
    assert [len(sent) for sent in router._sent] == [1, 2], "a partial chunk is not inserted"
    fresh = PrefixAware(4)
    home = fresh.choose(prompt("abcdefgh"), loads(0, 0, 0))
    assert [fresh.choose(prompt("abcdefgh"), loads(0, 0, 0)) for _ in range(5)] == [home] * 5


def test_preble_exploits_what_most_of_the_prompt_shares() -> None:
    """S is 100 blocks: S + 20 explores, S + 30 exploits (100 > 30), S + 150 explores, S + 10 has two replicas to exploit."""
    router, view, shared = Preble(), loads(0, 0), "s" * 100
    texts = [shared + letter * number for letter, number in (("a", 20), ("b", 30), ("c", 150), ("d", 10))]
    assert [router.choose(prompt(text), view) for text in texts] == [0, 0, 1, 0]
    assert [work for *_, work in router._recent] == [120, 30, 250, 10]
    view.now = 180.0
    view[0].num_unfinished = 1
    assert router.choose(prompt(texts[0]), view) == 0, "a prompt sent before exploits: nothing of it is new"
    assert router.choose(prompt(shared + "e"), view) == 1, "45 * 0.15 s at the first replica, as the window is over"
    for letter, seconds, chosen in (("f", 6.8, 0), ("g", 6.7, 1)):
        router._recent.clear()
        router._recent.append((180.0, 1, seconds))
        assert router.choose(prompt(shared + letter), view) == chosen


def pairs(text: str) -> list[str]:
    return [text[:end] for end in range(2, len(text) + 1, 2)]


def unlike() -> Any:
    """Two replicas with KV blocks of one and of two letters."""
    view = loads(0, 0)
    view[1].block_size, view[1].block_hashes = 2, lambda request: pairs(request.extra["text"])
    return view


def test_preble_follows_prefixes_in_blocks_of_any_size() -> None:
    """The first replica has more work when the second prompt comes, and less when prompts like that one follow."""
    router, view = Preble(), unlike()
    assert router.choose(prompt("a" * 50), view) == 0
    assert router.choose(prompt("b" * 80), view) == 1
    assert [router.choose(prompt(text), view) for text in ("b" * 80 + "c", "a" * 50 + "c")] == [1, 0]


def test_production_stack_counts_chunks_in_tokens() -> None:
    """Chunks of one letter and of two: three chunks of the first are fewer tokens than two of the second."""
    router, view = PrefixAware(1), unlike()
    router._sent = [SentPrefixes(0), SentPrefixes(1)]
    router._sent[0].add(letters(prompt("abc")))
    router._sent[1].add(pairs("abcd"))
    assert router.choose(prompt("abcdef"), view) == 1


def test_the_shortest_time_to_the_first_token() -> None:
    """A second per token: 20 + 2, 1 + 8, 3 + 5. Golden B17, with copies at 0.25 and 2 s per token: the second 1.5 + 1 + 2 and 12 + 1 + 2."""
    view: Any = Shown(replica(cached=cached, left=[(1, left)]) for cached, left in ((8, 20), (2, 1), (5, 3)))
    assert ShortestTTFT().choose(ASKED, view) == 2
    assert ShortestTTFT(copy_above=2, token_seconds=0.25).choose(ASKED, view) == Route(1, 1, 0)
    assert ShortestTTFT(copy_above=2, token_seconds=2.0).choose(ASKED, view) == 2


@pytest.mark.parametrize(
    ("left", "unfinished", "itself", "chosen"),
    [
        ((100, 600, 300), (20, 4, 6), True, 0),  # 2,100 3,000 2,100: the first of two equal ones
        ((100, 600, 300), (20, 4, 6), False, 2),  # 2,000 2,400 1,800
        ((100, 600, 300), (21, 4, 6), True, 2),
        ((0, 2, 9), (3, 2, 5), True, 0),  # 1 x 4, 2 x 3, 9 x 6
        ((0, 0, 0), (3, 2, 5), True, 1),  # nothing to compute: at least 1 token
    ],
)
def test_lmetric_multiplies_work_and_batch(
    left: tuple[int, ...], unfinished: tuple[int, ...], itself: bool, chosen: int
) -> None:
    """left: uncached tokens of the request and of those there."""
    states = zip(left, unfinished, strict=True)
    view: Any = Shown(replica(cached=10, prompt_tokens_left=tokens, num_unfinished=number) for tokens, number in states)
    assert (LMetric() if itself else LMetric(itself)).choose(ASKED, view) == chosen


class Staged(Shown):
    """Two prefillers, then two decoders, which hold five tokens of every prompt; the first decoder has a request."""

    def __init__(self) -> None:
        super().__init__([*loads(0, 0), *loads(1, 0, cached=5)])

    def fitting(self, request: Request) -> list[int]:
        return [0, 1] if self.stage is Role.PREFILL else [2, 3]


def test_decoders_are_chosen_by_what_decoders_have() -> None:
    """Fewest requests for ShortestTTFT; Preble exploits the 10 of 16 blocks that the first decoder was sent; Dynamo counts the prefiller's work."""
    preble, dynamo, texts = Preble(), Dynamo(), ("s" * 10 + "a" * 6, "s" * 10 + "b" * 6)
    for router, decoders in ((ShortestTTFT(), [3, 3]), (preble, [3, 3]), (dynamo, None)):
        view, chosen = Staged(), list[Any]()
        for id_, text in enumerate(texts):
            for view.stage in (Role.PREFILL, Role.DECODE):
                chosen.append(router.choose(prompt(text, id_), view))
            view[2].num_unfinished, view[3].num_unfinished = (0, 1) if router is preble else (1, 0)
        assert chosen[1::2] == decoders or decoders is None
    assert {replica for _, replica, _ in preble._recent} <= {0, 1}, "decoders compute no prompts"
    assert dynamo._uncached == {0: 16, 1: 16}
