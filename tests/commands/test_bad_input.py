"""What a user may get wrong on the command line: one line that names it and what to do, status 2, nothing written before the run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ROOT, new_process, write_azure_trace

from experiments.run import main

Refused = Callable[..., str]

POLICIES = """
from cbatch import Plan

class Base:
    def plan(self, view):
        return self.choose(view, [*view.running, *view.waiting])

class Raises(Base):
    def choose(self, view, requests):
        raise ValueError("two\\nlines")

class Twice(Base):
    def choose(self, view, requests):
        return Plan([(requests[0], 1), (requests[0], 1)])

class Idle(Base):
    def choose(self, view, requests):
        return Plan()

class Forever(Base):
    def choose(self, view, requests):
        return Plan(wake_at=view.now + 1)

class NoPlan:
    pass

class Builder(Base):
    def choose(self, view, requests):
        return view.plan()

class Exits:
    def __init__(self):
        raise SystemExit(3)

class Negative:
    def __init__(self):
        import numpy
        numpy.zeros(-1)

def function(view):
    return Plan()

instance = Base()

class NeedsArgument(Base):
    def __init__(self, share):
        self.share = share
"""


LINES = {
    name: 1 + next(number for number, line in enumerate(POLICIES.splitlines()) if text in line)
    for name, text in (("exits", "raise SystemExit"), ("zeros", "numpy.zeros"))
}


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command line in an empty folder; returns its one line of complaint."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def run(*arguments: str) -> str:
        before = sorted(folder.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["run", *arguments])
        assert main() == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        left = {
            path.name for path in folder.rglob("*") if path.is_file() and path not in before and path.suffix != ".pyc"
        }
        assert left == (
            {"config.yaml", "unfinished.json"} if "iteration 0" in lines[0] else set()
        )  # of a run that began
        return lines[0].removeprefix("error: ")

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "policy=sarathy",
            "policy=sarathy: no such policy; did you mean sarathi? known: external, lars, length_order, longest_first, ",
        ),
        ("chunking=tile", "chunking=tile: no such chunking; did you mean tile_aligned?"),
        ("model=llama-3.1-80b", "model=llama-3.1-80b: no such model; did you mean llama-3.1-8b?"),
        ("workload=close", "workload=close: no such workload; did you mean closed?"),
        ("runtime=asynch", "runtime=asynch: no such runtime; did you mean async?"),
        ("backend=gpu", "backend=gpu: no such backend; "),
        ("hardware=h20", "hardware=h20: "),
        ("hydra/launcher=slurm", "hydra/launcher=slurm: no such hydra/launcher; "),
        ("chnk=256", "chnk: no such key; did you mean chunk? known: "),
        ("polcy=orca", "polcy: no such key; did you mean policy? known: "),
        ("workload.pd_ration=3", "workload.pd_ration: no such key of workload=closed; did you mean pd_ratio?"),
        ("workload=open_loop workload.pd_ratio=3", "workload.pd_ratio: no such key of workload=open_loop; "),
        ("runtime.graph=off", "runtime.graph: no such key of runtime=async; did you mean graphs?"),
        ("model.layers=3", "model.layers: no such key of model=llama-3.1-8b; did you mean num_layers?"),
        ("policy.chunk=3", "policy.chunk: no such key of policy=sarathi; did you mean chunking? known: chunking; "),
        ("wrkload.length=3", "wrkload: no such key; did you mean workload? known: "),
        ("workload.slo.ttft=1", "workload.slo.ttft: workload.slo is null; give 'workload.slo={ttft: ...}'"),
        ("metrics.objective.ttft=1", "metrics.objective: no such key; did you mean objectives?"),
        (
            "slo=strict",
            "slo: no such key; requests have objectives; give +slo@workload.slo=NAME for a file of conf/slo, or",
        ),
        (
            "workload.arrivals.rate=5",
            "workload.arrivals: no such key of workload=closed; give workload=open_loop or long_context or ",
        ),
        ("slo.ttft=1", "slo: no such key; did you mean 'workload.slo={ttft: ...}'?"),
        ("num_requests=3", "num_requests: no such key; did you mean workload.num_requests?"),
        ("workload=open_loop rate=3", "rate: no such key; did you mean workload.arrivals.rate?"),
        (
            "workload=open_loop workload.rate=3",
            "workload.rate: no such key of workload=open_loop; did you mean workload.ar",
        ),
        (
            "tensor_parallel=2",
            "tensor_parallel: no such key; did you mean backend.tensor_parallel, of backend=sim or cuda or cpu",
        ),
        ("predictor.error=1", "predictor.error: no such key of predictor=none; give predictor=bins"),
        ("async=true", "async: no such key; did you mean runtime=async?"),
        ("launcher=joblib", "launcher: no such key; did you mean hydra/launcher?"),
        ("hydra.launcher=joblib", "hydra.launcher: has no effect here; give -m and hydra/launcher=NAME"),
        ("batch_size=8", "batch_size: no such key; did you mean batch? known: "),
        ("+answer=42", "answer: no such key; "),
        ("+policy.answer=42", "policy.answer: policies.sarathi.Sarathi takes no such argument; known: chunking"),
        ("+workload.answer=42", "workload.answer: experiments.workloads.ClosedBatch takes no such argument; "),
        ("+metrics.warmup=1", "metrics.warmup: no such key; did you mean warmup_requests?"),
        ("+chunk=1", "chunk: exists already; give it without the +"),
        ("~chnk", "chnk: no such key; did you mean chunk?"),
        ("chunk", "chunk: cannot be read"),
        ("chunk=[1,", "chunk=[1,: cannot be read"),
        (
            "hydra.job.num=x",
            "Error merging override hydra.job.num=x: Value 'x' of type 'str' could not be converted to Integer",
        ),
        ("chunk=128,256", "chunk=128,256: several values are a sweep; add -m"),
        (
            "workload=open_loop workload.lengths={_target_:mine.Lengths,mean:3}",
            (
                "workload.lengths.mean: no such key of workload=open_loop; known: max_length, min_length, pd_ratio; "
                "to replace the section give '~workload.lengths' '+workload.lengths={...}'"
            ),
        ),
        ("metrics={warmup:3}", "metrics.warmup: no such key; did you mean warmup_requests? known: "),
        (
            "-m policy=external,sarathi_serve,orca policy.budget=1,2",
            (
                "policy.budget: no such key of policy=external; known: none; for an argument of your own policy give "
                "+policy.budget=..., if it is one of several policy='NAME(budget=...)'"
            ),
        ),
        (
            "-m policy=longest_first,sarathi_serve policy.per_prompt_token=true,false",
            "policy.per_prompt_token: no such key of policy=sarathi_serve; known: chunking; ",
        ),
        ("policy=sarathy(chunking=null)", "policy=sarathy: no such policy; did you mean sarathi?"),
        ("policy=sarathi(chunk=3)", "policy.chunk: policies.sarathi.Sarathi takes no such argument; did you mean "),
        ("policy=sarathi(3)", "policy=sarathi(3): '3' is not of the form key=value; give NAME(key=value,...)"),
        (
            "policy=sarathi(chunk=3",
            "policy=sarathi(chunk=3: cannot be read; give NAME or NAME(key=value,...), in quotes",
        ),
        (
            "model=llama-2-70b backend=sim",
            (
                "model=llama-2-70b does not fit: 138 GB of weights per GPU, but hardware=h200 has 135 GB for weights and KV "
                "cache (90% of 150 GB); give backend=sim backend.tensor_parallel=2, or choose a smaller model"
            ),
        ),
        (
            "model=llama-2-70b backend=sim backend.gpus_per_node=1",
            (
                "model=llama-2-70b does not fit: 138 GB of weights per GPU, but hardware=h200 has 135 GB for weights and KV "
                "cache (90% of 150 GB); raise backend.pipeline_stages with backend=sim, or choose a smaller model"
            ),
        ),
        ("workload=azure_conv workload.path=no", "workload.path=no: no such file; a relative path begins in "),
        ("workload=arxiv workload.lengths.path=no", "workload.lengths.path=no: no such file; "),
        (
            "model.dtype=fp8",
            "model.dtype: is left at its default by this section; to set it give +model.dtype=..., with a plus",
        ),
        ("backend=gpu", "backend=gpu: no such backend; did you mean cuda? known: auto, cpu, cuda, sim"),
        ("model=null backend=sim", "model=null: a group takes the name of one of its options; give GROUP=NAME"),
        ("policy.chunking.chunk=100", "policy.chunking.chunk: policy.chunking is ${chunking}; give chunking.chunk=..."),
        ("policy.chunking=fixed", "policy.chunking=fixed: is a name; choose the size of chunks with chunking=fixed"),
        ("policy.chunking=null", "policy.chunking=null: this policy needs one; choose the size of chunks with "),
        (
            "backend.tensor_parallel=2",
            "backend.tensor_parallel: no such key of backend=auto; known: none; it is chosen ",
        ),
        ("backend=sim backend.replicas=0", "backend.replicas=0: give a whole number from 1 to 10000"),
        ("sweep=first", "sweep=first: names a sweep; add -m, or give output=FOLDER for a single run"),
        ("workload.slo=0.5", "workload.slo=0.5: give its keys and values, {key: value}"),
        ("policy=orca/mine", "policy=orca/mine: no such policy; did you mean orca? known: external, "),
        ("chunk=128,", "chunk=128,: cannot be read (unexpected end); give key=value"),
        ("policy:orca", "policy:orca: cannot be read (there is no =); give key=value"),
        ("policy=orca policy=sarathi", "policy: is given twice, as orca and as sarathi; give it once; or policy=orca,"),
        ("output=", "output=: names no folder; give output=FOLDER, or leave it out for one under runs/"),
        ("chunk=${nothing}", "chunk: Interpolation key 'nothing' not found"),
        ("workload=null", "workload=null: "),
        ("experiment=pd_sweep", "experiment=pd_sweep is a sweep; add -m"),
        ("workload=azure_conv", "workload.path: has no value; give workload.path=..."),
        ("policy=external", "policy._target_: has no value; give policy._target_=..."),
    ],
)
def test_unknown_names_and_keys(refused: Refused, arguments: str, message: str) -> None:
    assert refused(*arguments.split()).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("chunk=0", "chunk=0: give a whole number of tokens from 1 to 2147483647, or auto"),
        ("chunk=-256", "chunk=-256: give a whole number of tokens from 1 to 2147483647, or auto"),
        ("chunk=25.6", "chunk=25.6: give a whole number of tokens"),
        ("chunk=many", "chunk=many: give a whole number of tokens"),
        ("chunk=true", "chunk=True: give a whole number of tokens"),
        ("chunk=null", "chunk=None: give a whole number of tokens"),
        ("chunk=0 policy=orca", "chunk=0: give a whole number of tokens"),
        ("chunk=1048576", "chunk=1048576 exceeds max_tokens=17208; lower chunk or raise max_tokens"),
        ("chunk=512 max_tokens=256", "chunk=512 exceeds max_tokens=256; lower chunk or raise max_tokens"),
        ("chunk=128 batch=129 workload.batch=18", "chunk=128 leaves no room for a prompt beside 128 decodes; "),
        ("chunk=300", "chunk=300 must be a multiple of the tile of 128 tokens; use chunk=256, or chunking=fixed"),
        ("batch=0", "batch=0: give a whole number from 1 to 1000000"),
        ("batch=1.5", "batch=1.5: give a whole number from 1 to 1000000"),
        ("seed=-1", "seed=-1: give a whole number, at least 0"),
        ("max_tokens=4", "max_tokens=4 is below batch=18, a token per decode; raise it or lower batch"),
        ("kv_tokens=0", "kv_tokens=0: give a whole number of tokens"),
        ("kv_tokens=10", "kv_tokens=10 is less than one block of block_size=16; raise kv_tokens"),
        ("block_size=none", "block_size=none: give a whole number of tokens"),
        ("max_running=4", "max_running=4 is below batch=18; raise it or lower batch"),
        ("max_running=few", "max_running=few: give a whole number from 1 to 1000000, or auto"),
        ("patience.seconds=0", "patience.seconds=0.0 must be above 0"),
        ("patience.empty_plans=many", "patience.empty_plans=many: give a valid integer"),
        ("patience.empty=3", "patience.empty: no such key; did you mean empty_plans?"),
        ("progress=maybe", "progress=maybe: give on, off or auto"),
        ("timeline=3", "timeline=3: give on or off"),
        ("runtime.graphs=some", "runtime.graphs=some: give off, decode or all"),
        ("backend=cuda backend.products=cutlass", "backend.products=cutlass: give cublas or quack"),
        ("backend=cuda backend.last_layer=none", "backend.last_layer=none: give all or sampled"),
        (
            "chunking=filling chunking.full=512",
            "chunking.full=512 must be a whole number of tokens from 1 to chunk=256",
        ),
        (
            "chunking=filling chunk=384",
            "chunking.full=192 must be a multiple of the tile of 128 tokens and at least batch=18",
        ),
        ("backend=cuda backend.attention=flash2", "backend.attention=flash2: give auto, flash4 or triton"),
        (
            "backend=sim backend.host_seconds=-1",
            "backend.host_seconds=-1: give seconds of host time per iteration, or auto",
        ),
        (
            "metrics.warmup_requests=100 metrics.drain_requests=44",
            "metrics.warmup_requests=100 and metrics.drain_requests=44 leave",
        ),
        ("metrics.drain_requests=-1", "metrics.drain_requests=-1: give a whole number, at least 0"),
        (
            "workload=vtc_overload metrics.client_weights={cleint1:2}",
            "metrics.client_weights.cleint1: no request has this client; did you mean client1? known: client1, client2",
        ),
        (
            "policy=vtc workload=vtc_overload metrics.client_weights={client1:0}",
            "metrics.client_weights.client1=0: give a finite number above 0 (clients without a weight have 1)",
        ),
        (
            "metrics.objectives.ttft=0",
            "metrics.objectives.ttft=0: give a finite number above 0 (seconds; null sets none)",
        ),
        ("model.num_heads=7", "model.num_heads=7 must be a multiple of model.num_kv_heads=8"),
        (
            "workload.length=1000000",
            "request 0: 933333 prompt + 66667 new tokens exceed the 131072 positions of the model; ",
        ),
        ("kv_tokens=512", "request 0: 1024 tokens exceed the KV cache of 512; raise kv_tokens or "),
        ("workload.pd_ratio=0", "workload.pd_ratio=0: "),
    ],
)
def test_values_out_of_range(refused: Refused, arguments: str, message: str) -> None:
    assert refused(*arguments.split()).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "policy._target_=mine.Raises ~policy.chunking",
            "policy Raises, iteration 0: plan() raised ValueError: two lines",
        ),
        ("policy._target_=mine.Twice ~policy.chunking", "policy Twice, iteration 0, request 0: illegal plan"),
        (
            "policy._target_=mine.Forever ~policy.chunking patience.seconds=10",
            "policy Forever, iteration 0: no token for 11 s with 144 waiting and 0 running requests; ",
        ),
        (
            "policy._target_=mine.Forever ~policy.chunking patience.empty_plans=3",
            "policy Forever, iteration 0: 3 empty plans in a row with 144 waiting and 0 running requests; ",
        ),
        ("policy._target_=mine.Idle ~policy.chunking", "policy Idle, iteration 0: empty plan with 144 waiting"),
        (
            "policy._target_=mine.Idle",
            "policy.chunking: mine.Idle takes no such argument; known: none; if policy=NAME brought it, give policy=external",
        ),
        ("policy=external policy._target_=mine.NoPlan", "policy._target_=mine.NoPlan has no method plan(view)"),
        (
            "policy=external policy._target_=mine.NeedsArgument",
            "policy.share: mine.NeedsArgument needs it; add +policy.share=...",
        ),
        (
            "policy=external policy._target_=policies.trail.Trail chunking=fixed",
            "policy.chunking: policies.trail.Trail needs it; add '+policy.chunking=${{chunking}}'",
        ),
        (
            "policy=external policy._target_=mine.Twise",
            "policy._target_=mine.Twise: mine has no class or function Twise; did you mean Twice?",
        ),
        (
            "policy=external policy._target_=yours.P",
            "policy._target_=yours.P: yours cannot be imported (ModuleNotFoundError",
        ),
        (
            "policy=external policy._target_=broken.P",
            "policy._target_=broken.P: broken cannot be imported ({folder}/broken.py, line 1: SyntaxError: invalid syntax)",
        ),
        (
            "policy=imports.P",  # what is missing is not the policy's file but what it imports
            (
                "policy._target_=imports.P: imports cannot be imported ({folder}/imports.py, line 3: ModuleNotFoundError: No "
                "module named 'torchh'); install torchh, or correct the import"
            ),
        ),
        (
            "policy=divides.P",  # raised in a file that the policy's file imports
            (
                "policy._target_=divides.P: divides cannot be imported ({folder}/zero.py, line 2: ZeroDivisionError: division "
                "by zero); correct it"
            ),
        ),
        (
            "policy=exits.P",
            "policy._target_=exits.P: exits cannot be imported ({folder}/exits.py, line 2: SystemExit: 3); ",
        ),
        ("policy=mine.function", "policy._target_=mine.function: is a function; give a class with a method plan(view)"),
        ("policy=mine.instance", "policy._target_=mine.instance: is a Base object; give the import path of a class"),
        ("policy=policies.orca", "policy._target_=policies.orca: is a module; give the import path of a class"),
        (
            "policy=mine.Base(a=1=2)",
            "policy=mine.Base(a=1=2): 'a=1=2' in its parentheses cannot be read; give key=value, ",
        ),
        ("policy=mine.Exits", "policy._target_=mine.Exits: {folder}/mine.py, line {exits}: SystemExit: 3; "),
        (
            "policy=mine.Negative",
            "policy._target_=mine.Negative: {folder}/mine.py, line {zeros}: ValueError: negative dimens",
        ),
        (
            "policy=mine.Builder",
            "policy Builder, iteration 0: plan() returned PlanBuilder, not a cbatch.Plan; return plan.b",
        ),
        ("policy=external policy._target_=Mine", "policy._target_=Mine: give an import path"),
    ],
)
def test_policies_from_outside(refused: Refused, tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "work" / "mine.py").write_text(POLICIES)
    (tmp_path / "work" / "broken.py").write_text("class P(:\n")
    (tmp_path / "work" / "imports.py").write_text("import os\n\nimport torchh\n")
    (tmp_path / "work" / "divides.py").write_text("import zero\n")
    (tmp_path / "work" / "zero.py").write_text("one = 1\nnone = one / 0\n")
    (tmp_path / "work" / "exits.py").write_text("import sys\nsys.exit(3)\n")
    try:
        assert refused(*arguments.split()).startswith(message.format(folder=tmp_path / "work", **LINES))
    finally:
        sys.modules.pop("mine", None)


def test_traces_name_file_and_line(refused: Refused, tmp_path: Path) -> None:
    trace = write_azure_trace(tmp_path / "trace.csv")
    lines = trace.read_text().splitlines()
    arguments = ("workload=azure_conv", f"workload.path={trace}")

    def after(*changed: str) -> str:
        trace.write_text("\n".join(changed) + "\n")
        return refused(*arguments)

    assert after(*lines[:4], "2023-11-16 18:15:46.2,ten,20").startswith(f"{trace}, line 5")
    assert after(*lines[:4], lines[1]).startswith(f"{trace}, line 5")  # goes back in time
    assert str(trace) in after(lines[0])
    assert str(trace) in after("")
    trace.unlink()
    assert refused(*arguments).startswith(f"workload.path={trace}: no such file")


def test_checkpoints_name_the_folder_or_file(refused: Refused, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert refused(f"model.path={missing}").startswith(f"model.path={missing} is not a folder")
    missing.mkdir()
    assert str(missing / "config.json") in refused(f"model.path={missing}")
    (missing / "config.json").write_text("{")
    assert str(missing / "config.json") in refused(f"model.path={missing}")
    (missing / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "model_type 'bert' is not supported" in refused(f"model.path={missing}")


def test_profiles_name_the_file(refused: Refused, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text("{}")
    assert refused(f"hardware={profile}").startswith(f"{profile}: ")


@pytest.mark.parametrize("output", ["file/run", "file"])
def test_folders_that_cannot_be_written(refused: Refused, tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("")
    message = refused(f"output={tmp_path}/{output}", "workload.num_requests=20")
    assert message.startswith(f"{tmp_path}/{output}")
    assert message.endswith("choose another folder with output=")


def test_a_sweep_where_nothing_can_be_written(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "work" / "multirun").write_text("")
    assert "multirun" in refused("-m", "chunk=128,256")


def test_the_full_traceback_is_there_for_those_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    done = new_process("run", "chunk=0", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError: chunk=0" in done.stderr


def test_help_lists_groups_and_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--help"])
    assert main() == 0
    text = capsys.readouterr().out
    assert "\npolicy: " in text and "request_level" in text
    assert "\nhydra/launcher: basic, joblib, " in text and "\nhydra/sweeper: basic, optuna\n" in text
    assert "workload/common" not in text and "hydra/job_logging" not in text
    assert "chunk: 256" in text


def test_every_key_of_the_configuration_is_explained() -> None:
    lines = (ROOT / "experiments" / "conf" / "config.yaml").read_text().splitlines()
    start = lines.index("hydra:")
    keys = [
        line for line in lines[:start] if line and line[0].isalpha() and not line.startswith(("defaults:", "metrics:"))
    ]
    assert [line for line in keys if "#" not in line and not line.startswith("seed")] == []
