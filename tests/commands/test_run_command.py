"""`python -m experiments.run`: the real configuration, from the command line to the folder that a run leaves."""

import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from commands import (
    IN_PLAN,
    PATIENCE,
    QUICK,
    WAITING,
    command,
    environment,
    errors_at_end,
    start,
    summary,
    wait_for,
    write_azure_trace,
)
from hand_made import write_run

from cbatch import ConfigError
from experiments.progress import bar, progress
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.setup.presets import FOLDER, load_spec
from experiments.store.csv_tables import has_rows, write_csv
from experiments.store.run_folder import check_usable, open_run_folder


def test_every_model_preset_has_its_name() -> None:
    names = [path.stem for path in FOLDER.glob("*.yaml")]
    assert [load_spec(name).name for name in names] == names


def test_a_chosen_model_wins_over_the_one_of_the_backend() -> None:
    assert compose_run("backend=cpu", "model=qwen3-8b").model.name == "qwen3-8b"


def test_a_run_leaves_one_folder_with_everything(tmp_path: Path) -> None:
    write_azure_trace(tmp_path / "trace.csv")
    options = ("workload=azure_conv", "workload.path=trace.csv", "metrics.objectives.ttft=0.05", "output=out")
    done = command("run", "policy=prefill_first", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    finished = tmp_path / "out"
    names = {path.name for path in finished.iterdir()}
    assert names == {"config.yaml", "summary.json", "requests.csv", "steps.csv", "tokens.npz", "timeline.json.gz"}
    assert yaml.safe_load((finished / "config.yaml").read_text())["policy"]["watermark"] == 0.01
    assert json.loads(gzip.decompress((finished / "timeline.json.gz").read_bytes()))["traceEvents"]


@pytest.mark.long
def test_a_simulated_run_loads_neither_torch_nor_pandas(tmp_path: Path) -> None:
    code = (
        "import atexit, runpy, sys; "
        "unused = {'torch', 'transformers', 'pandas', 'matplotlib', 'tqdm'}; "
        "atexit.register(lambda: print('loaded:', *unused & set(sys.modules))); "
        "runpy.run_module('experiments.run', run_name='__main__', alter_sys=True)"
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
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded:"), done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


PRINTED = """
from pathlib import Path

from policies.orca import Orca


class Printed(Orca):
    def __init__(self):
        with Path("made").open("a") as file:
            file.write("x")
        self.lock = (number for number in [])

    def __repr__(self):
        return "printed"
"""


@pytest.mark.parametrize("words", [[], ["-m"], ["decisions=true"]])
def test_a_policy_is_constructed_once_per_run(words: list[str], tmp_path: Path) -> None:
    """Its text, which an own `__repr__` makes of an object, is of the one that runs; here it can be neither copied nor pickled."""
    (tmp_path / "mine.py").write_text(PRINTED)
    done = command("run", *words, "policy=mine.Printed", "backend=sim", *QUICK, cwd=tmp_path)
    assert (done.returncode, done.stderr, (tmp_path / "made").read_text()) == (0, "", "x")
    [file] = tmp_path.glob("*/**/summary.json")
    assert summary(file.parent)["about"]["policy"] == "printed"


def test_the_label_of_an_own_policy_has_what_differs_from_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from policies.orca import Orca\n\n\nclass Two(Orca):\n"
        "    def __init__(self, budget: int = 256, short: bool = False) -> None:\n        self.budget = 1\n"
    )
    for words, label in (
        ("", "Two"),
        ("(budget=256)", "Two"),
        ("(budget=128,short=true)", "Two(budget=128, short=true)"),
    ):
        done = command("run", f"policy=mine.Two{words}", "backend=sim", *QUICK, cwd=tmp_path)
        assert f"\n{label} on closed" in done.stdout, done


def test_replicas_have_copies_of_the_one_policy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PRINTED.replace("self.lock", "lock"))
    done = command("run", "policy=mine.Printed", "backend=sim", "backend.replicas=3", *QUICK, cwd=tmp_path)
    assert (done.returncode, done.stderr, (tmp_path / "made").read_text()) == (0, "", "x")


def outputs_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines()]


def test_text_in_and_text_out_of_a_checkpoint(tmp_path: Path) -> None:
    from tiny_models import save_model_of_words  # loads torch

    save_model_of_words(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3 w14 w15"}\n{"token_ids": [3, 14, 15]}\n')
    prompts = ("workload=prompts", "workload.path=prompts.jsonl", "workload.max_new_tokens=5")
    done = command("run", "backend=cpu", "model.path=model", *prompts, "output=out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = outputs_of(tmp_path / "out")
    assert first == {**second, "id": 0} and first["prompt"] == "w3 w14 w15"
    assert first["text"] == " ".join(f"w{token}" for token in first["output"])

    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    ids = ("workload=closed", "workload.num_requests=2", "workload.length=32", "batch=2")
    done = command("run", "backend=cpu", "model.path=model", *ids, "output=out_of_ids", cwd=tmp_path)
    assert done.returncode == 0 and "text=none, outputs are token ids (" in done.stdout.partition("serving")[0]
    assert outputs_of(tmp_path / "out_of_ids")[0].keys() == {"id", "finish_reason", "output"}
    assert summary(tmp_path / "out")["about"]["chosen"]["model"] == "model (of model.path)"


@pytest.mark.long
def test_stop_strings_and_the_models_own_end_end_outputs(tmp_path: Path) -> None:
    """The output ends with the token that completes a stop string, the text before the string; the same in every loop."""
    from tiny_models import save_model_of_words

    save_model_of_words(tmp_path / "model")
    numbers = count()
    lines: list[dict[str, Any]] = [{"token_ids": [*range(20 + place, 50)], "max_new_tokens": 20} for place in range(6)]

    def run(*arguments: str) -> list[dict[str, Any]]:
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
        prompts = (
            "backend=cpu",
            "model.path=model",
            "workload=prompts",
            "workload.path=prompts.jsonl",
            "batch=4",
            "chunk=7",
        )
        done = command("run", *prompts, *arguments, f"output={next(numbers)}", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return outputs_of(max(path for path in tmp_path.iterdir() if path.name.isdigit()))

    whole = run("workload.ignore_eos=true")
    assert {(len(output["output"]), output["finish_reason"]) for output in whole} == {(20, "length")}
    for line, output in zip(lines, whole, strict=True):
        line["stop"] = ["never", " ".join(output["text"].split()[8:10])[1:]]  # begins and ends within tokens
    loops = [
        ("runtime=sync",),
        ("backend.pipeline_stages=2",),
        ("backend.replicas=2",),
        ("policy=vllm_v1", "kv_tokens=96"),
    ]
    for loop in [(), *loops]:
        for before, output in zip(whole, run("workload.ignore_eos=true", *loop), strict=True):
            text, stop = before["text"], lines[before["id"]]["stop"][1]
            place = text.find(stop)
            assert output["text"] == text[:place] and output["finish_reason"] == "stop"
            tokens = output["output"]
            shown = [f"w{token}" for token in tokens if token]  # w0 is a control token
            assert tokens == before["output"][: len(tokens)] and tokens[-1]
            assert shown == text.split()[: len(text[: place + len(stop)].split())]

    end = whole[0]["output"][4]
    (tmp_path / "model" / "generation_config.json").write_text(f'{{"eos_token_id": [{end}]}}')
    first = run()[0]
    assert (
        first["output"] == whole[0]["output"][: whole[0]["output"].index(end) + 1] and first["finish_reason"] == "stop"
    )


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals are sent to a process group")
def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    begun, folder = tmp_path / "begun", tmp_path / "work"
    folder.mkdir()
    process = start(*WAITING, "+policy.at=5", f"+policy.begun={begun}", cwd=folder)
    wait_for(begun.exists, process)
    assert list(folder.glob("runs/*/unfinished.json"))
    process.send_signal(signal.SIGINT)
    assert re.fullmatch(rf"\n{IN_PLAN}; nothing was written\n", errors_at_end(process))
    assert process.returncode == 130
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("setting", ["on", "auto", "off"])
def test_progress_shows_requests_speed_and_time_left(
    setting: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, where stderr is no terminal, `auto` prints lines."""
    for name in ("_DELAY", "_INTERVAL", "_BETWEEN_LINES"):
        monkeypatch.setattr(f"experiments.progress.{name}", 0.0)
    run = assemble(compose_run("backend=sim", *QUICK))
    with progress(setting, len(run.requests)) as on_step:
        run.engine.run(on_step)
    shown = capsys.readouterr().err.split("\r" if setting == "on" else "\n")
    done = r"20/20 requests \|.+\| \d\d:\d\d, 00:00 left, [\d,]+ tokens/s computed, \d\.\d GB memory *"
    assert any(re.fullmatch(done, line) for line in shown) == (setting != "off")
    assert (shown == [""]) == (setting == "off")


def test_time_left_is_in_proportion_to_the_requests_to_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request ends every 2 s, and the engine turns every 20 ms; without a terminal a line is printed every 30 s."""
    clock = [1e9]
    monkeypatch.setattr("experiments.progress.time", lambda: clock[0])
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    engine = Mock(record=Mock(steps=[]), executor=Mock(now=lambda: 0.0))
    with progress("auto", 300) as on_step:
        for turn in range(1, 4600):
            clock[0], engine.arrivals.num_ended = 1e9 + turn / 50, turn // 100
            on_step(engine)
    times = [re.findall(r"(\d+)/300|(\d\d):(\d\d)", line) for line in capsys.readouterr().err.splitlines()]
    shown = [(int(n), 60 * int(a) + int(b), 60 * int(c) + int(d)) for (n, *_), (_, a, b), (_, c, d) in times]
    assert [elapsed for _, elapsed, _ in shown] == [30, 60, 90]
    assert [left for *_, left in shown] == [elapsed * (300 - n) // n for n, elapsed, _ in shown] == [570, 540, 510]


def test_an_unknown_number_of_requests_has_no_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_DELAY", "_INTERVAL", "_BETWEEN_LINES"):
        monkeypatch.setattr(f"experiments.progress.{name}", 0.0)
    engine = Mock(record=Mock(steps=[]), executor=Mock(now=lambda: 0.0), arrivals=Mock(num_ended=13))
    with progress("auto", 0) as on_step:
        on_step(engine)
    assert re.fullmatch(r"(\d+ requests \| 00:00\n)+", err := capsys.readouterr().err) and "13 requests" in err


def test_turns_that_are_not_asked_yet_have_not_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two chats at a time: their first turns are known from the start, and the others as the answers end."""
    for name in ("_DELAY", "_INTERVAL", "_BETWEEN_LINES"):
        monkeypatch.setattr(f"experiments.progress.{name}", 0.0)
    chats = ("workload=chat", "workload.sessions=2", "workload.num_requests=12")
    run = assemble(compose_run("backend=sim", *chats))
    with progress("auto", run.num_requests) as on_step:
        run.engine.run(on_step)
    shown = [[*map(int, text.split("/"))] for text in re.findall(r"^\d+/\d+", capsys.readouterr().err, re.MULTILINE)]
    done, totals = zip(*shown, strict=True)
    assert {*totals} == {run.num_requests} and [*dict.fromkeys(done)] == [*range(run.num_requests + 1)]


def test_a_terminal_that_does_not_state_its_size_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with bar(total=20, delay=0.0):
            assert "0/20" in os.read(screen, 2**16).decode()
    os.close(screen)


def test_hydra_shows_every_key_of_a_package(tmp_path: Path) -> None:
    """Also the key `slo` of a workload, a name that is a group as well, which a run does not take."""
    assert "\nslo: null\n" in command("run", "--cfg", "job", "-p", "workload", cwd=tmp_path).stdout


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1")
    (tmp_path / "notes").mkdir()
    with (
        pytest.raises(ConfigError, match="contains files that do not belong to a run"),
        open_run_folder(tmp_path, {}, {}, replace=True),
    ):
        pass
    assert (tmp_path / "config.yaml").read_text() == "mine: 1"
    write_run(tmp_path / "series" / "seed=0")
    with pytest.raises(ConfigError, match="series contains other runs; choose another folder with output="):
        check_usable(tmp_path / "series", {}, replace=True)


def test_a_table_with_line_breaks_in_its_texts_is_whole(tmp_path: Path) -> None:
    write_csv(tmp_path / "table.csv", ["note"], [["two\nlines"], ["one"]])
    assert has_rows(tmp_path / "table.csv", 2)
    assert not has_rows(tmp_path / "table.csv", 3)
    (tmp_path / "table.csv").write_text(f'"{200_000 * chr(48)}')
    assert not has_rows(tmp_path / "table.csv", 3)
