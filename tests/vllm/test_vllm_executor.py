"""vLLM's real scheduler on a simulated device: which requests receive a token, and how long iterations take."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz_policy import FuzzPolicy
from test_vllm_fuzz import Clients, check_nothing_is_lost
from vllm_rig import Rig

from cbatch import BatchShape, ConfigError, Limits, Request
from cbatch.vllm import Adapter
from cbatch.vllm.executor import Device
from experiments.vllm_executor import SimulatedExecutor
from experiments.vllm_platform import register
from policies.chunking import Fixed
from policies.sarathi_serve import SarathiServe


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
def test_the_device_samples_what_vllm_expects(asynchronous: bool) -> None:
    """With chunks, prefix hits, aborts and preempted requests that come back with their outputs."""
    for seed in range(10):
        numbers, device = random.Random(seed), Device(Costs(), token=7)
        rig = Rig(
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
        for _ in clients.turns(rig):
            clients.take(rig.step())
        check_nothing_is_lost(rig, clients)
        assert len(device._prompts) <= 1, "requests that have ended are forgotten"


def test_an_iteration_takes_what_is_predicted_and_follows_the_one_before() -> None:
    """A prompt of 20 tokens in chunks of 8, and its decodes."""
    costs = Costs()
    device = Device(costs, token=7)
    rig = Rig(Adapter(SarathiServe(Fixed(8))), Limits(4, 20, 60), 24, 4)
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


def executor(
    monkeypatch: pytest.MonkeyPatch, variable: str, world_size: int = 1, num_layers: int = 32, drafter: Any = None
) -> Any:
    """The one that `--distributed-executor-backend` names, as vLLM makes it for a model of 4,096 wide layers."""
    monkeypatch.setenv("CBATCH", variable)
    made = SimulatedExecutor()
    made.speculative_config = drafter
    text = SimpleNamespace(num_hidden_layers=num_layers, hidden_size=4096)
    made.model_config = SimpleNamespace(hf_text_config=text, get_vocab_size=lambda: 128, dtype=torch.bfloat16)
    made.parallel_config = SimpleNamespace(world_size=world_size)
    made.scheduler_config = SimpleNamespace(max_num_seqs=64, async_scheduling=True)
    made.cache_config = SimpleNamespace(block_size=16, gpu_memory_utilization=0.9)
    made._init_executor()
    return made


def test_a_simulated_gpu_has_the_memory_of_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    made = executor(monkeypatch, "policy=orca hardware=h200 model=llama-3.1-8b vllm.simulate=true")
    (memory,), (layers,) = made.determine_available_memory(), made.get_kv_cache_specs()
    assert memory == pytest.approx(0.9 * 150109880320 - 2 * 8.03e9, rel=1e-3), "16 bits for each of 8.03e9 weights"
    assert len(layers) == 32 and {(each.block_size, each.num_kv_heads, each.head_size) for each in layers.values()} == {
        (16, 8, 128)
    }
    empty = SimpleNamespace(total_num_scheduled_tokens=0)
    assert made.execute_model(empty, non_block=True).result().sampled_token_ids == []


@pytest.mark.parametrize(
    ("variable", "given", "said"),
    [
        ("", {}, "CBATCH='': model: is missing"),
        ("model=llama-3.1-8b hardware=h201", {}, "hardware=h201: no such profile"),
        ("model=llama-3.1-8b", {"num_layers": 40}, "vLLM serves 40 layers of 4096 on 1 GPU"),
        ("model=llama-3.1-8b", {"world_size": 2}, "on 2 GPUs"),
        (
            "model=llama-3.1-8b",
            {"drafter": object()},
            "simulated workers propose no drafts; leave out --speculative-config",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    variable: str, given: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        executor(monkeypatch, variable, **given)
    assert "\n" not in str(raised.value)


def test_only_a_variable_that_asks_for_it_takes_the_place_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, name in (
        ("policy=orca", None),
        ("policy=orca vllm.simulate=true", "experiments.vllm_platform.NoDevice"),
        ("policy=orca vllm.simulate=on", "experiments.vllm_platform.NoDevice"),
        ("policy=orca ++vllm.simulate=true", "experiments.vllm_platform.NoDevice"),
        ("policy=orca vllm.simulate=off", None),
    ):
        monkeypatch.setenv("CBATCH", variable)
        assert register() == name
