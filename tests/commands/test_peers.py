"""Other engines on our work, by a stand-in for SGLang: what is stored, what is refused, what the page makes of it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch import CbatchError, Request
from experiments.store.provenance import write_json
from reproduction.bench import page, shared_prefixes
from reproduction.bench.peers import measure, sglang_engine

CARD = ("NVIDIA H200", "580.1")


class StandIn:
    """An engine that finds 10 tokens of each prompt in its cache, and leaves out `missing` tokens of each output.

    It ends requests where SGLang does: of its context length, one token is kept off requests, and one off their outputs.
    """

    missing = 0

    def __init__(self, **arguments: Any) -> None:
        self.settings = arguments

    def generate(self, input_ids: Sequence[Sequence[int]], sampling_params: Sequence[Any]) -> list[Any]:
        most = [self.settings["context_length"] - 1 - len(prompt) - 1 for prompt in input_ids]
        asked = [each["max_new_tokens"] - self.missing for each in sampling_params]
        outputs = [[7] * min(each) for each in zip(most, asked, strict=True)]
        return [{"output_ids": output, "meta_info": {"cached_tokens": 10}} for output in outputs]

    def shutdown(self) -> None: ...


def forty(again: int) -> Iterator[list[Request]]:
    yield [Request(index, 40, 2, prompt=[again + 3] * 40) for index in range(4)]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "import_module", lambda name: SimpleNamespace(Engine=StandIn))
    monkeypatch.setattr(measure, "metadata", SimpleNamespace(version={"sglang": "0.5"}.__getitem__))
    monkeypatch.setattr(measure, "graphics_card", lambda: CARD)
    monkeypatch.setattr(shared_prefixes, "WORKS", {"groups": forty, "chat": forty})
    monkeypatch.setattr(measure, "write_checkpoint", lambda spec, folder: None)


def test_shared_prompts_on_another_engine_are_a_row_of_the_page(tmp_path: Path) -> None:
    shared_prefixes.main(engine="sglang", works=("chat",), folder=str(tmp_path))
    shared_prefixes.main(engine="sglang", works=("groups",), folder=str(tmp_path))
    [folder] = tmp_path.iterdir()
    engines = json.loads((folder / "peers.json").read_text())["engines"]
    assert list(engines) == ["sglang-0.5-chat", "sglang-0.5-groups"]
    assert engines["sglang-0.5-chat"]["figures"]["hit_share"]["median"] == 10 / 40
    assert engines["sglang-0.5-chat"]["engine"]["arguments"]["disable_radix_cache"] is False
    [row] = [line for line in page.text(folder).splitlines() if line.startswith("| groups, SGLang 0.5")]
    assert row.endswith("25.0% |")


def test_an_engine_that_stops_early_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "missing", 1)
    monkeypatch.setattr(shared_prefixes, "equal_requests", lambda *sizes: [])  # the warm-up is not checked
    with pytest.raises(CbatchError, match="4 of 4 requests got too few or too many tokens"):
        shared_prefixes.main(engine="sglang", folder=str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_sglang_gives_the_longest_request_all_its_tokens() -> None:
    engine = sglang_engine.SglangEngine(Path("folder"), measure.CASES["one"], 42, prefix_cache=True)
    assert engine.serve(next(forty(0)))[1] == [2, 2, 2, 2]


@pytest.mark.parametrize(("unit", "faster"), [("s", "1.25x"), ("ms per iteration", "1.25x"), ("tokens/s", "0.67x")])
def test_the_fastest_engine_is_compared_and_less_time_is_faster(
    unit: str, faster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [[work, unit, "ours/a way/value", work] for work in ("both", "one")]
    monkeypatch.setattr(page, "TABLES", {"engines": {"vLLM": "1", "SGLang": "2"}, "compared": works})
    write_json(tmp_path / "ours.json", {"figures": {"a way": {"value": {"median": 8.0}}}})
    medians = {"vllm-1-both": 12.0, "sglang-2-both": 10.0, "sglang-2-one": 4.0, "vllm-0-one": 1.0}
    theirs = {name: {"figures": {"value": {"median": median}}} for name, median in medians.items()}
    write_json(tmp_path / "peers.json", {"engines": theirs})
    head, _, both, one = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.comparison(tmp_path).splitlines()
    )
    assert head == ["", "cbatch", "vLLM 1", "SGLang 2", "faster"]
    assert both == [f"both [{unit}]", "8.00", "12.00", "10.00", faster]
    assert one == [f"one [{unit}]", "8.00", "", "4.00", "2.00x" if unit == "tokens/s" else "0.50x"]


def test_runs_before_a_failure_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, generate = list[int](), StandIn.generate

    def fail_at_last(self: StandIn, input_ids: Sequence[Sequence[int]], sampling_params: Sequence[Any]) -> list[Any]:
        served.append(len(input_ids))
        if len(served) == 4:  # of the warm-up and three runs
            raise RuntimeError("out of memory")
        return generate(self, input_ids, sampling_params)

    monkeypatch.setattr(StandIn, "generate", fail_at_last)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure.main(engine="sglang", cases="one", repeats=3, folder=str(tmp_path))
    [path] = tmp_path.glob("*/peers.json")
    figures = json.loads(path.read_text())["engines"]["sglang-0.5-one"]["figures"]
    assert {name: found["repeats"] for name, found in figures.items()} == {"value": 2, "seconds": 2}


def test_another_engine_serves_our_benchmarks_without_a_prefix_cache(tmp_path: Path) -> None:
    measure.main(engine="sglang", cases="one;decode", repeats=2, folder=str(tmp_path))
    [path] = tmp_path.glob("*/peers.json")
    engines = json.loads(path.read_text())["engines"]
    decode, one = engines["sglang-0.5-decode-2048"], engines["sglang-0.5-one"]
    assert (decode["requests"], decode["prompt_tokens"], decode["output_tokens"]) == (32, 32 * 256, 32 * 2048)
    for row, tokens in ((decode, 2048), (one, 512)):
        value, seconds = (row["figures"][name]["max"] for name in ("value", "seconds"))
        assert value == pytest.approx(
            seconds / tokens * 1e3 if row is decode else tokens / row["figures"]["seconds"]["min"]
        )
        assert row["engine"]["arguments"]["disable_radix_cache"] is True
    names = [
        line.split("|")[1].strip() for line in page.text(path.parent).splitlines() if "| " in line and "SGLang" in line
    ]
    assert names == ["2048 new, SGLang 0.5, async", "SGLang 0.5"]
