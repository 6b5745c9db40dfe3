"""Text that repeats: the checkpoint continues it by a margin that no rounding can close, and drafts are accepted to the known share."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cbatch import Limits
from cbatch.drafts import ModelDrafter, NgramDrafter
from cbatch.runtime.options import Options
from experiments.settings.backends import Cpu
from experiments.setup.presets import load_spec
from experiments.setup.servers import real_server
from reproduction import RESULTS
from reproduction.bench.drafts import WORKS, FixedDrafts, name_of
from reproduction.repeating import CYCLE, Text, expected_outcomes, next_tokens, write_checkpoint, wrong_share


@pytest.mark.long
def test_transformers_continues_the_text_in_bfloat16_by_a_margin(tmp_path: Path) -> None:
    spec = replace(load_spec("tiny"), num_layers=8, hidden_size=256, head_dim=64, vocab_size=4096, dtype="bfloat16")
    write_checkpoint(spec, tmp_path, "cpu")
    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(tmp_path)
    tokens = torch.tensor([request.prompt for request in Text(1, 256, 1, 0.2).requests(spec.vocab_size)])
    with torch.inference_mode():
        logits = model(tokens).logits.float()
    right = torch.as_tensor(next_tokens(tokens.numpy()))[..., None]
    others = logits.scatter(-1, right, -torch.inf).amax(-1)
    assert (
        logits.gather(-1, right)[..., 0] - others
    ).min() > 0.4 * spec.hidden_size**0.5  # of 1.0 without other tokens


@pytest.mark.long
@pytest.mark.parametrize("misprints", [0.0, 0.2])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_accepted_drafts_are_those_expected(tmp_path: Path, misprints: float, k: int) -> None:
    spec = load_spec("tiny")
    write_checkpoint(spec, tmp_path, "cpu")
    text = Text(6, 192, 70, misprints)
    requests = text.requests(spec.vocab_size)
    limits = Limits(6, 1024, 262, max_drafts=k)
    options = Options(drafter=NgramDrafter(k))
    with closing(real_server(Cpu(), replace(spec, path=str(tmp_path)), limits, options)) as server:
        record = server.serve(FixedDrafts(k), requests, asynchronous=False)
    drafts, accepted = expected_outcomes(text.requests(spec.vocab_size), k).sum(0)
    assert sum(step.num_drafts for step in record.steps) == drafts
    assert sum(step.num_accepted for step in record.steps) == accepted
    assert wrong_share(requests) == 0


@pytest.mark.long
def test_accepted_drafts_of_a_model_are_those_expected(tmp_path: Path) -> None:
    """Its shape is another, and it is wrong after a fifth of all tokens."""
    spec, small = load_spec("tiny"), replace(load_spec("tiny"), hidden_size=128, num_layers=1)
    write_checkpoint(spec, tmp_path / "target", "cpu")
    write_checkpoint(small, tmp_path / "draft", "cpu", skips=0.2)
    text = Text(6, 192, 70)
    requests, limits = text.requests(spec.vocab_size), Limits(6, 1024, 262, max_drafts=3)
    options = Options(drafter=ModelDrafter(replace(small, path=str(tmp_path / "draft"))))
    with closing(real_server(Cpu(), replace(spec, path=str(tmp_path / "target")), limits, options)) as server:
        record = server.serve(FixedDrafts(3), requests, asynchronous=False)
    drafts, accepted = expected_outcomes(text.requests(spec.vocab_size), 3, 0.2).sum(0)
    assert sum(step.num_drafts for step in record.steps) == drafts
    assert sum(step.num_accepted for step in record.steps) == accepted
    assert 0.4 < accepted / drafts < 0.8 and wrong_share(requests) == 0


def test_outcomes_by_hand() -> None:
    """70 tokens: the first has no draft, 17 verifications yield 4 each, and the last has no room for a draft."""
    outcomes = expected_outcomes(Text(1, 2 * CYCLE, 70).requests(4 * CYCLE), 3)
    assert outcomes.tolist() == [[3, 3]] * 17
    assert not expected_outcomes(Text(1, 2 * CYCLE, 70).requests(4 * CYCLE), 0).size
    [request] = Text(1, 2 * CYCLE, 3).requests(4 * CYCLE)
    assert request.prompt is not None
    request.prompt[CYCLE + 1] = (
        4 * CYCLE - 1
    )  # follows the earliest occurrence of the five tokens that end with the first output, 0
    assert expected_outcomes([request], 2).tolist() == [[1, 0]]


@pytest.mark.parametrize(("method", "missing", "places"), [("ngram", False, (4, 5, 6)), ("ngram_gpu", True, (4,))])
def test_vllm_accepted_what_the_text_accepts(method: str, missing: bool, places: tuple[int, ...]) -> None:
    """To the last draft. Both count drafts beyond the end of an output; `ngram` leaves out those that were not found."""
    stored = json.loads(Path(RESULTS, "h200", "peers.json").read_text(encoding="utf-8"))
    figures = stored["engines"][f"vllm-drafts-{method}"]["figures"]
    for work in (WORKS[place] for place in places):
        drafts, accepted = expected_outcomes(work.requests(128_256), 3, missing=missing, beyond=True).sum(0)
        assert figures[name_of(work, 3)]["acceptance"] == pytest.approx(accepted / drafts, rel=1e-12)
