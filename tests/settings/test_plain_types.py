"""Settings of a wrong type are one line that names the key, also where a parameter takes a list, a mapping or an object."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cbatch import ConfigError
from experiments.settings.compose import compose_run
from experiments.settings.construct import fits, words_of
from policies.pauses import TimeToLive


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "prefix_cache=true eviction=soft_ttl eviction.ttl=x",
            "eviction.ttl=x: give a number or the keys of TimeToLive",
        ),
        ("prefix_cache=true eviction=tlru eviction.threshold=x", "eviction.threshold=x: give a whole number"),
        ("policy=plas policy.thresholds=x", "policy.thresholds=x: give a list, each item a number"),
        ("policy=plas policy.thresholds=[a]", "policy.thresholds=['a']: give a list, each item a number"),
        ("policy=past_future policy.history=5", "policy.history=5: give a list, each item a whole number"),
        ("policy=past_future policy.history=[.5]", "policy.history=[0.5]: give a list, each item a whole number"),
        ("policy=continuum policy.ttl=5", "policy.ttl=5: give the keys of TimeToLive"),
        ("policy=sarathi policy.chunking=5", "policy.chunking=5: give the keys of ChunkSelector"),
        ("policy=trail policy.c={a:1}", "policy.c={'a': 1}: give a number"),
        ("policy=infercept policy.seconds=nan", "policy.seconds=nan: give a number"),
        ("policy=trail policy.c=null", "policy.c=null: policies.trail.Trail needs a number"),
        ("policy=trail policy.predictor=null", "needs one; choose it with predictor=NAME"),
        (
            "backend=sim backend.replicas=2 backend.router=policies.routers.LlmD(weights={queue:x})",
            "backend.router.weights={'queue': 'x'}: give values by name, each a number",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_one_line(words: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_run(*words.split()).policy()
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, float, True),
        (True, int, False),
        (float("nan"), float, False),
        ([1, float("nan")], Sequence[float], False),
        (float("inf"), float, True),
        (1.0, int, False),
        (None, float | None, True),
        ([], Sequence[int], True),
        ([1, "a"], Sequence[int], False),
        ("ab", Sequence[str], False),
        ([[1], [2]], Sequence[Sequence[int]], True),
        ({"a": 1}, dict[str, float] | None, True),
        ({"a": "b"}, Mapping[str, float], False),
        ("x", float | TimeToLive, False),
        ({"_target_": "x"}, float | TimeToLive, True),
        (TimeToLive, TimeToLive, True),
        ("x", Any, True),
        ([object()], Sequence[Any], True),
    ],
)
def test_values_fit_annotations(value: object, annotation: Any, expected: bool) -> None:
    assert fits(value, annotation) is expected


def test_words_end_with_null() -> None:
    assert words_of(None | int | TimeToLive) == "a whole number or the keys of TimeToLive or null"
    assert words_of(Any) == ""
