"""Text that repeats, whose drafts are accepted to a known share: checkpoints and prompts.

The model's next token is a fixed function of its last one: a permutation whose cycles have `CYCLE` tokens. A prompt is a cycle, repeated, with a
share of misprints, so that the model continues the cycle, and drafts that were copied from a misprint are rejected. The weights that write to the
residual stream are scaled by 1/1000, so all products are computed with random numbers and change no token. A draft model skips a token after a known
share of all tokens.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch import ModelSpec, Request
from cbatch.drafts import NgramDrafter
from cbatch.executor import Tokens

CYCLE = 64
SCALE = 1e-3


class Text(NamedTuple):
    """`number` requests of `prompt` and `new` tokens, each in a cycle of its own, while there are enough. misprints: share of the prompts."""

    number: int
    prompt: int
    new: int
    misprints: float = 0.0

    def requests(self, vocabulary: int) -> list[Request]:
        draw = np.random.default_rng(0)
        cycles = draw.permutation(np.arange(self.number) % (vocabulary // CYCLE))
        tokens = cycles[:, None] * CYCLE + np.arange(self.prompt) % CYCLE
        wrong = draw.random(tokens.shape) < self.misprints
        wrong[:, -NgramDrafter().max_n :] = False  # the output continues the last tokens
        tokens[wrong] = draw.integers(0, vocabulary, int(wrong.sum()))
        return [Request(id_, self.prompt, self.new, prompt=prompt) for id_, prompt in enumerate(tokens.tolist())]


def next_tokens(tokens: Any, skips: float = 0.0) -> Any:
    """Returns the token after each: the next of its cycle, or the one after that for a share of all tokens."""
    skipped = (tokens * 40503 % 65536 < skips * 65536) * 1
    return tokens // CYCLE * CYCLE + (tokens + 1 + skipped) % CYCLE


def wrong_share(requests: Sequence[Request]) -> float:
    """Returns the share of output tokens that do not continue the cycle."""
    tokens = np.array([[request.prompt[-1], *request.output] for request in requests if request.prompt])
    return float((tokens[:, 1:] != next_tokens(tokens[:, :-1])).mean())


def right_drafts(requests: Sequence[Request], propose: Callable[[Tokens, int], Tokens], k: int) -> NDArray[np.int64]:
    """Returns how many of k drafts are right before the first wrong one, [requests, tokens known]; 0 before the first output."""
    right = np.zeros((len(requests), max(request.max_tokens for request in requests) + 1), np.int64)
    for row, request in enumerate(requests):
        text = _text(request)
        for known in range(request.num_prompt_tokens + 1, request.max_tokens):
            right[row, known] = _count_right(propose(text[:known], k), text[known:])
    return right


def expected_outcomes(
    requests: Sequence[Request], k: int, skips: float | None = None, *, missing: bool = True, beyond: bool = False
) -> NDArray[np.int64]:
    """Returns drafts and accepted drafts of each verification, [verifications, 2], found by following the text with the drafter's rule.

    skips: of a draft model; None: n-grams. missing: drafts that were not found count as rejected. beyond: drafts beyond the end of the output count, too.
    """
    outcomes: list[tuple[int, int]] = []
    propose = NgramDrafter().propose if skips is None else partial(continue_text, skips=skips)
    for request in requests:
        text, known, end = _text(request, k), request.num_prompt_tokens + 1, request.max_tokens
        while known < end and (number := k if beyond else min(k, end - known - 1)) > 0:
            drafts = propose(text[:known], number)
            accepted = _count_right(drafts, text[known:])
            if missing or len(drafts):
                outcomes.append((number if missing else len(drafts), accepted))
            known += 1 + accepted
    return np.array(outcomes, np.int64).reshape(-1, 2)


def _text(request: Request, more: int = 0) -> Tokens:
    """Returns prompt and output of a request, and so many further tokens."""
    assert request.prompt is not None
    last, number = request.prompt[-1], request.max_tokens - request.num_prompt_tokens + more
    true = last // CYCLE * CYCLE + (last + 1 + np.arange(number)) % CYCLE
    return np.array([*request.prompt, *true.tolist()], np.int32)


def _count_right(drafts: Tokens, text: Tokens) -> int:
    """Returns how many drafts are right before the first wrong one."""
    number = min(len(drafts), len(text))
    return int(np.logical_and.accumulate(drafts[:number] == text[:number]).sum())


def continue_text(known: Tokens, k: int, skips: float) -> Tokens:
    """Returns the drafts of a model that skips tokens; see `next_tokens`."""
    text = [known[-1]]
    for _ in range(k):
        text.append(next_tokens(text[-1], skips))
    return np.array(text[1:], np.int32)


def write_checkpoint(spec: ModelSpec, folder: Path, device: str = "cuda", skips: float = 0.0) -> None:
    """Writes a checkpoint, made on the device, whose memory is free again afterwards. skips: see `next_tokens`."""
    import torch

    make_model(spec, device, skips).save_pretrained(folder)
    gc.collect()
    torch.cuda.empty_cache()


def make_model(spec: ModelSpec, device: Any, skips: float = 0.0) -> Any:
    """Returns a model of the Llama family, of `transformers`, with the shape and type of `spec`, whose embedding must not be tied."""
    import torch

    from cbatch.runtime.weights import load_model

    model = load_model(spec, torch.device(device))
    for name, weights in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights.mul_(SCALE)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tokens = torch.arange(len(head.weight) // CYCLE * CYCLE, device=device)
    embedding.weight.normal_(generator=torch.Generator(device).manual_seed(0))
    head.weight.zero_().index_add_(
        0, next_tokens(tokens, skips), embedding.weight[tokens] / head.weight.shape[1] ** 0.5
    )
    return model
