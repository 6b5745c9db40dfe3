"""vLLM's real scheduler on a simulated device: which requests receive a token, and how long iterations take."""

import random
from itertools import pairwise
from typing import Any

import pytest
from fuzz_policy import FuzzPolicy
from test_vllm_fuzz import Clients, check_nothing_is_lost

from cbatch import BatchShape, Limits, Request


class Costs:
    """A second for each token; keeps the shapes."""

    def __init__(self) -> None:
        self.shapes: list[BatchShape] = []

    def predict(self, shape: BatchShape) -> float:
        self.shapes.append(shape)
        return float(shape.num_tokens)


def tokens(output: Any) -> dict[str, list[int]]:
    return {id_: output.sampled_token_ids[place] for id_, place in output.req_id_to_index.items()}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_device_samples_what_vllm_expects(asynchronous: bool, vllm_rig: Any) -> None:
    """With chunks, prefix hits, aborts and preempted requests that come back with their outputs."""
    from cbatch.vllm import Adapter
    from cbatch.vllm.executor import Device

    for seed in range(10):
        numbers, device = random.Random(seed), Device(Costs(), token=7)
        rig = vllm_rig.Rig(
            Adapter(FuzzPolicy(seed, preempts=0.1)),
            Limits(4, 20, 60),
            24,
            4,
            asynchronous=asynchronous,
            prefix_cache=True,
        )
        made_up = rig.result

        def result(output: Any, sampled: set[str]) -> Any:
            found, expected = rig.launched.pop(0), made_up(output, sampled)  # noqa: B023 - of this run
            assert tokens(found) == tokens(expected)
            return found

        rig.launched, rig.result, schedule = [], result, rig.schedule

        def launch() -> Any:
            output = schedule()  # noqa: B023 - of this run
            rig.launched.append(device.launch(output)._output)  # noqa: B023 - of this run
            return output

        rig.schedule = launch
        clients = Clients(numbers)
        for turn in range(2000):
            clients.act(rig)
            if not (clients.num_left or rig.in_flight or rig.scheduler.has_requests()):
                break
            rig.now = 1e-3 * turn
            clients.take(rig.step())
        check_nothing_is_lost(rig, clients)
        assert len(device._prompts) <= 1, "requests that have ended are forgotten"


def test_an_iteration_takes_what_is_predicted_and_follows_the_one_before(vllm_rig: Any) -> None:
    """A prompt of 20 tokens in chunks of 8, and its decodes."""
    from cbatch.vllm import Adapter
    from cbatch.vllm.executor import Device
    from policies.chunking import Fixed
    from policies.sarathi_serve import SarathiServe

    costs = Costs()
    device = Device(costs, token=7)
    rig = vllm_rig.Rig(Adapter(SarathiServe(Fixed(8))), Limits(4, 20, 60), 24, 4)
    rig.scheduler.add_request(rig.request(Request(0, 20, 3)))
    ends = []
    while rig.scheduler.has_requests():
        output = rig.schedule()
        if output.total_num_scheduled_tokens:
            ends.append(device.launch(output).at)
        rig.update()
    assert costs.shapes == [
        BatchShape(((8, 0),)),
        BatchShape(((8, 8),)),
        BatchShape(((4, 16),)),
        BatchShape((), 1, 21),
        BatchShape((), 1, 22),
    ]
    assert [round(later - end, 6) for end, later in pairwise(ends)] == [8, 4, 1, 1]
