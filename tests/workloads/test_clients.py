"""Workloads of several clients: arrivals by hand, the published suites, streams of their own, and bad settings."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from in_process import message

from experiments.settings.groups import CONFIG_FOLDER
from experiments.workloads import Clients
from experiments.workloads.clients import Client

EVEN: dict[str, Any] = {"rate": 2.0, "cv": 0.0, "prompt_tokens": 30, "output_tokens": 4}


def make(duration: float = 10.0, **entries: dict[str, Any]) -> Clients:
    return Clients(duration=duration, clients={name: {**EVEN, **entry} for name, entry in entries.items()})


def times_of(workload: Clients, client: str) -> np.ndarray[Any, Any]:
    return np.array([request.arrival_time for request in workload.requests(None) if request.client == client])


def test_even_arrivals_are_evenly_spaced_from_a_random_offset() -> None:
    workload = make(ann={}, bob={"rate": 0.5})
    ann, bob = times_of(workload, "ann"), times_of(workload, "bob")
    assert (len(ann), len(bob)) == (20, 5)
    assert np.allclose(np.diff(ann), 0.5) and np.allclose(np.diff(bob), 2.0)
    assert 0 <= ann[0] < 0.5 and 0 <= bob[0] < 2 and ann[0] * 4 != pytest.approx(bob[0])
    requests = workload.requests(None)
    assert [request.id for request in requests] == list(range(25))
    assert [request.arrival_time for request in requests] == sorted([*ann, *bob])
    assert {(request.num_prompt_tokens, request.max_new_tokens) for request in requests} == {(30, 4)}
    first, faster = replace(make(ann={}), num_requests=3), replace(make(ann={}), rate_scale=2.5)
    assert [request.arrival_time for request in first.requests(None)] == ann[:3].tolist()
    assert len(faster.requests(None)) == 50


def test_a_client_sends_and_pauses_in_turn() -> None:
    """The client sends during 0..5, 10..15 and 20..25 of 30 s, and keeps its pace over the pauses."""
    paused, whole = (times_of(make(30.0, ann={"on_off": on_off}), "ann") for on_off in (5.0, None))
    assert paused.tolist() == [time for time in whole if int(time) // 5 in (0, 2, 4)]
    assert len(paused) == 30


def test_a_rate_that_changes_linearly_or_in_phases() -> None:
    """From 1 to 3 per second in 100 s: t + t^2 / 100 requests by then, 75 in the first half and 125 in the second."""
    for first, last in ((1.0, 3.0), (3.0, 1.0)):
        times = times_of(make(100.0, ann={"rate": first, "end_rate": last}), "ann")
        counts = first * times + (last - first) * times**2 / 200
        assert np.allclose(np.diff(counts), 1) and len(times) == 200
        assert (times < 50).sum() == pytest.approx(25 * (first + (first + last) / 2), abs=1)
    phases = times_of(make(ann={"end": 4.0}, late={"client": "ann", "begin": 6.0, "rate": 5.0}), "ann")
    assert ((phases < 4).sum(), ((phases >= 4) & (phases < 6)).sum(), (phases >= 6).sum()) == (8, 0, 20)
    idle_at_first = times_of(make(100.0, ann={"rate": 0, "end_rate": 2.0}), "ann")
    assert (len(idle_at_first), (idle_at_first < 50).sum()) == (100, 25)


def test_poisson_arrivals_and_ranges_of_lengths() -> None:
    workload = make(4000.0, ann={"cv": 1.0, "prompt_tokens": [3, 5], "output_tokens": [1, 2]})
    intervals = np.diff(times_of(workload, "ann"))
    assert intervals.mean() == pytest.approx(0.5, rel=0.03)
    assert intervals.std() == pytest.approx(0.5, rel=0.05)
    pairs = {(request.num_prompt_tokens, request.max_new_tokens) for request in workload.requests(None)}
    assert pairs == {(prompt, output) for prompt in (3, 4, 5) for output in (1, 2)}


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0])
def test_a_client_keeps_its_rate_from_the_begin_on(cv: float) -> None:
    """Two per second in each second; the first arrives after half of 0.5 s times 1 + cv^2, the mean residual life of a renewal process."""
    client = Client(rate=2.0, cv=cv, prompt_tokens=(1, 1), output_tokens=(1, 1))
    drawn = [client.times(np.random.default_rng(seed), 40.0) for seed in range(2500)]
    firsts = [times[0] for times in drawn]
    assert np.mean(firsts) == pytest.approx((1 + cv**2) / 4, rel=0.06)
    counts = np.array([np.histogram(times, [0, 1, 2, 10, 11])[0] for times in drawn])
    assert counts.mean(axis=0) == pytest.approx([2, 2, 16, 2], rel=0.08)


def test_arrivals_are_poisson_unless_the_presets_of_vtc_space_them_evenly() -> None:
    client = {"rate": 2.0, "prompt_tokens": 30, "output_tokens": 4}
    given, poisson = (Clients(duration=50.0, clients={"ann": {**client, **cv}}) for cv in ({}, {"cv": 1.0}))
    assert times_of(given, "ann").tolist() == times_of(poisson, "ann").tolist()
    for path in sorted((CONFIG_FOLDER / "workload").glob("vtc_*.yaml")):
        cvs = {client["cv"] for client in (yaml.safe_load(path.read_text()).get("clients") or {}).values()}
        assert cvs == {"vtc_poisson": {1}, "vtc_real": set()}.get(path.stem, {0})


def test_another_client_and_a_longer_run_change_no_request() -> None:
    entry = {"cv": 1.0, "prompt_tokens": [1, 500]}
    alone, beside = make(50.0, ann=entry), make(50.0, bob=entry, ann=entry)
    facts = [
        [(r.arrival_time, r.num_prompt_tokens) for r in each.requests(None) if r.client == "ann"]
        for each in (alone, beside, make(70.0, ann=entry))
    ]
    assert facts[0] == facts[1] == facts[2][: len(facts[0])]
    assert not set(times_of(beside, "bob")) & set(times_of(beside, "ann"))


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: make(ann={"prompt_tokens": [9, 3]}), "workload.clients.ann.prompt_tokens=[9, 3]: "),
    (lambda: make(ann={"begin": 5.0, "end": 2.0}), "workload.clients.ann: end=2 lies before begin=5"),
    (
        lambda: make(ann={"rate": 0.0}).requests(None),
        "workload.clients.ann.rate=0: no client sends a request; raise a rate",
    ),
    (
        lambda: make(ann={"rate": 0.0}, bob={"rate": 1e-9}).requests(None),
        "workload.duration=10.0: no client sends a request",
    ),
    (lambda: replace(make(ann={}), num_requests=30).requests(None), "the clients send 20"),
    (lambda: make(1e8, ann={}), "more than 10000000"),
    (make, "give at least one client"),
]


@pytest.mark.parametrize(("build", "problem"), BAD)
def test_bad_clients(build: Callable[[], object], problem: str) -> None:
    assert problem in message(build)


@pytest.mark.parametrize(("given", "of_policy"), [((), 2.0), (("policy.weights={ann: 3}",), 3.0)])
def test_weights_of_clients_reach_the_policy_unless_it_has_its_own(given: tuple[str, ...], of_policy: float) -> None:
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        config = compose("config", ["policy=vtc", "metrics.client_weights={ann: 2}", *given])
    assert (config.policy.weights, config.metrics.client_weights) == ({"ann": of_policy}, {"ann": 2})
