"""`python -m experiments.run`: the real configuration, from the command line to the folder that a run leaves."""

import csv
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import (
    PATIENCE,
    QUICK,
    ROOT,
    WAITING,
    command,
    environment,
    errors_at_end,
    new_process,
    start,
    summary,
    wait_for,
    write_azure_trace,
)
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cbatch import ConfigError
from cbatch.results.summary import summarize
from experiments.progress import progress
from experiments.run import main
from experiments.serve import about_run
from experiments.settings.assemble import Run, assemble
from experiments.settings.settings import read_settings
from experiments.store.csv_tables import has_rows, write_csv
from experiments.store.run_folder import open_run_folder, read_finished
from experiments.store.tables import load, load_requests, load_steps, load_tokens, time_between_tokens
from experiments.store.text import run_text

POLICIES = sorted(
    path.stem for path in (ROOT / "experiments" / "conf" / "policy").glob("*.yaml") if path.stem != "external"
)
CHUNKINGS = sorted(path.stem for path in (ROOT / "experiments" / "conf" / "chunking").glob("*.yaml"))
MODELS = sorted(path.stem for path in (ROOT / "experiments" / "conf" / "model").glob("*.yaml"))


@pytest.fixture(scope="class")
def hydra_config() -> Iterator[None]:
    with initialize_config_dir(str(ROOT / "experiments" / "conf"), version_base="1.3"):
        yield


def composed(*overrides: str) -> dict[str, Any]:
    config = OmegaConf.to_container(compose("config", ["sweep=test", *overrides]), resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def executed(*overrides: str) -> Run:
    run = assemble(read_settings(composed(*overrides)))
    run.engine.run()
    run.server.close()
    return run


@pytest.mark.usefixtures("hydra_config")
class TestConfiguration:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("runtime", ["sync", "async"])
    def test_every_policy_serves_everything(self, policy: str, runtime: str) -> None:
        run = executed("backend=sim", f"policy={policy}", f"runtime={runtime}", *QUICK)
        assert len(run.engine.record.requests) == 20

    @pytest.mark.parametrize("chunking", CHUNKINGS)
    def test_every_chunk_selector(self, chunking: str) -> None:
        assert len(executed("backend=sim", f"chunking={chunking}", *QUICK).engine.record.requests) == 20

    @pytest.mark.parametrize("model", MODELS)
    def test_every_model(self, model: str) -> None:
        num_gpus = {"llama-2-70b": 2, "gpt-3": 8}.get(model, 1)
        run = executed("backend=sim", f"model={model}", f"backend.tensor_parallel={num_gpus}", *QUICK)
        assert run.spec.name == model

    @pytest.mark.parametrize("workload", ["closed", "open_loop", "zipf"])
    def test_every_workload_without_a_file(self, workload: str) -> None:
        run = executed("backend=sim", f"workload={workload}", "workload.num_requests=10")
        assert len(run.requests) == 10

    @pytest.mark.parametrize(
        ("policy", "chunk"),
        [("vllm_v1", 128), ("sarathi_serve", 128), ("orca", None), ("vllm_v1 policy.budget=64", None)],
    )
    def test_a_chunk_that_is_a_token_budget_is_told(self, policy: str, chunk: int | None) -> None:
        settings = composed("backend=sim", *f"policy={policy}".split(), "chunk=128", *QUICK)
        about = about_run(assemble(read_settings(settings, choices={"policy": policy.split()[0]})))
        assert about["chunk"] == chunk

    def test_real_tokens_on_the_cpu_from_a_small_model(self) -> None:
        run = executed("backend=cpu", "workload.num_requests=4", "workload.length=48")
        assert run.spec.name == "tiny"
        assert all(len(request.output) == request.max_new_tokens for request in run.requests)

    def test_a_pipeline_of_real_tokens(self) -> None:
        work = ("backend=cpu", "policy=orca", "workload.num_requests=4", "workload.length=16", "batch=2")
        outputs = []
        for stages in ((), ("backend.pipeline_stages=2", "backend.layers=[1,1]")):
            run = executed(*work, *stages)
            outputs.append([request.output for request in run.requests])
            assert run.limits.num_stages == run.engine.executor.num_stages == 1 + bool(stages)  # type: ignore[union-attr]
            assert run.limits.max_running == 2 * run.limits.num_stages
        assert outputs[0] == outputs[1] != []
        with pytest.raises(ConfigError, match=r"pipeline_stages=3 exceeds the 2 layers of model=tiny; lower it to 2"):
            assemble(read_settings(composed(*work, "backend.pipeline_stages=3")))
        with pytest.raises(ConfigError, match=r"^backend.layers=many: give the number of layers of each stage"):
            read_settings(composed(*work, "backend.layers=many"))

    def test_a_chosen_model_wins_over_the_one_of_the_backend(self) -> None:
        assert composed("backend=cpu", "model=qwen3-8b")["model"]["name"] == "qwen3-8b"

    def test_automatic_choices_are_said(self) -> None:
        run = assemble(read_settings(composed(*QUICK)))
        assert run.chosen.keys() == {"backend", "max_tokens", "block_size", "kv_tokens"}
        assert run.chosen["backend"] == "sim (no GPU found)" or run.chosen["backend"].startswith("cuda")

    def test_an_automatic_chunk_is_sized_by_the_lengths(self) -> None:
        run = executed("backend=sim", "chunk=auto", *QUICK)
        assert type(run.engine.policy.chunking).__name__ == "PDAware"  # type: ignore[attr-defined]
        assert run.chosen["chunking"] == "pd_aware (chunk=auto)"

    def test_a_smaller_cache_preempts(self) -> None:
        ample, scarce = (
            executed("backend=sim", "policy=prefill_first", "workload.pd_ratio=1", f"kv_tokens={tokens}", *QUICK)
            for tokens in (20000, 1024)
        )
        assert sum(request.num_preemptions for request in ample.requests) == 0
        assert sum(request.num_preemptions for request in scarce.requests) > 0

    def test_sync_pays_host_time_that_async_hides(self) -> None:
        seconds = {}
        for runtime in ("sync", "async"):
            run = executed("backend=sim", "backend.host_seconds=0.002", f"runtime={runtime}", *QUICK)
            figures = summarize(run.engine.record, num_blocks=1, max_batch=18)
            seconds[runtime] = figures["run"]["seconds"]
            assert (figures["iterations"]["device_active_share"] > 0.99) == (runtime == "async")
        assert seconds["sync"] > 1.1 * seconds["async"]

    @pytest.mark.parametrize("graphs", ["off", "decode", "all"])
    def test_switches_may_be_words(self, graphs: str) -> None:
        config = composed(f"runtime.graphs={graphs}", "progress=off", "timeline=off", *QUICK)
        assert read_settings(config).timeline is False


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a small trace, through the command line."""
    folder = tmp_path_factory.mktemp("run")
    trace = write_azure_trace(folder / "trace.csv")
    done = new_process(
        "run",
        "policy=prefill_first",
        "workload=azure_conv",
        f"workload.path={trace}",
        "output=out",
        "metrics.warmup_requests=2",
        "metrics.objectives.ttft=0.05",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder / "stdout").write_text(done.stdout)
    return folder / "out"


def test_a_run_leaves_one_folder_with_everything(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {"config.yaml", "summary.json", "requests.csv", "steps.csv", "tokens.npz", "timeline.json.gz"}
    assert yaml.safe_load((finished / "config.yaml").read_text())["policy"]["watermark"] == 0.01
    assert json.loads(gzip.decompress((finished / "timeline.json.gz").read_bytes()))["traceEvents"]


def test_every_simulated_result_says_so(finished: Path) -> None:
    about = summary(finished)["about"]
    assert about["simulated"] is True
    assert about["execution"]["profile"] == "h200"
    printed = (finished.parent / "stdout").read_text()
    [origin] = [
        line
        for line in printed.splitlines()
        if line.startswith("SIMULATED with profile h200 (largest error: mean/P50 ")
    ]
    assert len(origin) < 125 and "batch 16-128, load 45-90%" in about["execution"]["error_in_brief"] in origin
    assert "TBT P99" in about["execution"]["error"]
    assert "chosen: backend=sim (no GPU found)" in printed
    assert "true output lengths known to the policy, as max_new_tokens" in printed.splitlines()


def test_tables_hold_a_row_for_each_request_and_iteration(finished: Path) -> None:
    figures = summary(finished)
    requests, steps, tokens = load_requests(finished), load_steps(finished), load_tokens(finished)
    assert len(requests) == figures["run"]["requests"] == 30
    assert len(steps) == figures["run"]["iterations"]
    assert len(tokens) == requests["output_tokens"].sum()
    assert requests["ttft_seconds"].to_list() == pytest.approx(
        (requests["first_token"] - requests["arrival"]).to_list()
    )
    assert len(time_between_tokens(finished)) == len(tokens) - len(requests)
    with (finished / "steps.csv").open() as file:
        assert next(csv.reader(file))[:2] == ["iteration", "planned_at"]


def test_one_frame_for_every_run(finished: Path) -> None:
    [row] = load(finished).to_dict("records")
    figures = summary(finished)
    assert row["name"] == "prefill_first"
    assert row["workload.speed"] == 1.0
    assert row["throughput.total_tokens_per_second"] == figures["throughput"]["total_tokens_per_second"]
    assert 0 < row["goodput.attained_share"] <= 1
    assert row["run.counted_requests"] == 28


def test_the_same_run_is_not_run_again_and_another_not_written_over(finished: Path) -> None:
    trace = finished.parent / "trace.csv"
    same = (
        "policy=prefill_first",
        "workload=azure_conv",
        f"workload.path={trace}",
        "output=out",
        "metrics.warmup_requests=2",
        "metrics.objectives.ttft=0.05",
        "progress=off",
    )
    again = command("run", *same, cwd=finished.parent)
    report, last = again.stdout.rsplit("\n\n", 1)
    assert (again.returncode, last) == (0, "out holds this run already; remove it to run again\n")
    assert report == run_text(json.loads((finished / "summary.json").read_text()))
    other = command("run", *same, "batch=3", cwd=finished.parent)
    assert other.returncode == 2
    assert "out contains a complete run with other settings" in other.stderr
    assert summary(finished)["about"]["limits"]["batch"] == 18


def test_a_simulated_run_loads_neither_torch_nor_pandas(tmp_path: Path) -> None:
    code = (
        "import sys; from experiments.run import main; status = main(); "
        "loaded = {'torch', 'transformers', 'pandas', 'matplotlib', 'tqdm'} & set(sys.modules); "
        "sys.exit(f'loaded: {loaded}' if loaded else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *QUICK],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_real_tokens_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["run", "backend=cpu", "workload.num_requests=3", "workload.length=40", "output=out"]
    )
    assert main() == 0
    printed = capsys.readouterr().out
    assert "measured on" in printed
    lines = [json.loads(line) for line in (tmp_path / "out" / "outputs.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [0, 1, 2]
    assert all(0 <= token < 512 for line in lines for token in line["output"])


def test_text_in_and_text_out_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny_models import CPU, LLAMA, load_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    load_model(LLAMA, CPU).save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({f"w{id_}": id_ for id_ in range(LLAMA.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3 w14 w15"}\n{"token_ids": [3, 14, 15]}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "run",
            "backend=cpu",
            "model.path=model",
            "workload=prompts",
            "workload.path=prompts.jsonl",
            "workload.max_new_tokens=5",
            "output=out",
        ],
    )
    capsys.readouterr()
    assert main() == 0
    assert capsys.readouterr().err == ""
    first, second = (json.loads(line) for line in (tmp_path / "out" / "outputs.jsonl").read_text().splitlines())
    assert first["output"] == second["output"]
    assert first["text"] == " ".join(f"w{token}" for token in first["output"])
    assert summary(tmp_path / "out")["about"]["chosen"]["model"] == "model (of model.path)"


EXTERNAL = '''
class Alone:
    """One request at a time."""

    def __init__(self, at_most=1):
        self.at_most = at_most

    def plan(self, view):
        plan = view.plan()
        for request in [*view.running, *view.waiting][: self.at_most]:
            plan.add(request)
        return plan.build()


class Broken:
    def plan(self, view):
        return {}["key"]
'''


def test_only_a_command_changes_when_its_process_collects_garbage(tmp_path: Path) -> None:
    """A notebook and vLLM import parts of `experiments`, too."""
    program = "import gc, sys; before = gc.get_threshold(); import experiments.settings; sys.exit(gc.get_threshold() != before)"
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment()).returncode == 0
    (tmp_path / "told.py").write_text(
        "import gc\nfrom policies.orca import Orca\nclass Told(Orca):\n    def __init__(self):\n        super().__init__()\n"
        "        print(gc.get_threshold()[0])\n"
    )
    done = new_process("run", "policy=external", "policy._target_=told.Told", *QUICK, cwd=tmp_path)
    assert done.stdout.splitlines()[0] == "200000", done.stderr


def test_a_policy_from_outside_works_by_its_import_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EXTERNAL)
    alone = command(
        "run", "policy=external", "policy._target_=mine.Alone", "+policy.at_most=2", "output=out", *QUICK, cwd=tmp_path
    )
    assert alone.returncode == 0, alone.stderr
    figures = summary(tmp_path / "out")
    assert figures["about"]["policy"] == "Alone"
    assert figures["iterations"]["batch_requests"] <= 2
    broken = command("run", "policy=external", "policy._target_=mine.Broken", *QUICK, cwd=tmp_path)
    assert broken.returncode == 2
    (failed,) = (tmp_path / "runs").iterdir()
    said = "error: policy Broken, iteration 0: plan() raised KeyError: 'key' (mine.py:17)"
    assert broken.stderr == f"{said}; see {failed.relative_to(tmp_path)}/unfinished.json\n"
    left = {path.name for path in (tmp_path / "runs").glob("*/*")}
    assert left == {"config.yaml", "unfinished.json"}


@pytest.mark.skipif(os.name == "nt", reason="signals are sent to a process group")
def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    begun, folder = tmp_path / "begun", tmp_path / "work"
    folder.mkdir()
    process = start(*WAITING, "+policy.at=5", f"+policy.begun={begun}", cwd=folder)
    wait_for(begun.exists, process)
    assert list(folder.glob("runs/*/unfinished.json"))
    process.send_signal(signal.SIGINT)
    assert errors_at_end(process) == "\ninterrupted; nothing was written\n"
    assert process.returncode == 130
    assert list(folder.iterdir()) == []


def test_progress_shows_requests_speed_and_time_left(
    hydra_config: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.progress._DELAY", 0.0)
    monkeypatch.setattr("experiments.progress._INTERVAL", 0.0)
    for setting in ("on", "auto", "off"):
        run = assemble(read_settings(composed("backend=sim", *QUICK)))
        said: list[str] = []
        with progress(setting, len(run.requests), False, said.append) as on_step:
            run.engine.run(on_step)
        assert said == (["serving 20 requests; progress=on shows how far it is"] if setting == "auto" else [])
        shown = capsys.readouterr().err.split("\r")
        if setting == "on":
            assert any(
                re.fullmatch(r"20/20 requests \|.+\| 00:00 elapsed, 00:00 left, [\d,]+ tokens/s *", line)
                for line in shown
            )
        else:
            assert shown == [""]  # stderr is not a terminal here


@pytest.mark.parametrize(("num_requests", "announced"), [(999, False), (1000, True)])
def test_a_long_simulation_without_a_bar_is_announced(num_requests: int, announced: bool) -> None:
    said: list[str] = []
    with progress("auto", num_requests, True, said.append):
        assert said == [f"serving {num_requests:,} requests; progress=on shows how far it is"] * announced


def test_a_folder_whose_run_is_interrupted_is_as_it_was(tmp_path: Path) -> None:
    config = {"batch": 1}
    with pytest.raises(KeyboardInterrupt), open_run_folder(tmp_path / "a" / "b", config, {}, replace=False):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": 1}'])
def test_a_run_without_a_whole_summary_is_not_finished(tmp_path: Path, content: str) -> None:
    with open_run_folder(tmp_path / "run", {}, {}, replace=False):
        (tmp_path / "run" / "summary.json").write_text(content)
    assert read_finished(tmp_path / "run", {}) is None
    with pytest.raises(ConfigError, match="holds no finished run"):
        load(tmp_path)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1")
    (tmp_path / "notes").mkdir()
    with (
        pytest.raises(ConfigError, match="contains files that do not belong to a run"),
        open_run_folder(tmp_path, {}, {}, replace=True),
    ):
        pass
    assert (tmp_path / "config.yaml").read_text() == "mine: 1"


def test_a_key_that_is_given_again_is_said(tmp_path: Path) -> None:
    done = command("run", "batch=2", "batch=3", "output=out", *QUICK, cwd=tmp_path)
    assert done.stdout.startswith("batch is given 2 times; the last one counts: batch=3\n")
    assert summary(tmp_path / "out")["about"]["limits"]["batch"] == 3


@pytest.mark.parametrize("name", ["requests.csv", "steps.csv"])
@pytest.mark.parametrize("keep", [-1, -3, "line", 0], ids=["end of line", "in a number", "a line", "everything"])
def test_a_table_that_was_cut_off_is_refused_and_the_run_made_again(
    finished: Path, tmp_path: Path, name: str, keep: int | str
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(finished, folder)
    content = (folder / name).read_bytes()
    end = content.rindex(b"\n", 0, -1) + 1 if isinstance(keep, str) else keep
    assert load(folder).shape[0] == 1
    (folder / name).write_bytes(content[:end])
    rows = summary(folder)["run"]["requests" if name == "requests.csv" else "iterations"]
    said = f"{folder / name}: is cut off or changed, the run wrote {rows} rows; remove {folder} and run it again"
    for read in (load, load_requests, load_steps):
        with pytest.raises(ConfigError) as caught:
            read(folder)
        assert str(caught.value) == said
    plotted = command("plot", "latency_cdf", str(folder), cwd=tmp_path)
    assert (plotted.returncode, plotted.stderr) == (2, f"error: {said}\n")
    identity = summary(finished)["about"]["identity"]
    assert read_finished(finished, identity) and not read_finished(folder, identity)


def test_a_table_with_line_breaks_in_its_texts_is_whole(tmp_path: Path) -> None:
    write_csv(tmp_path / "table.csv", ["note"], [["two\nlines"], ["one"]])
    assert has_rows(tmp_path / "table.csv", 2)
    assert not has_rows(tmp_path / "table.csv", 3)


def test_a_model_that_does_not_fit_is_refused_before_it_is_said_to_be_loading(tmp_path: Path) -> None:
    done = command("run", "backend=cpu", "hardware=h200", "model=gpt-3", "policy=orca", *QUICK, cwd=tmp_path)
    assert (done.returncode, "loading" in done.stdout) == (2, False)
    assert done.stderr.startswith("error: model gpt-3 needs ")


def test_a_run_of_a_policy_of_ones_own_is_named_by_its_class(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from policies.orca import Orca\n\n\nclass Mine(Orca): ...\n")
    for policy in (["policy=external", "policy._target_=mine.Mine"], ["policy=mine.Mine"]):
        assert command("run", *policy, "backend=sim", *QUICK, cwd=tmp_path).returncode == 0
    assert {path.name.partition("_")[2].partition("_")[2] for path in (tmp_path / "runs").iterdir()} == {
        "Mine",
        "mine.Mine",
    }
