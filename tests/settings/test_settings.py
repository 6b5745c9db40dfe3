"""Settings from keys: what objects say of themselves, and what a run's identity holds."""

import json
import os
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import hydra
import pytest
from hydra import initialize_config_dir
from hydra._internal import defaults_list
from omegaconf import OmegaConf

from cbatch import ConfigError, KVSize
from cbatch.sim.profile_file import PROFILES
from experiments.settings import compose as settings_compose
from experiments.settings import groups
from experiments.settings.backends import Cpu, Cuda
from experiments.settings.compose import compose, compose_run, compose_sweep
from experiments.settings.groups import CONFIG_FOLDER
from experiments.settings.hardware import cost_model
from experiments.settings.keywords import settings_of
from experiments.settings.overrides import log_unused
from experiments.settings.settings import read_settings
from experiments.setup.assemble import assemble
from experiments.setup.presets import load_spec

OWN = """
from policies.chunking import TileAligned
from policies.drafting import Fixed


class Mine:
    def __init__(self, budget, chunking):
        pass

    def plan(self, view):
        return view.plan().build()


class Drawn(Mine):
    def __init__(self, predictor=None, seed=0):
        pass


class Drafts(Fixed):
    pass


class Chunks(TileAligned):
    pass
"""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("policy=orca chunk=128", "orca"),
        ("policy=vllm_v1 chunk=128", "vllm_v1(budget=128)"),
        ("policy=sarathi", "sarathi(chunk=256)"),
        ("policy=sarathi chunking=fixed", "sarathi(chunking=fixed(chunk=256))"),
        ("policy=sarathi chunk=auto", "sarathi(chunking=pd_aware)"),
        ("policy=orca drafting=ema", "orca(drafting=ema)"),
        ("policy=orca drafting=none", "orca"),
        ("policy=orca(drafting=null) drafting=ema", "orca"),
        ("policy=orca(drafting=none) drafting=ema", "orca"),
        ("policy=orca(drafting=mine.Drafts(k=2))", "orca(drafting=drafts(k=2))"),
        ("policy=orca(drafting=mine.Drafts,drafting.k=2) drafting=ema", "orca(drafting=drafts(k=2))"),
        ("policy=sarathi(chunking=mine.Chunks(chunk=100)) chunk=100", "sarathi(chunking=chunks(chunk=100))"),
        ("policy=orca(drafting=fixed,drafting.k=7)", "orca(drafting=fixed(k=7))"),
        ("policy=sarathi(drafting=fixed) drafting=ema", "sarathi(chunk=256, drafting=fixed)"),
        ("policy=mine.Mine(budget=3,chunking=null) drafting=table", "Mine(budget=3, chunking=null, drafting=table)"),
        ("policy=srpt predictor=noisy predictor.seed=7", "srpt(chunk=256, predictor=noisy(share=0.5))"),
        ("policy=trail policy.c=0.5", "trail(chunk=256, c=0.5)"),
        ("policy=vtc metrics.client_weights={gold:2.0}", "vtc(weights={gold: 2})"),
        ("policy=mine.Mine(budget=3,chunking=${chunking})", "Mine(budget=3, chunk=256)"),
        ("policy=mine.Drawn(predictor=${predictor},seed=${seed}) predictor=noisy", "Drawn(predictor=noisy(share=0.5))"),
    ],
)
def test_a_policy_prints_itself(words: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert repr(compose_run(*words.split()).policy) == text


def test_a_workload_prints_itself() -> None:
    assert repr(compose_run("workload=open_loop", "workload.arrivals.rate=20").workload) == "open_loop(rate=20)"


@pytest.mark.parametrize(("given", "text"), [("1e3", "slai(budget=1000)"), ("256.0", "slai(budget=256)")])
def test_a_whole_number_may_be_written_as_a_float(given: str, text: str) -> None:
    """Slai refuses a budget of 1000.0."""
    assert repr(compose_run("policy=slai", f"chunk={given}").policy) == text


@pytest.mark.parametrize("workload", ["trace", "sharegpt"])
@pytest.mark.parametrize(
    ("keys", "requests"),
    [
        ("too_long=drop", [(10, 5), (60, 30)]),
        ("too_long=clip", [(10, 5), (80, 20), (97, 3), (60, 30)]),
        ("too_long=drop max_length=90", [(10, 5), (60, 30)]),
        ("too_long=clip max_length=900", [(10, 5), (80, 20), (97, 3), (60, 30)]),
        ("too_long=drop max_new_tokens=40", [(10, 40), (60, 40)]),
        ("too_long=clip max_new_tokens=50", [(10, 50), (50, 50), (50, 50), (50, 50)]),
    ],
)
def test_too_long_sees_the_models_positions_and_the_limit_of_outputs(
    workload: str, keys: str, requests: list[tuple[int, int]], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,5\n1,90,20\n2,200,3\n3,60,30\n")
    fit, table = f"path={path} {keys}".split(), workload == "sharegpt"
    words = [f"workload.{'lengths.' * (table and 'new' not in key)}{key}" for key in fit]
    words += [f"workload.num_requests={len(requests)}", "model.max_positions=100"]
    made = compose_run(f"workload={workload}", *words).workload.requests(None)
    assert [(request.num_prompt_tokens, request.max_new_tokens) for request in made] == requests


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("model.path=m model.num_layers=2", "model.num_layers"),
        ("model.path=m model=tiny", "model"),
        ("model=tiny(num_layers=3,path=m)", "model.num_layers"),
        ("workload=open_loop workload.load=0.6 workload.arrivals.rate=20", "workload.arrivals.rate"),
        ("workload=open_loop(rate_scale=2) workload.load=0.6", "workload.rate_scale"),
        ("chunk=64 chunking.chunk=128", "chunk"),
        ("chunk=auto chunking.chunk=128", "chunk"),
    ],
)
def test_a_key_that_another_leaves_without_effect_is_refused(
    words: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a sweep of it is stored as rows that differ in it and have equal figures."""
    shape = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 8, "dtype": "float32", **shape})
    )
    monkeypatch.chdir(tmp_path)
    assert compose_run("model.path=m", "+model.seed=3").model.num_layers == 2
    with pytest.raises(ConfigError, match=rf"^{key}[:=].* has no effect beside "):
        compose_run(*words.split())


@pytest.mark.parametrize("chunk", [128, 512])
def test_a_chunk_of_python_counts_or_is_refused(chunk: int) -> None:
    """Keys are composed with their references: another `chunk` among them would be stored, and the policy keep its own."""
    experiment = "experiment=pd_sweep"
    assert repr(compose_run(experiment, f"chunk={chunk}").policy) == f"sarathi(chunk={chunk})"
    composed = compose(experiment)
    with pytest.raises(
        ConfigError, match=f"^chunk={chunk}: has no effect beside chunking.chunk=256; give chunk=256 in"
    ):
        read_settings(replace(composed, keys={**composed.keys, "chunk": chunk}))


@pytest.mark.parametrize(
    ("policy", "chunk"),
    [
        ("sarathi(chunk=512)", "policy=sarathi chunk=512"),
        ("vllm_v1(chunk=1e3)", "policy=vllm_v1 chunk=1000"),
        ("sarathi_serve(chunking=fixed,chunk=auto)", "policy=sarathi_serve chunking=fixed chunk=auto"),
        (
            "qoserve(chunk=512,chunking=filling(full=128))",
            "policy=qoserve chunking=filling chunking.full=128 chunk=512",
        ),
    ],
)
def test_a_chunk_in_parentheses_is_the_chunk_of_that_policy(policy: str, chunk: str) -> None:
    """Whatever the other policies of the sweep have; also what compares and checks runs by their chunk sees it."""
    own, given = compose_run(f"policy={policy}", "chunk=128"), compose_run(*chunk.split())
    assert (own.identity, own.chunk, own.chosen) == (given.identity, given.chunk, given.chosen)
    assert "chunk" not in own.composed.keys["policy"]


def test_a_chunk_that_a_policy_does_not_follow_is_its_own_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class Own:\n    def __init__(self, chunk, size=1): self.chunk, self.size = chunk, size\n    plan = print\n"
    (tmp_path / "owner.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    made = compose_run("policy=owner.Own(chunk=7,size=${chunk})", "chunk=128")
    assert (made.chunk, made.policy.section) == (128, {"_target_": "owner.Own", "chunk": 7, "size": 128})
    with pytest.raises(ConfigError, match=r"^policy\.chunk: policies\.orca\.Orca takes no such argument"):
        compose_run("policy=orca(chunk=64)")
    with pytest.raises(ConfigError, match=r"^policy\.chunks: .*; did you mean chunk\? known: chunk, chunking$"):
        compose_run("policy=sarathi_serve(chunks=256)")


def test_an_identity_holds_what_a_run_depends_on() -> None:
    """A chunk is part of the policies that read it; a seed is told although a policy's text leaves it out."""
    one = compose_run("policy=orca", "backend=sim").identity
    assert one == json.loads(json.dumps(one))
    for words in ("chunk=128 chunking=fixed predictor=oracle", "progress=on output=x timeline=off"):
        assert compose_run("policy=orca", "backend=sim", *words.split()).identity == one
    for words in ("policy=sarathi", "seed=1", "model.num_layers=3", "bounds=true", "metrics.warmup_requests=1"):
        assert compose_run("policy=orca", "backend=sim", words).identity != one
    for words in ("metrics.drain_requests=1", "metrics.objectives={ttft:1}", "metrics.client_weights={a:2}"):
        assert compose_run("policy=orca", "backend=sim", words).identity != one, "a resumed sweep makes new figures"
    noisy = [compose_run("policy=trail", "predictor=noisy", f"predictor.seed={seed}").identity for seed in (1, 2)]
    assert noisy[0]["policy"] == noisy[1]["policy"] and noisy[0] != noisy[1]


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ("policy=orca", ["chunking", "predictor", "chunk"]),
        ("policy=sarathi chunking=filling", ["predictor"]),
        ("policy=slai", ["chunking", "predictor"]),
        ("policy=orca max_tokens=${chunk} chunk=9000", ["chunking", "predictor"]),
    ],
)
def test_keys_that_nothing_reads_are_known(words: str, unused: list[str]) -> None:
    assert compose_run(*words.split()).composed.unused == unused


def test_overrides_that_nothing_reads_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    log_unused(["chunk=128", "+predictor.error=1", "seed=3"], ["chunk", "predictor"])
    assert capsys.readouterr().out.startswith("chunk=128 +predictor.error=1: no effect, as nothing reads it; ")


def test_each_run_of_a_sweep_is_composed_as_it_would_be_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    swept = ("policy=orca,'qoserve(chunking=slack)'", "chunk=32,auto", "++workload.num_requests=3,4")
    sweep = compose_sweep(*swept, "metrics={warmup_requests: 1}", "backend=sim", "backend.tensor_parallel=2", "sweep=s")
    assert len(sweep.jobs) == 2**3
    for number, job in enumerate(sweep.jobs):
        assert job == replace(compose(*job.overrides), number=number)
    monkeypatch.setattr(defaults_list, "_create_interpolation_map", groups._interpolation_map)  # as Hydra itself does
    monkeypatch.setattr(OmegaConf, "load", groups._load)
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        for job in sweep.jobs[1::5]:
            assert job.keys == OmegaConf.to_container(hydra.compose("config", job.overrides), resolve=True)


@pytest.mark.parametrize("words", [(), ("hydra.searchpath=['file://conf']", "+fleet=big", "fleet.size=3")])
def test_a_file_that_has_changed_is_read_again(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, for example. words: of a folder of the user, with a group of their own."""
    folder = tmp_path / "conf"
    monkeypatch.chdir(tmp_path)
    if words:
        (folder / "fleet").mkdir(parents=True)
        (folder / "fleet" / "big.yaml").write_text("size: 1")
        (folder / "chunking").mkdir()
    else:
        copytree(CONFIG_FOLDER, folder)
        for module in (settings_compose, groups):
            monkeypatch.setattr(module, "CONFIG_FOLDER", folder)
    for chunk in (128, 512):
        (folder / "chunking" / "mine.yaml").write_text(f"_target_: policies.chunking.Fixed\nchunk: {chunk}")
        if not words:
            text = (CONFIG_FOLDER / "config.yaml").read_text()
            (folder / "config.yaml").write_text(text.replace("batch: 18", f"batch: {chunk}"))
        keys = compose("chunking=mine", "seed=2", *words).keys
        assert keys["batch"] == (18 if words else chunk)
        assert (keys["chunking"]["chunk"], keys["seed"], keys.get("fleet")) == (
            chunk,
            2,
            {"size": 3} if words else None,
        )


def test_runs_of_one_machine_share_times_but_no_counts(tmp_path: Path) -> None:
    file, spec = tmp_path / "gpu.json", load_spec("llama-3.1-8b")
    profile = json.loads((PROFILES / "h200.json").read_text())
    file.write_text(json.dumps(profile))
    first, second = cost_model(str(file), spec), cost_model(str(file), spec)
    first.num_outside += 1
    assert second.num_outside == 0 and first.profile is second.profile
    file.write_text(json.dumps({**profile, "memory_bytes": 1e9}))
    os.utime(file, (0, 0))
    assert cost_model(str(file), spec).profile.memory_bytes == 1e9


@pytest.mark.parametrize(("length", "observed", "formula"), [(1024, 18, 30), (2048, 10, 15), (3072, 6, 10)])
def test_batch_auto_is_formula_1_of_sarathi(length: int, observed: int, formula: int) -> None:
    """A 13B model on 48 GiB: about 30 where SARATHI observed 18 (section 5.1); beside activations, and 10% of 48 GB for the rest, close to what it observed."""
    per_token = 2 * 2 * 40 * 5120
    weights = 2 * (40 * 12 * 5120**2 + 2 * 32000 * 5120)
    activations = 8192 * 2 * (3 * 5120 + 2 * 3 * 5120 + 2 * 4 * 5120)
    size = (48 * 2**30 - weights) // per_token
    assert size // length == formula
    of_paper = {
        "model": "nanogpt-13b",
        "hardware": "a6000-llama-13b",
        "length": length,
        "batch": "auto",
        "requests": 20,
    }
    for kv_tokens, batch in ((size, formula), (None, int((0.9 * 48e9 - weights - activations) / per_token // length))):
        keys = of_paper if kv_tokens is None else {**of_paper, "kv_tokens": kv_tokens}
        settings = settings_of("orca", "closed", {"backend": "sim", **keys})
        assert settings.batch == settings.workload.batch == batch
        assert settings.chosen["batch"].startswith(f"{batch} (formula 1")
    assert abs(batch - observed) <= 2
    staged = settings_of(
        "orca", "closed", {"backend": "sim", **of_paper, "hardware": "h200", "kv_tokens": size, "pipeline_stages": 2}
    )
    assert staged.batch == formula // 2, "each stage has a batch in flight"


@pytest.mark.parametrize(
    ("hardware", "tokens"), [("h200", 128), ("h100", 128), ("h200-vllm", 16), ("a6000-llama-13b", 16), ("cpu", 16)]
)
def test_a_simulated_kv_block_is_that_of_the_measured_engine(hardware: str, tokens: int) -> None:
    """With equal blocks the same command has the same cache, simulated and real."""
    kv = assemble(compose_run("backend=sim", f"hardware={hardware}", "kv_tokens=10000")).first.kv
    assert kv == KVSize(10_000 // tokens, tokens)
    assert {"h200": Cuda, "cpu": Cpu}.get(hardware, kv).block_size == tokens


def test_batch_auto_is_refused_where_the_cache_is_not_known() -> None:
    for keys, says in (
        ({"backend": "cpu", "model": "tiny"}, "on a CPU"),
        ({"backend": "sim", "pools": {"a": {}}}, "give each pool a batch"),
        ({"backend": "sim", "kv_tokens": 512}, "the KV cache 512; give batch=N"),
    ):
        with pytest.raises(ConfigError, match=says):
            settings_of("orca", "closed", {"batch": "auto", **keys})
