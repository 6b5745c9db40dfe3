"""Long prompts, whole and in chunks, alone and beside 32 decodes: served on this machine's GPU and simulated.

python -m reproduction.validation long_prompts hardware=h100
python -m reproduction.validation long_prompts measured=reproduction/results/h100/long_prompts.json    # needs no GPU
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cbatch import KVSize, Limits, Request, Server
from cbatch.sim import load_profile
from experiments.settings.backends import Cuda
from experiments.settings.compose import compose_run
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.validation.compare import simulated_server, tables_of

MODEL, LIMITS, SIZE = "llama-3.1-8b", Limits(33, 65_536, 131_072), KVSize(2_048, 128)
PROMPTS, DECODES, LATER = (16_384, 32_768, 65_280), 32, 3.0
"""Tokens of the long prompt; requests that decode when it arrives, so many seconds later."""

POLICIES = {"whole": "policy=orca", "chunks of 2,048": "policy=sarathi_serve chunk=2048"}


def main(hardware: str = "h100", measured: str = "", name: str = "long_prompts", folder: str = RESULTS) -> None:
    """Prints the seconds from arrival to first token; what was served is written to NAME.json. measured: such a file, simulated again."""
    keys = list(product(POLICIES, PROMPTS, (0, DECODES)))
    spec, profile = load_spec(MODEL), load_profile(hardware)
    simulator = simulated_server(profile, spec, LIMITS, SIZE)
    simulated = [seconds(simulator, *key) for key in keys]
    if measured:
        served = [run["measured"] for run in json.loads(Path(measured).read_text(encoding="utf-8"))["runs"]]
    else:
        from experiments.setup.servers import equal_requests, real_server  # loads torch

        server = real_server(
            Cuda(), spec, LIMITS, kv_tokens=SIZE.num_blocks * SIZE.block_size, block_size=SIZE.block_size
        )
        server.serve(_policy("whole"), equal_requests(2, 3_000, 8, spec.vocab_size))  # compiles kernels
        served = [seconds(server, *key) for key in keys]
    runs = pd.DataFrame(keys, columns=["prompts", "tokens", "decodes"]).assign(measured=served, simulated=simulated)
    print(
        runs.assign(error=runs["simulated"] / runs["measured"] - 1).to_string(index=False, float_format="{:.3f}".format)
    )
    if not measured:
        figures: Mapping[str, Any] = {
            "profile": profile.name,
            "tables": tables_of(profile),
            "runs": runs.to_dict("records"),
        }
        print(f"written: {write_benchmark(name, profile.hardware, dict(figures), folder, VALIDATION)}")


def seconds(server: Server, how: str, tokens: int, decodes: int) -> float:
    """Returns the time to first token of a prompt of so many tokens, which arrives while others decode."""
    draw, vocabulary = np.random.default_rng(tokens), load_spec(MODEL).vocab_size
    lengths = [900 + 7 * index for index in range(decodes)] + [tokens]
    prompts = [draw.integers(0, vocabulary, length).tolist() for length in lengths]
    requests = [Request(index, len(prompt), 900, prompt=prompt) for index, prompt in enumerate(prompts[:-1])]
    last = Request(decodes, tokens, 4, prompt=prompts[-1], arrival_time=LATER if decodes else 0.0)
    record = server.serve(_policy(how), [*requests, last])
    first = last.first_token_at
    assert first is not None
    return first - (last.arrival_time if decodes else record.steps[0].planned_at)


def _policy(how: str) -> Any:
    return compose_run(*POLICIES[how].split(), f"max_tokens={LIMITS.max_tokens}").policy()
