"""`transformers` measured as a peer: its continuous batching itself, with a tiny model on a CPU."""

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from cbatch import CbatchError, Request
from reproduction.bench.peers import __main__ as command
from reproduction.bench.peers import measure
from reproduction.bench.peers.cases import CASES, Case
from reproduction.bench.peers.transformers_engine import TransformersEngine

OUTPUTS = (4, 1, 9, 2, 6)
REQUESTS = [Request(id_, 5 + id_, new, prompt=[7] * (5 + id_)) for id_, new in enumerate(OUTPUTS)]


def test_each_request_gets_its_tokens_and_the_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at a time. By default the cache would take most of the memory. An engine that was stopped is an error."""
    started: list[TransformersEngine] = []

    def start(*arguments: Any) -> TransformersEngine:
        started.append(TransformersEngine(*arguments))
        return started[0]

    small = partial(transformers.ContinuousBatchingConfig, num_blocks=16, block_size=16)
    monkeypatch.setattr("transformers.ContinuousBatchingConfig", small)  # of the module that is imported then
    monkeypatch.setitem(command.PEERS, "transformers", command.PEERS["transformers"]._replace(start=start))
    monkeypatch.setitem(CASES, "tiny", Case("decode", "tiny", batch=3, budget=32, new=4))
    monkeypatch.setattr(measure, "requests_of", lambda *_: REQUESTS)
    monkeypatch.setattr(measure, "graphics_card", lambda: ("NVIDIA H200", "580.159"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(gc, "collect", lambda: 0)  # at each end of a manager, of all that the tests before have left
    options = ["transformers", "cases=tiny", "repeats=2", f"folder={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["peers", *options])
    assert command.main(options) == 0, "serves them three times, or says which got too few"
    file = json.loads((tmp_path / "h200/peers/transformers-tiny.json").read_text())
    assert file["command"] == "python -m reproduction.bench.peers transformers cases=tiny repeats=2"
    assert file["row"] == f"transformers {transformers.__version__}, SDPA, sync"
    assert (file["prompt_tokens"], file["output_tokens"]) == (5 + 6 + 7 + 8 + 9, sum(OUTPUTS))
    limits = {"max_batch_tokens": 32, "max_requests_per_batch": 3, "allow_block_sharing": False}
    engine = {key: file["engine"][key] for key in ("arguments", "attention", "async_scheduling")}
    assert engine == {"arguments": limits, "attention": "paged|sdpa", "async_scheduling": False}, "on a CPU"
    with pytest.raises(CbatchError, match="the manager of transformers has stopped"):
        started[0].serve(REQUESTS)
