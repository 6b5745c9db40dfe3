"""Tiny models, and the tokens that `transformers` itself generates with them."""

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import torch
from poison import poisoned
from transformers import PreTrainedModel

from cbatch import Limits, Request, Sampling
from cbatch.kv import KVSize
from cbatch.model import ModelSpec, split_layers
from cbatch.model.topology import split_ranks
from cbatch.runtime.attention import Attention, ReferenceAttention
from cbatch.runtime.cpu import assemble, make_models
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.model import PagedModel
from cbatch.runtime.weights import load_model

P = ParamSpec("P")
torch.set_num_threads(1)  # the matrices are too small to share

CPU = torch.device("cpu")
NUM_REFERENCES = 16
LONGEST_PROMPT = 40
LONGEST_OUTPUT = 16
TIE = 1e-4
"""Logits or probabilities this close may be ordered either way in float32; such prompts are not used."""

LLAMA = ModelSpec("tiny-llama", "llama", 2, 32, 4, 2, 8, 64, 96, 512, "float32")
DEEP = replace(LLAMA, name="tiny-deep", num_layers=4)
QWEN3 = ModelSpec("tiny-qwen3", "qwen3", 2, 32, 4, 1, 16, 64, 96, 512, "float32")


class Reference(NamedTuple):
    """A prompt, how it is sampled, and the tokens that follow it."""

    prompt: list[int]
    sampling: Sampling
    output: list[int]

    def request(self, id: int, max_new_tokens: int, stop_tokens: tuple[int, ...] = ()) -> Request:
        return Request(
            id, len(self.prompt), max_new_tokens, prompt=self.prompt, sampling=self.sampling, stop_tokens=stop_tokens
        )

    def expected(self, max_new_tokens: int, stop_tokens: tuple[int, ...] = ()) -> list[int]:
        """The output up to the limit or the first stop token, which is its last."""
        output = self.output[:max_new_tokens]
        stops = [place for place, token in enumerate(output) if token in stop_tokens]
        return output[: stops[0] + 1] if stops else output


def plain_model(spec: ModelSpec, device: torch.device) -> PreTrainedModel:
    """The same weights with `transformers`' own attention, for its `generate`."""
    model = load_model(spec, device)
    model.set_attn_implementation("eager")
    return model


@cache
def paged_weights(spec: ModelSpec) -> PreTrainedModel:
    return load_model(spec, CPU)


def stage_models(
    spec: ModelSpec,
    kv: KVSize,
    attention: Attention,
    num_stages: int = 1,
    sizes: Sequence[int] | None = None,
    num_ranks: int = 1,
) -> list[list[PagedModel]]:
    """The models of each stage's ranks, with weights that are shared by all tests. sizes: layers of each stage."""
    layers, ranks = split_layers(spec, num_stages, sizes), split_ranks(spec, num_ranks)
    return make_models(paged_weights(spec), spec, kv, layers, ranks, attention)


def make_executor(
    spec: ModelSpec, limits: Limits, num_blocks: int, block_size: int, num_host_blocks: int = 0
) -> StreamExecutor:
    """Like `cpu.build`, poisoned, with weights that are shared by all tests."""
    models = stage_models(
        spec, KVSize(num_blocks, block_size, num_host_blocks), ReferenceAttention(), limits.num_stages
    )
    return poisoned(assemble, models, limits)


def made_once(make: Callable[P, list[Reference]]) -> Callable[P, list[Reference]]:
    """Keeps what a function returns: in memory, and for the other processes of this run of the tests in a file."""

    @cache
    def kept(*what: Any) -> list[Reference]:
        if (folder := os.environ.get("TESTS_KEEP")) is None:
            return make(*what)
        file = Path(folder) / f"{make.__name__}-{sha256(repr(what).encode()).hexdigest()[:16]}.pickle"
        if not file.exists():
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_bytes(pickle.dumps(make(*what)))
            partial.replace(file)
        references: list[Reference] = pickle.loads(file.read_bytes())
        return references

    return kept


@made_once
def greedy_references(spec: ModelSpec, number: int = NUM_REFERENCES) -> list[Reference]:
    """Prompts of 1 to `LONGEST_PROMPT` tokens with the tokens of `generate`, which takes all at once, padded on the left."""
    model = plain_model(spec, CPU)
    model.set_attn_implementation("sdpa")  # eager attention of padding is not a number in float64
    random = np.random.default_rng(7)
    references: list[Reference] = []
    while len(references) < number:
        drawn = []
        for place in range(len(references), number):
            prompt = random.integers(0, spec.vocab_size, 1 + place * LONGEST_PROMPT // number).tolist()
            drawn.append((prompt, random.bit_generator.state))
        longest = len(drawn[-1][0])
        made = model.generate(
            torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in drawn]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in drawn]),
            max_new_tokens=LONGEST_OUTPUT,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(made.scores).topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).amin(0).tolist()
        for (prompt, state), gap, output in zip(drawn, gaps, made.sequences[:, longest:].tolist(), strict=True):
            if not gap > TIE:
                random.bit_generator.state = state
                break
            references.append(Reference(prompt, Sampling(), output))
    return references


@made_once
def sampled_references(spec: ModelSpec) -> list[Reference]:
    """Prompts with tokens sampled one request at a time, each computed from scratch."""
    model = plain_model(spec, CPU)
    random = np.random.default_rng(8)
    ways = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.8), (1.0, 20, 0.6), (0.0, 0, 1.0)]
    references: list[Reference] = []
    while len(references) < NUM_REFERENCES:
        temperature, top_k, top_p = ways[len(references) % len(ways)]
        sampling = Sampling(temperature, top_k, top_p, seed=int(random.integers(2**40)))
        prompt = random.integers(0, spec.vocab_size, 1 + int(random.integers(LONGEST_PROMPT))).tolist()
        tokens = list(prompt)
        while len(tokens) < len(prompt) + LONGEST_OUTPUT:
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0, -1].double().numpy()
            drawn = draw(logits, sampling, splitmix(sampling.seed, len(tokens)))
            if drawn is None:
                break
            tokens.append(drawn)
        else:
            references.append(Reference(prompt, sampling, tokens[len(prompt) :]))
    return references


def splitmix(seed: int, position: int) -> float:
    """The random number of a token (SplitMix64), in Python's integers."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> shift) * factor % 2**64
    return ((z ^ z >> 31) >> 40) / 2**24


def draw(logits: np.ndarray, sampling: Sampling, number: float) -> int | None:
    """Sampling written out for one row, token by token. None if rounding could decide otherwise."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    gaps = [logits[left] - logits[right] for left, right in pairwise(order)]
    if sampling.temperature == 0:
        return order[0] if gaps[0] > TIE else None
    weights = [float(np.exp((logits[token] - logits[order[0]]) / sampling.temperature)) for token in order]
    kept = weights[: sampling.top_k] if sampling.top_k else weights
    nucleus, whole = len(kept), sum(kept)
    if sampling.top_p < 1:
        before = [sum(kept[:place]) / whole for place in range(len(kept))]
        nucleus = sum(share < sampling.top_p for share in before)
        if any(abs(share - sampling.top_p) < TIE for share in before):
            return None
    shares = np.cumsum(kept[:nucleus]) / sum(kept[:nucleus])
    place = int((shares <= number).sum())
    near_gaps = gaps[max(place - 1, 0) : place + 1]
    tie = min(near_gaps) < TIE or bool((abs(shares[:-1] - number) < TIE).any())
    return None if tie else order[place]


def save_model_of_words(folder: Path) -> None:
    """Saves a checkpoint with a word for each token, w0 to w95."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    load_model(LLAMA, CPU).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{id_}": id_ for id_ in range(LLAMA.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
