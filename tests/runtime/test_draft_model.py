"""Drafts by a smaller model: the tokens are those without drafts, and each draft is the one that the model proposes when it reads the text alone."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from any_order import any_order
from fuzz_policy import FuzzPolicy
from guesses import Speculating
from rig import Ask, build, threads
from tiny_models import CPU, LLAMA, LONGEST_OUTPUT, Reference, greedy_references, plain_model, sampled_references

from cbatch import Policy
from cbatch.drafts import ModelDrafter, TableDrafts
from cbatch.model import ModelSpec
from cbatch.runtime.weights import load_model
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe

SPEC = replace(LLAMA, dtype="float64")  # no rounding decides between two tokens
K = 4


@pytest.fixture(scope="module")
def similar(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Like `SPEC`, with noise on its weights: more than half of its drafts are right."""
    folder, model = tmp_path_factory.mktemp("similar"), load_model(SPEC, CPU)
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight), alpha=0.04 * float(weight.std(correction=0)))
    model.save_pretrained(folder)
    return replace(SPEC, name="similar", path=str(folder))


class Outcomes:
    """Compares the outcome of each verification with what the draft model proposes, by `transformers`.

    Up to the first wrong draft, the text with the drafts is the text itself: one pass over it has the draft after each token.
    """

    def __init__(self, draft: ModelSpec, texts: list[list[int]]) -> None:
        """texts: prompt and output of each request."""
        self._texts, self._model = texts, plain_model(draft, CPU)
        self._drafts = cache(lambda request: self._likeliest(texts[request]))
        self.num_drafts = self.num_accepted = 0

    def _likeliest(self, text: list[int]) -> list[int]:
        with torch.inference_mode():
            return self._model(torch.tensor([text])).logits[0].argmax(-1).tolist()

    def check(self, request: int, known: int, drafts: int, accepted: int) -> None:
        """known: tokens before the verification."""
        proposed, text = self._drafts(request)[known - 1 :], self._texts[request][known:]
        same = [draft == token for draft, token in zip(proposed, text, strict=False)]
        assert accepted == [*same[:drafts], False].index(False), f"request {request}, {known} tokens, {drafts} drafts"
        self.num_drafts, self.num_accepted = self.num_drafts + drafts, self.num_accepted + accepted


CASES = [
    (Orca(), 1, 1, False, 60, 0, False),
    (SarathiServe(Fixed(7)), 1, 1, True, 60, 0, True),
    (SarathiServe(Fixed(7)), 1, 1, True, 24, 40, False),
    (FuzzPolicy(2), 1, 1, True, 17, 30, False),
    (FuzzPolicy(3), 2, 1, True, 20, 30, True),
    (FuzzPolicy(4), 1, 2, True, 24, 30, False),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_same", "policy", "num_stages", "num_ranks", "asynchronous", "num_blocks", "num_host_blocks", "sampled"),
    [*((False, *case) for case in CASES), *((True, *case) for case in CASES[::2])],
)
def test_each_draft_is_the_models_own(
    is_same: bool,
    policy: Policy,
    num_stages: int,
    num_ranks: int,
    asynchronous: bool,
    num_blocks: int,
    num_host_blocks: int,
    sampled: bool,
    similar: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With chunks, prompts and answers found in the prefix cache and in host memory, preemptions, and after rejected drafts."""
    references = sampled_references(SPEC) if sampled else greedy_references(SPEC)
    numbers, draft = random.Random(num_blocks), SPEC if is_same else similar
    asks = [
        Ask(id_ % 6, LONGEST_OUTPUT - answered, arrival_iteration=2 * id_, answered=answered)
        for id_, answered in enumerate(numbers.choice((0, 0, numbers.randint(1, 9))) for _ in range(14))
    ]
    outcomes = Outcomes(draft, [_text(references[ask.reference]) for ask in asks])

    def note(drafts: TableDrafts, rows: Any, numbers: Any, accepted: Any) -> None:
        table = drafts._table
        for row, number, count in zip(rows.tolist(), numbers.tolist(), accepted.tolist(), strict=True):
            known = table.known.item(row) - count - 1
            outcomes.check(table.id.item(row), known, number, count)

    monkeypatch.setattr(TableDrafts, "note", note)
    rig = build(
        any_order(numbers, num_stages) if asynchronous else threads(),
        policy if isinstance(policy, FuzzPolicy) else Speculating(policy),
        asks,
        references,
        spec=SPEC,
        asynchronous=asynchronous,
        num_stages=num_stages,
        num_ranks=num_ranks,
        num_blocks=num_blocks,
        poison=True,
        check=True,
        prefix_cache=LRU(),
        num_host_blocks=num_host_blocks,
        max_drafts=K,
        drafter=ModelDrafter(draft, K),
    )
    rig.run()
    assert sum(request.num_cached_tokens for request in rig.requests) > 0
    all_accepted = outcomes.num_accepted == outcomes.num_drafts
    assert outcomes.num_drafts > 40 and outcomes.num_accepted > 10 and all_accepted == (is_same and not sampled)


def _text(reference: Reference) -> list[int]:
    return [*reference.prompt, *reference.output]
