"""Rollouts: groups of samples of one prompt, and the order in which their queue runs empty soonest."""

import numpy as np
import pytest

from cbatch.request import spec_of
from experiments.api import simulate
from experiments.workloads import Rollout


def test_samples_of_a_group_share_a_prompt_and_lengths_vary_by_group() -> None:
    workload = Rollout(groups=400, samples=8, prompt=64, median=1000, group_sigma=0.8, sigma=0.6)
    requests = workload.requests(None)
    assert {request.arrival_time for request in requests} == {0.0} and len(requests) == 3200
    groups = [{request.prefix_hashes for request in requests[at : at + 8]} for at in range(0, 3200, 8)]
    assert all(len(group) == 1 for group in groups) and len(set.union(*groups)) == 400
    outputs = np.array([request.max_new_tokens for request in requests]).reshape(400, 8)
    assert outputs.max() == 16384 and np.median(outputs) == pytest.approx(1000, rel=0.1)
    logs = np.log(outputs[outputs.max(axis=1) < 16384])
    assert (logs - logs.mean(axis=1, keepdims=True)).std(ddof=0) * (8 / 7) ** 0.5 == pytest.approx(0.6, rel=0.1)
    known = np.array([request.predicted_new_tokens for request in requests]).reshape(400, 8)
    assert (known == known[:, :1]).all() and np.log(known[:, 0]).std() == pytest.approx(0.8, rel=0.1)
    few = Rollout(groups=3, samples=8, prompt=64, median=1000, num_requests=20).requests(None)
    assert [spec_of(request) for request in few] == [spec_of(request) for request in requests[:20]]
    exact = Rollout(groups=2, prediction={"error": 0.0}).requests(None)
    assert all(request.predicted_new_tokens == request.max_new_tokens for request in exact)


@pytest.mark.long
def test_the_longest_first_ends_sooner_with_a_shorter_tail() -> None:
    """First come is slowest; ranking by group, from an earlier round's medians, is nearly as good as by the true lengths."""
    keys = {"groups": 24, "samples": 8, "median": 200, "longest": 2000, "batch": 16, "chunk": 512}
    runs = [
        simulate(f"{name}", "rollout", **keys).summary["run"]
        for name in ("sarathi_serve", "longest_first", "length_order(order=lof)")
    ]
    first_come, by_group, longest = (run["seconds"] for run in runs)
    assert longest <= by_group * 1.01 < first_come * 0.98
    assert runs[2]["tail_share"] < runs[1]["tail_share"] < runs[0]["tail_share"]
