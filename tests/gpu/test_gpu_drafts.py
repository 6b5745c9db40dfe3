"""On GPUs, with drafts, of which some are wrong, each request gets the tokens that it gets alone."""

import copy
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_policy import FuzzPolicy
from gpu_models import BLOCK_SIZE, CUDA, LIMITS, TINY_LLAMA, TINY_QWEN3, error, make_batch, with_same_weights
from guesses import Guesses, Speculating
from poison import poisoned
from rig import Ask
from schedules import UnitCost
from test_gpu_kernels import DTYPES
from test_gpu_tokens import AMPLE, LAYOUTS, POLICIES, SCARCE, expected_of
from tiny_models import LONGEST_OUTPUT, greedy_references, sampled_references

from cbatch import Limits, Server
from cbatch.arrivals import Listed
from cbatch.drafts import NO_DRAFT, ModelDrafter, NgramDrafter
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.batch import Extents, Shape, Work
from cbatch.runtime.carry import Drafting, TextProposer
from cbatch.runtime.fast.attention.triton_decodes import Decodes
from cbatch.runtime.fast.ngram_drafting import NgramDrafting
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.options import Options
from cbatch.runtime.slots import RankSlot
from policies.evictions import LRU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (4, 4), (8, 1), (6, 1)])
@pytest.mark.parametrize("requests", [1, 7, 60])
def test_rows_of_a_request_share_one_read(requests: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """One to nine rows of each request, contexts at and beside the borders of blocks; without drafts the same rows are read one by one."""
    numbers = random.Random(requests)
    groups = [(numbers.choice((1, 2, 4, 5, 9)), numbers.choice((1, 5, 63, 64, 65, 700))) for _ in range(requests)]
    rows = [(1, first + place) for number, first in groups for place in range(number)]
    width = 800 // BLOCK_SIZE
    batch = make_batch([*rows, (0, 0)], BLOCK_SIZE, width)
    batch.drafts[: len(rows)] = torch.tensor([place for number, _ in groups for place in range(number)])
    firsts = (torch.arange(len(rows), device=CUDA) - batch.drafts[: len(rows)])[:, None].expand(-1, width).long()
    batch.block_tables[: len(rows)] = batch.block_tables.gather(0, firsts)
    query = torch.randn((len(rows), heads, 64), device=CUDA).to(dtype)
    keys, values = torch.randn((2, (len(rows) + 1) * width, BLOCK_SIZE, kv_heads, 64), device=CUDA).to(dtype)
    exact = query.double(), keys.double(), values.double()
    expected = ReferenceAttention()(*exact, batch, Extents(1, 800, 0), scaling=0.1)
    for drafts in (True, False):
        out = Decodes(CUDA, drafts=drafts).write(torch.empty_like(query), query, keys, values, batch, 0.1)
        assert error(out, expected) < DTYPES[dtype]


@pytest.mark.parametrize(("num_stages", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_QWEN3], ids=lambda spec: spec.name)
def test_every_policy_with_drafts_gives_the_same_tokens(
    spec: ModelSpec, sampled: bool, graphs: Any, num_stages: int, num_ranks: int, checkpoints: Path
) -> None:
    """Greedy and drawn tokens; with graphs, every iteration replays one."""
    references = sampled_references(spec) if sampled else greedy_references(spec)
    limits = replace(LIMITS, num_stages=num_stages, max_drafts=3)
    options = Options(graphs=graphs, tensor_parallel=num_ranks, drafter=Guesses(references))
    size = KVSize(AMPLE, BLOCK_SIZE)
    executor = poisoned(gpu.build, with_same_weights(spec, checkpoints), limits, size, options)
    num_drafts = num_accepted = 0
    for name, make in POLICIES.items():
        for asynchronous, num_blocks in ((False, AMPLE), (True, AMPLE), (True, SCARCE)):
            requests = [each.request(index, 1 + index % LONGEST_OUTPUT) for index, each in enumerate(references)]
            policy = make() if name == "fuzz" else Speculating(make())
            server = Server(executor, limits, UnitCost(), KVSize(num_blocks, BLOCK_SIZE), asynchronous)
            record = server.serve(policy, Listed(requests, {index: index // 2 for index in range(len(requests))}))
            what = f"{name}, asynchronous={asynchronous}, {num_blocks} blocks"
            assert [request.output for request in requests] == expected_of(references), what
            num_drafts += sum(step.num_drafts for step in record.steps)
            num_accepted += sum(step.num_accepted for step in record.steps)
    executor.close()
    assert num_drafts > num_accepted > 100
    assert (executor.iteration.num_eager == 0) == (graphs == "all")


@pytest.mark.parametrize(("num_stages", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_QWEN3], ids=lambda spec: spec.name)
def test_a_model_drafts_for_itself_and_for_another(
    spec: ModelSpec, graphs: Any, num_stages: int, num_ranks: int, checkpoints: Path
) -> None:
    """A draft model that is the target has all of its drafts accepted, whatever was computed, found or preempted before; another has few."""
    target, references = with_same_weights(spec, checkpoints), greedy_references(spec)
    limits, size = replace(LIMITS, num_stages=num_stages, max_drafts=3), KVSize(AMPLE, BLOCK_SIZE)
    for draft in (target, replace(TINY_LLAMA, name="other", num_layers=1, seed=5)):
        options = Options(graphs=graphs, tensor_parallel=num_ranks, drafter=ModelDrafter(draft))
        executor = poisoned(gpu.build, target, limits, size, options)
        num_drafts = num_accepted = 0
        for name, make in POLICIES.items():
            for asynchronous, num_blocks in ((False, AMPLE), (True, AMPLE), (True, SCARCE)):
                requests = [each.request(index, 1 + index % LONGEST_OUTPUT) for index, each in enumerate(references)]
                policy = make() if name == "fuzz" else Speculating(make())
                kv = KVSize(num_blocks, BLOCK_SIZE)
                server = Server(executor, limits, UnitCost(), kv, asynchronous, prefix_cache=LRU())
                record = server.serve(policy, Listed(requests, {index: index // 2 for index in range(len(requests))}))
                what = f"{name}, asynchronous={asynchronous}, {num_blocks} blocks"
                assert [request.output for request in requests] == expected_of(references), what
                drafts, accepted = (
                    sum(getattr(step, f"num_{kind}") for step in record.steps) for kind in ("drafts", "accepted")
                )
                assert draft is not target or drafts == accepted, what
                num_drafts, num_accepted = num_drafts + drafts, num_accepted + accepted
        executor.close()
        assert num_drafts > 100 and (draft is target or num_accepted < num_drafts / 2)
        assert (executor.iteration.num_eager == 0) == (graphs == "all")


class OnCpu(NgramDrafter):
    def propose_each(self, texts: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        proposed: torch.Tensor = super().propose_each(texts.cpu(), lengths.cpu(), k)
        return proposed.to(texts.device)


@pytest.mark.parametrize("drafter", [None, NgramDrafter(3, 1, 2)], ids=["guesses", "ngram"])
def test_any_schedule_with_drafts_gives_the_same_tokens(
    drafter: NgramDrafter | None, checkpoints: Path, pytestconfig: pytest.Config
) -> None:
    """Half of `--schedules` of each drafter: lengths, arrivals, stop tokens, policy, loop, KV cache, greedy or drawn."""
    spec, numbers = TINY_LLAMA, random.Random(pytestconfig.getoption("--draw"))
    kinds = greedy_references(spec), sampled_references(spec)
    options = Options(drafter=drafter or Guesses([*kinds[0], *kinds[1]]))
    limits = replace(LIMITS, max_drafts=3)
    executor = poisoned(gpu.build, with_same_weights(spec, checkpoints), limits, KVSize(AMPLE, BLOCK_SIZE), options)
    num_overlapping = num_accepted = 0
    for number in range(max(pytestconfig.getoption("--schedules") // 2, 1)):
        references = numbers.choice(kinds)
        asks = [
            Ask(numbers.randrange(len(references)), numbers.randint(1, LONGEST_OUTPUT), numbers.choice([None, 3, 9]))
            for _ in range(numbers.randint(1, 9))
        ]
        requests = [ask.request(id_, references) for id_, ask in enumerate(asks)]
        arrivals = Listed(requests, {id_: numbers.randrange(13) for id_ in range(len(asks))})
        name, make = numbers.choice([*POLICIES.items()])
        policy = FuzzPolicy(number) if name == "fuzz" else Speculating(make(), number)
        asynchronous, num_blocks = numbers.random() < 0.8, numbers.choice((SCARCE, 10, AMPLE))
        record = Server(executor, limits, UnitCost(), KVSize(num_blocks, BLOCK_SIZE), asynchronous).serve(
            policy, arrivals
        )
        expected = [ask.expected(request, references) for ask, request in zip(asks, requests, strict=True)]
        assert [request.output for request in requests] == expected, f"schedule {number}: {name}, {asynchronous=}"
        steps = record.steps
        num_accepted += sum(step.num_accepted for step in steps)
        num_overlapping += sum(
            step.num_drafts > 0 and later.launched_at < step.received_at for step, later in pairwise(steps)
        )
    executor.close()
    assert num_accepted and num_overlapping


def test_the_kernel_drafts_as_the_operations_do() -> None:
    """Texts of two kinds of tokens, so that ends occur again; drafts in flight, prompts, padding and a first token beside them."""
    numbers, most, width, block_size = random.Random(0), 5, 24, 16
    limits = Limits(64, 2048, width * block_size, max_drafts=most)
    for round_ in range(40):
        rows, drafts = list[tuple[int, int]](), list[int]()
        for _ in range(numbers.choice((1, 9, 40))):
            here = numbers.randrange(most + 1) if round_ % 4 else 0
            first = numbers.choice((1, 2, 7, 40, 200, 300)) + most
            rows += [(1, first + place) for place in range(1 + here)]
            drafts += range(1 + here)
            if round_ % 2 and numbers.random() < 0.3:
                queries = numbers.choice((5, 33))
                rows, drafts = [*rows, (queries, queries + numbers.choice((0, 50)))], [*drafts, 0]
        rows, drafts = [*rows, *[(0, 0)] * 3], [*drafts, 0, 0, 0]
        batch = make_batch(rows, block_size, width)
        place_of = torch.tensor(drafts, device=CUDA)
        heads = torch.arange(len(rows), device=CUDA) - place_of
        batch.drafts.copy_(place_of)
        batch.block_tables.copy_(batch.block_tables[heads])
        owners = heads.repeat_interleave(batch.query_starts.diff())
        places = batch.block_tables[owners, batch.positions // block_size] * block_size + batch.positions % block_size
        batch.kv_indices.copy_(places)
        batch.token_ids.random_(0, 2)
        singles = (batch.query_starts.diff() == 1).nonzero()[:, 0]
        at = batch.query_starts[singles].long()
        of_request = torch.randint(0, 20, (len(rows),), device=CUDA, dtype=torch.int32)[heads[singles]]
        behind = torch.randint(0, most + 1, (len(rows),), device=CUDA, dtype=torch.int32)[heads[singles]]
        carried = of_request > 3
        batch.carry[at], batch.behind[at] = of_request * carried, behind * carried
        batch.token_ids[at] *= ~carried
        size, texts = 1 + len(rows) + 40, torch.randint(0, 2, (len(rows) * width, block_size), device=CUDA).int()
        rank = RankSlot(0, Shape(4096, 600, width), CUDA, 8)
        rank.arriving, rank.arriving_guesses = torch.randint(0, 2, (2, size), device=CUDA).int()
        # as many drafts in flight as are counted, and a token after them
        for carry, number in zip(batch.carry[at].tolist(), batch.behind[at].tolist(), strict=True):
            rank.arriving_guesses[carry + number] = NO_DRAFT
        rank.arriving[0], rank.arriving_guesses[0] = 0, NO_DRAFT
        results = []
        for by_kernel in (False, True):
            mine, known, drafter = copy.deepcopy(batch), texts.clone(), NgramDrafter(most, 2, 4)
            rank.guesses = torch.full((size,), 7, dtype=torch.int32, device=CUDA)
            reference = Drafting(TextProposer(OnCpu(most, 2, 4), known, limits), known, limits)
            drafting = NgramDrafting(drafter, known, limits) if by_kernel else reference
            inputs = drafting.begin(mine, rank, Work(Shape(0, 0, 0), Extents(0, 0, 0), sampling=False))
            text = known[mine.block_tables].flatten(1)
            last = mine.context_lens.new_zeros(len(rows)).scatter_reduce(0, heads, mine.context_lens, "amax")
            text.masked_fill_(torch.arange(text.shape[1], device=CUDA) >= last[heads][:, None], -1)
            compared = (inputs, mine.positions, mine.context_lens, mine.kv_indices, text)
            rest = rank.rejected[: len(inputs)].clone(), rank.guesses[1 : len(rows) + 1 + most]
            results.append([part.tolist() for part in (*compared, *rest)])
        assert results[0] == results[1], round_
