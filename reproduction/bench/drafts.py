"""Decodes with and without drafts, on text that repeats: tokens per second, and the host's share of an iteration.

    python -m reproduction.bench drafts                                    # ours, of n-grams
    python -m reproduction.bench drafts draft_model=llama-3.2-1b skips=.2  # ours, of a smaller model that is wrong after a fifth of all tokens
    python -m reproduction.bench drafts engine=vllm method=ngram_gpu       # vLLM, in its own environment

Both read the same checkpoint and serve the same prompts ([repeating.py](../repeating.py)), and both drafters take what followed the earliest
occurrence of the last 5 tokens. `method`: vLLM's drafter, on the host (`ngram`, without asynchronous scheduling) or on the GPU (`ngram_gpu`, with it).
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from cbatch import Limits, ModelSpec, Plan, RunRecord, View
from cbatch.drafts import Drafter, ModelDrafter, NgramDrafter
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.store.provenance import spread, write_benchmark
from reproduction import BENCH, RESULTS
from reproduction.bench.peers.cases import Case
from reproduction.bench.peers.measure import graphics_card, store
from reproduction.repeating import Text, expected_outcomes, write_checkpoint, wrong_share

WORKS = (
    Text(1, 128, 512),
    Text(8, 128, 512),
    Text(64, 128, 512),
    Text(64, 2048, 256),
    Text(1, 512, 512, 0.2),
    Text(8, 512, 512, 0.2),
    Text(64, 512, 512, 0.2),
)

ROOM = 64
"""Tokens by which vLLM's `max_model_len` exceeds the longest request. While any request of a batch, its drafts in flight included, is within
`num_speculative_tokens` of it, vLLM's runner gives every request of the batch token 0 as its drafts (`input_fits_in_drafter`)."""


class FixedDrafts:
    """Computes whole prompts in arrival order, and decodes with `k` drafts."""

    def __init__(self, k: int) -> None:
        self.k = k

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(drafts=self.k)
        for request in (*view.prefilling, *view.waiting):
            if not plan.add(request):
                break
        return plan.build()


def main(
    engine: Literal["cbatch", "vllm"] = "cbatch",
    method: Literal["ngram", "ngram_gpu"] = "ngram",
    model: str = "llama-3.1-8b",
    works: str = "",
    drafts: Count = 3,
    repeats: Count = 3,
    plain: bool = True,
    checkpoint: str = "",
    draft_model: str = "",
    skips: float = 0.0,
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes drafts.json, or with a draft model drafts-model.json; vLLM's figures are added to peers.json.

    works: places in `WORKS`, such as 0,2; all by default. plain: also without drafts, if they are ours; a draft model reads along then. checkpoint: a
    folder, in which one is written if there is none; "": a temporary one. draft_model: a preset, whose model skips a token after that share of tokens.
    """
    chosen = [WORKS[int(place)] for place in works.split(",")] if works else [*WORKS]
    hardware, _ = graphics_card()
    figures: dict[str, Any] = {}
    about: dict[str, Any] = {"model": model, "drafts": drafts, "figures": figures}
    about |= {"draft_model": draft_model, "skips": skips} if draft_model else {}
    with TemporaryDirectory() as temporary:
        spec = replace(load_spec(model), path=None)
        place = Path(checkpoint or temporary)
        if not (place / "config.json").exists():
            write_checkpoint(spec, place)
        spec = replace(spec, path=str(place))
        drafter: Drafter = NgramDrafter(drafts)
        if draft_model:
            small = replace(load_spec(draft_model), tied_embeddings=False)
            write_checkpoint(small, Path(temporary) / "draft", skips=skips)
            drafter = ModelDrafter(replace(small, path=f"{temporary}/draft"), drafts)
        runs = (
            _vllm(spec, chosen, drafts, repeats, method)
            if engine == "vllm"
            else _ours(spec, chosen, drafter, repeats, plain, skips if draft_model else None)
        )
        for name, found in runs:
            figures[name] = found
            print(f"{engine} {name}: " + ", ".join(f"{key} {_text(value)}" for key, value in found.items()), flush=True)
            if engine == "vllm":
                written = store(f"vllm-drafts-{method}", hardware, {"section": ["drafts"], **about}, folder)
            else:
                name = "drafts-model" if draft_model else "drafts"
                written = write_benchmark(name, hardware, about, folder, BENCH)
    print(f"written: {written}")


def _text(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    return f"{value['median'] if isinstance(value, dict) else value:.5g}"


def name_of(work: Text, drafts: int) -> str:
    text = f", {work.misprints:.0%} misprints" if work.misprints else ""
    return f"batch {work.number}, {work.prompt} prompt and {work.new} new tokens{text}, {drafts} drafts"


def _limits(works: Sequence[Text], drafts: int) -> Limits:
    longest = max(work.prompt + work.new for work in works)
    return Limits(max(work.number for work in works), 8192, longest, max_drafts=drafts)


def _expected(work: Text, vocabulary: int, k: int, skips: float | None = None, **counting: bool) -> float:
    """Returns the share of drafts that must be accepted. counting: of `expected_outcomes`."""
    drafted, accepted = expected_outcomes(work.requests(vocabulary), k, skips, **counting).sum(0).tolist() or (0, 0)
    return accepted / max(drafted, 1)


def _ours(
    spec: ModelSpec, works: Sequence[Text], drafter: Drafter, repeats: int, plain: bool, skips: float | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    from cbatch.runtime.options import Options
    from experiments.settings.backends import Cuda
    from experiments.setup.servers import real_server

    drafts = drafter.max_drafts
    limits = _limits(works, drafts)
    server = real_server(Cuda(), spec, limits, Options(drafter=drafter))
    with closing(server):
        server.serve(FixedDrafts(drafts), Text(limits.max_batch, 64, 16).requests(spec.vocab_size))
        for work in works:
            for number, asynchronous in ((0, True), (0, False), (drafts, True)):
                if not number and (work.misprints or not plain):  # misprints change nothing without drafts
                    continue
                runs = []
                for _ in range(repeats):
                    requests = work.requests(spec.vocab_size)
                    record = server.serve(FixedDrafts(number), requests, asynchronous=asynchronous)
                    runs.append(_figures(record, work))
                found: dict[str, Any] = {key: spread([run[key] for run in runs]) for key in runs[0]}
                found["expected_acceptance"] = _expected(work, spec.vocab_size, number, skips)
                name = name_of(work, number) + ("" if asynchronous else ", synchronous")
                yield name, found | {"wrong_share": wrong_share(requests)}


def _figures(record: RunRecord, work: Text) -> dict[str, float]:
    """Returns figures of a run; those of iterations are means over the later half of those without prompts."""
    seconds = record.steps[-1].done_at - record.steps[0].planned_at
    places = [
        place
        for place, step in enumerate(record.steps)
        if not step.num_prefill_tokens and step.num_requests == work.number
    ]
    places = places[len(places) // 2 : -1]
    steps = [record.steps[place] for place in places]
    period = float(np.mean([record.steps[place + 1].started - record.steps[place].started for place in places]))
    device = float(np.mean([step.ended - step.started for step in steps]))
    drafts, accepted, drafted = (
        sum(getattr(step, f"num_{name}") for step in record.steps) for name in ("drafts", "accepted", "drafted")
    )
    parts = {
        "plan_and_launch_ms": [step.launched_at - step.planned_at for step in steps],
        "start_ms": [step.started - step.launched_at for step in steps],
        "receive_ms": [step.received_at - step.ended for step in steps],
        "absorb_ms": [step.done_at - step.received_at for step in steps],
    }
    return {
        "tokens_per_second": work.number * work.new / seconds,
        "ms_per_iteration": period * 1e3,
        "device_ms": device * 1e3,
        "host_share": max(1 - device / period, 0.0),
        "acceptance": accepted / max(drafts, 1),
        "acceptance_length": 1 + accepted / max(drafted, 1),
        **{name: float(np.mean(seconds)) * 1e3 for name, seconds in parts.items()},
    }


def _vllm(
    spec: ModelSpec, works: Sequence[Text], drafts: int, repeats: int, method: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    import os

    from reproduction.bench.peers.vllm_engine import ENVIRONMENT, VllmEngine, ngrams_of

    os.environ.update(ENVIRONMENT)
    limits = _limits(works, drafts)
    engine = VllmEngine(
        Path(str(spec.path)),
        Case("drafts", spec.name, limits.max_batch, limits.max_tokens),
        limits.max_request_tokens + ROOM,
        **ngrams_of(method, drafts, shortest=5),
    )
    try:
        engine.serve(Text(limits.max_batch, 64, 16).requests(spec.vocab_size))
        for work in works:
            runs, before = [], counters(engine)
            for _ in range(repeats):
                requests = work.requests(spec.vocab_size)
                runs.append(work.number * work.new / engine.serve(requests)[0])
            drafted, accepted, verified = (now - then for now, then in zip(counters(engine), before, strict=True))
            found: dict[str, Any] = {"tokens_per_second": spread(runs)}
            found["acceptance"] = accepted / drafted if drafted else 0.0
            found["acceptance_length"] = 1 + accepted / verified if verified else 1.0
            counting = {"missing": method == "ngram_gpu", "beyond": True}
            found["expected_acceptance"] = _expected(work, spec.vocab_size, drafts, **counting)
            found["asynchronous"] = engine.settings["async_scheduling"]
            yield name_of(work, drafts), found | {"wrong_share": wrong_share(requests)}
    finally:
        engine.close()


def counters(engine: Any, *others: str) -> list[float]:
    """Returns vLLM's counts of drafted tokens, of those accepted, and of verified drafts, and its counters of other names."""
    names = (*(f"spec_decode_num_{name}" for name in ("draft_tokens", "accepted_tokens", "drafts")), *others)
    values = {metric.name: getattr(metric, "value", 0) for metric in engine._llm.get_metrics()}
    return [float(values.get(f"vllm:{name}", 0)) for name in names]
