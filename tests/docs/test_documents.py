"""A stranger follows the documents literally, in an empty folder: writes the files they show, gives the commands they show.

Files and commands are taken from the documents themselves. Workloads are made small, and a folder and a file stand for DIR and
FILE; a command that is not followed is in `ELSEWHERE`, with the reason. Notebooks are executed by `test_notebooks`.
"""

import ast
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from commands import ROOT, as_in_a_new_process, command, few_swept, write_azure_trace
from live import QUICK, serving
from tiny_models import LLAMA

from cbatch.runtime.weights import load_model
from experiments.capacity import command as capacity
from experiments.capacity import control
from experiments.capacity.simulation import Outcome
from experiments.check import search
from experiments.report.headings import flat
from experiments.settings import backends
from experiments.settings.error_lines import default_keys
from experiments.store.claim import UNFINISHED
from experiments.store.csv_tables import ENERGY
from experiments.store.run_folder import FILES, OUTPUTS, PROFILE, TOKENS
from experiments.workloads import PromptFile, ServeGen, TraceReplay
from experiments.workloads.trace import Format

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

ELSEWHERE = {
    r"make |pip ": "installs packages",
    r".*/\.cache/cbatch/": "of `make model`; see tests/text",
    r"python -m (vidur|pytest)": "another program",
    r"python -m experiments\.bench": "minutes on a GPU",
    r"python -m reproduction\.": "minutes, or a GPU; see reproduction/tests",
    r"python -m experiments\.profile (model=(?!tiny)|card|copies)": "needs a GPU",
    r"python -m experiments\.run .*hardware=h100-1a2b3c4d": "on a card that was measured",
    r"python -m experiments\.run .*backend=cuda": "needs GPUs",
    r"python -m experiments\.run .*(workload\.path=mooncake_|traces=FOLDER)": "of a published trace",
    r".*launcher=joblib": "minutes; see test_sweep",
    r"python -m experiments\.(plot|compare) .*multirun/(agents|chat|idea|rates|slo|noise|landscape|ratio|tier)": "of a sweep that is not made",
    r"python -m experiments\.compare runs/": "of searches that are not made",
    r"python -m experiments\.(arena|capacity -m experiment=arena) traces=FOLDER": "of the published traces; see test_arena",
    r"python -m experiments\.(replay|run) .*today": "of what vLLM decided; see test_vllm_plans",
    r"python -m experiments\.server": "serves until a signal; see tests/server",
    r"python -m experiments\.\w+ .*runs/live": "of a server's run; see test_server",
}
COMMANDS = ("make ", "pip ", "python ")


class Block(NamedTuple):
    """A fenced block. language: as the fence names it; empty for commands and drawings."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The path in the comment with which it begins, or the name of a profile."""
        if self.language == "json":
            return f"{json.loads(self.text)['name']}.json"
        found = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        lines = self.text.replace("\\\n", " ").splitlines() if not self.language else []
        return [line for line in lines if line.startswith(COMMANDS)]


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)]


def few(chunk: int) -> Iterator[search.Scenario]:
    """Some of the tiny scenarios; `experiments.check` takes them all."""
    return islice(ALL_TINY(chunk), 0, None, 60)


ALL_TINY = search.tiny_scenarios
README = {line.partition("  ")[0] for block in blocks(DOCUMENTS[0]) for line in block.commands}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder but for a checkpoint and a trace, on a machine without a GPU, for searches and checks of a few requests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(backends, "count_gpus", lambda: 0)
    monkeypatch.setattr(search, "tiny_scenarios", few)
    monkeypatch.setattr(capacity, "simulate", late_above_seven)
    monkeypatch.setattr(control, "_DRAWN", 200_000)
    return tmp_path


def late_above_seven(settings: object, number: int, rate: float, requests: int, warmup: int) -> Outcome:
    """In place of a simulation of thousands of requests; see test_capacity. At 7 requests per second 1% are late."""
    counted = requests - 2 * warmup
    good = round(counted * (1 - 0.01 * (rate / 7) ** 5))
    return Outcome(rate, number, requests, warmup, good, counted, 0.01 * rate, 0.0)


def smaller(words: list[str]) -> list[str]:
    """The arguments of a command, with a small workload, few random ones, and few of the numbers that a sweep crosses."""
    if words[0] == "check":
        return [*words, "random=2"]
    if words[0] == "capacity":
        return [*words, "cores=1"]
    if words[0] not in ("run", "compare") or "--help" in words or words[1].startswith("multirun/"):
        return words
    kept = [few_swept(word) for word in words if not word.startswith(("workload.num_requests=", "seeds="))]
    kept += ["seeds=2"] * (words[0] == "compare" or "seeds=" in " ".join(words))
    short = ["workload.length=200"] * ("model.path=DIR" in words) + ["timeline=off"] * ("-m" in words)
    return [*kept, "workload.num_requests=12", *short]


def follow(line: str, folder: Path) -> None:
    """Give a command of a document."""
    program, option, module, *arguments = shlex.split(line, comments=True)
    assert (program, option, module.partition(".")[0]) == ("python", "-m", "experiments"), line
    if "model.path=DIR" in line and not (folder / "DIR").exists():
        load_model(LLAMA, torch.device("cpu")).save_pretrained(folder / "DIR")
    if "=FILE" in line:
        write_azure_trace(folder / "FILE", 400)
    done = command(*smaller([module.removeprefix("experiments."), *arguments]), cwd=folder)
    assert done.returncode == 0, f"{line}\n{done.stderr}"


def write(block: Block, folder: Path) -> None:
    """Write the file that a block shows, if it does."""
    if block.file is not None:
        (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.file).write_text(block.text, encoding="utf-8")


def run(text: str, document: str, folder: Path) -> None:
    """Run a block of Python; a client's, beside a server."""
    if ":8000" in text:
        with serving(folder, *QUICK) as live:
            run(text.replace(":8000", f":{live.port}"), document, folder)
            assert live.stop() == 0
    else:
        exec(compile(text, document, "exec"), {"__name__": "__main__"})


@pytest.mark.long
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_a_document_is_followed_from_top_to_bottom(document: Path, folder: Path, pytestconfig: pytest.Config) -> None:
    """Documents are read after the README, whose files are there."""
    if document != DOCUMENTS[0] and not pytestconfig.getoption("--slow"):
        pytest.skip("--slow: takes a minute")
    for block in blocks(DOCUMENTS[0]):
        write(block, folder)
    for block in blocks(document):
        write(block, folder)
        if block.file is None and block.language == "python" and block.text.startswith(("from ", "import ")):
            with as_in_a_new_process(folder, ["python"]):
                run(block.text, str(document), folder)
        for line in block.commands:
            seen_before = document != DOCUMENTS[0] and line.partition("  ")[0] in README
            if not seen_before and not any(re.match(pattern, line) for pattern in ELSEWHERE):
                follow(line, folder)


def test_the_tests_that_documents_show_pass(folder: Path) -> None:
    shown = [block for document in DOCUMENTS for block in blocks(document) if (block.file or "").startswith("test_")]
    for block in [*blocks(DOCUMENTS[0]), *shown]:
        write(block, folder)
    tests = list[Callable[[], None]]()
    with as_in_a_new_process(folder, ["python"]):
        for block in shown:
            exec(compile(block.text, str(block.file), "exec"), names := dict[str, Any]())
            tests += [value for name, value in names.items() if name.startswith("test_")]
        for test in tests:
            test()
    assert tests


def test_the_methods_that_the_architecture_names_exist() -> None:
    """In the named class itself, where a reader looks for them."""
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", (ROOT / "docs" / "architecture.md").read_text()))
    kinds, defined = {name.partition(".")[0] for name in named}, set[str]()
    for file in chain((ROOT / "cbatch").rglob("*.py"), (ROOT / "experiments").rglob("*.py")):
        if kinds.isdisjoint(re.findall(r"^class (\w+)", text := file.read_text(), re.MULTILINE)):
            continue
        for kind in [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]:
            names = [node.name for node in ast.walk(kind) if isinstance(node, ast.FunctionDef)]
            fields = [node.attr for node in ast.walk(kind) if isinstance(node, ast.Attribute)]
            defined |= {f"{kind.name}.{name}" for name in names + fields}
    assert len(named) > 20 and named <= defined


@pytest.mark.long
def test_each_workload_is_listed_with_keys_that_it_has() -> None:
    rows = re.findall(r"^\| (.+) \| .+ \| (.+) \|$", (ROOT / "docs" / "real-input.md").read_text(), re.M)
    listed = {name: keys for names, keys in rows for name in re.findall(r"`(\w+)`", names)}
    assert {path.stem for path in (ROOT / "conf" / "workload").glob("*.yaml")} == listed.keys()
    for name, keys in listed.items():
        known = [f"{key}." for key, _ in flat(default_keys("config", [f"workload={name}"])["workload"])]
        for key in re.findall(r"`([\w.]+)", keys):
            assert any(other.startswith(f"{key}.") for other in known), (name, key)


@pytest.mark.long
def test_the_files_of_a_run_and_their_columns_are_listed(tmp_path: Path) -> None:
    """Those of a pipeline with decisions, of replicas with roles and a prefix cache, and of a closed loop."""
    page = (ROOT / "docs" / "metrics.md").read_text().partition("\n## ")[0]
    listed = defaultdict[str, set[str]](set)
    for name, text in re.findall(r"^\| `([\w.]+)`[^|]* \| (.+) \|$", page, re.M):
        listed[name] |= {*re.findall(r"`([a-z_0-9]+)`", text)}
    few = ("run", "backend=cpu", "workload=open_loop", "workload.num_requests=4")
    few += ("workload.lengths.min_length=32", "workload.lengths.max_length=40")
    assert command(*few, "output=a", "backend.pipeline_stages=2", "decisions=true", cwd=tmp_path).returncode == 0
    roles = "backend.pools={p: {role: prefill}, d: {role: decode}}"
    assert command(*few, "output=b", roles, "prefix_cache=true", cwd=tmp_path).returncode == 0
    chat = ("run", "backend=sim", "workload=chat", "workload.num_requests=4", "workload.slo={tpot: 1}")
    assert command(*chat, "output=c", cwd=tmp_path).returncode == 0
    written = {path.name for path in tmp_path.rglob("*.*")}
    assert {*listed} == {*FILES} and written == {*FILES} - {ENERGY, PROFILE, UNFINISHED}
    for name in (path.name for path in (tmp_path / "a").glob("*.csv")):
        found = [path.read_text().partition("\n")[0].strip().split(",") for path in tmp_path.glob(f"?/{name}")]
        assert {*chain.from_iterable(found)} == listed[name], name
    assert {*np.load(tmp_path / "a" / TOKENS)} == listed[TOKENS]
    first = (tmp_path / "a" / OUTPUTS).read_text().partition("\n")[0]
    assert {*json.loads(first), "prompt", "text"} == listed[OUTPUTS]


def test_the_files_of_requests_that_are_shown_can_be_read(tmp_path: Path) -> None:
    """In the order of the table of formats; then prompts, and the two files of ServeGen."""
    shown = [block for block in blocks(ROOT / "docs" / "adding.md") if block.language in ("csv", "jsonl")]
    paths = [str(tmp_path / f"{number}.{block.language}") for number, block in enumerate(shown)]
    for path, block in zip(paths, shown, strict=True):
        Path(path).write_text(block.text, encoding="utf-8")
    *traces, prompts, rates, lengths = paths
    formats: tuple[Format, ...] = ("lengths", "azure", "vtc", "mooncake", "bailian")
    for path, format in zip(traces, formats, strict=True):
        assert len(TraceReplay(path=path, format=format).requests(None)) == 2
        assert TraceReplay(path=path).requests(None)[1].arrival_time > 0
    assert [request.arrival_time for request in PromptFile(path=prompts).requests(None)] == [0, 1.5]
    served = ServeGen(path=rates, dataset=lengths, duration=1200).requests(None)
    assert {request.num_prompt_tokens for request in served} == {100, 900}


@pytest.mark.long
def test_the_draft_model_is_as_fast_as_the_document_says(tmp_path: Path) -> None:
    """A change of what passes of a draft model cost, or of the profile, would leave the printed figures behind."""
    document = ROOT / "docs/speculation.md"
    sentence = r"generate ([\d,]+) tokens per second at batch 8, and ([\d,]+) with `batch=64`; without a drafter it is ([\d,]+) and ([\d,]+)"
    found = re.search(sentence, document.read_text(encoding="utf-8"))
    assert found is not None
    (line,) = (each for block in blocks(document) for each in block.commands if "drafter.model=llama-3.2-1b" in each)
    words = [word for word in shlex.split(line)[3:] if word != "batch=8"]
    plain = [word for word in words if not word.startswith("draft")]
    runs = [(arguments, batch) for arguments in (words, plain) for batch in (8, 64)]
    for printed, (arguments, batch) in zip(found.groups(), runs, strict=True):
        done = command("run", *arguments, f"batch={batch}", "tables=off", cwd=tmp_path)
        assert f"and {printed} decode\n" in done.stdout, done.stdout + done.stderr
