"""Benchmarks of a GPU on a CPU: decodes over a static KV cache, and the independent count of operations and bytes."""

import json
from typing import Any

import pytest
import torch
from places import RESULTS

from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.setup.presets import load_spec
from reproduction.bench.static_cache import WAYS, Decoder, StaticWay
from reproduction.bench.utilisation import PEAKS, Shapes, count, serve

EAGER = [way for way in WAYS.values() if way.compiled is None]


@pytest.mark.long
@pytest.mark.parametrize("way", [*EAGER, StaticWay({"backend": "aot_eager"}, torch.no_grad)])
def test_a_static_cache_gives_the_tokens_of_generate(way: StaticWay) -> None:
    """The second request, too, whose cache held the first request, gets the tokens of `generate`. The last stretch is timed separately."""
    torch.compiler.reset()
    decoder, prompt = Decoder(load_spec("tiny"), way, 40, "cpu"), list(range(8))
    model: Any = decoder._model
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 8:].tolist()
    assert decoder.generate(prompt[::-1], 30)[0] != expected
    tokens, times = decoder.generate(prompt, 20, edges=(4, 8))
    assert tokens == expected
    assert len(times) == 4 and times == sorted(times)


@pytest.mark.long
def test_simulated_and_counted_are_near_the_stored_real_runs() -> None:
    """MFU and MBU of four runs on an H200: the count from shapes and times within 2%, today's simulation within 3%."""
    stored = json.loads((RESULTS / "h200" / "utilisation.json").read_text())
    keys = ["hardware=h200", *stored["settings"].split()]
    run = assemble(compose_run("backend=sim", *keys))
    assert len(stored["figures"]) == 4
    for policy, found in stored["figures"].items():
        assert found["counted"] == pytest.approx(found["real"], rel=0.02)
        assert serve(run, policy, keys)[0] == pytest.approx(found["real"], rel=0.03), policy


def test_the_independent_count_is_that_of_the_figures() -> None:
    """The counted seconds of a simulated run are its own, so that only operations and bytes are compared. Nothing leaps here."""
    load = ["batch=64", "max_tokens=8192", "workload.num_requests=64", "workload.pd_ratio=8"]
    keys = ["hardware=h100", "model=llama-3.1-8b", *load]
    run = assemble(compose_run("backend=sim", *keys))
    executor: Any = run.server.executor
    shapes, inner = Shapes(), executor.launch

    def launch(step: Any) -> Any:
        shapes.append((step.start.copy(), step.num_tokens.copy(), len(step.sampled)))
        return inner(step)

    executor.launch = launch
    found, _ = serve(run, "policy=sarathi_serve chunk=512", keys)
    counted = dict(zip(("mfu", "mbu"), count(run.settings.model, shapes), strict=True))
    seconds = counted["mfu"] / PEAKS["H100"][0] / found["mfu"]
    assert counted["mbu"] / PEAKS["H100"][1] / found["mbu"] == pytest.approx(seconds, rel=1e-9)
    assert seconds == pytest.approx(executor.now(), rel=0.02)
