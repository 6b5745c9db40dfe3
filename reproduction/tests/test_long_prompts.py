"""Long prompts beside decodes, on a simulated server in the place of a GPU's."""

import pytest

from cbatch import Server
from cbatch.sim import ProfileCost, SimExecutor, load_profile
from experiments.setup.presets import load_spec
from reproduction.validation.long_prompts import LIMITS, MODEL, SIZE, seconds


def test_a_prompt_waits_for_the_decodes_beside_it_once_for_each_of_its_chunks() -> None:
    cost = ProfileCost(load_profile("h100"), load_spec(MODEL), max_batch=LIMITS.max_batch)
    server = Server(SimExecutor(cost, 0.0), LIMITS, cost, SIZE)
    whole, chunks = (
        [seconds(server, how, 8192, decodes) for decodes in (0, 32)] for how in ("whole", "chunks of 2,048")
    )
    decode = 7.5e-3  # an iteration of 32 decodes of about 1,100 tokens, most of whose time is reading the weights
    assert whole[0] < whole[1] < whole[0] + 3 * decode  # two iterations are launched before it, and its own has decodes
    assert whole[1] - whole[0] < chunks[1] - chunks[0] < 6 * decode  # four have decodes
    assert chunks[0] == pytest.approx(whole[0], rel=0.05)
