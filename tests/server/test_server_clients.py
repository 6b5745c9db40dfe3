"""Clients that others wrote, unmodified: the `openai` package, and at night GuideLLM where it is installed."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import summary
from live import QUICK, serving

from cbatch.model.checkpoint import MADE

SMALL_MODEL = MADE.expanduser()


@pytest.mark.long
def test_the_openai_package_reads_answers_streams_and_errors(tmp_path: Path) -> None:
    from openai import BadRequestError, OpenAI  # takes a second, which other processes of `pytest -n` need not

    with serving(tmp_path, *QUICK) as live:
        client = OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none", max_retries=0)
        asked: Any = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": "a b"}]}
        extra = {"client": "alice", "tier": "gold", "slo": {"ttft": 0.5}, "ignore_eos": True}
        whole = client.chat.completions.create(**asked, max_tokens=4, extra_body=extra)
        chunks = [*client.chat.completions.create(**asked, max_tokens=4, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "length"
        with client.completions.create(model=asked["model"], prompt=[1, 2], max_tokens=500, stream=True) as left:
            assert next(left).choices[0].finish_reason is None
        with pytest.raises(BadRequestError) as refused:
            client.completions.create(model=asked["model"], prompt="a", echo=True)
        assert refused.value.param == "echo"
        assert live.stop() == 0
    assert summary(live.folder)["run"]["cancelled_requests"] == 1


def test_guidellm_measures_what_the_run_has(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    guidellm = shutil.which("guidellm")
    if not pytestconfig.getoption("--slow") or guidellm is None or not SMALL_MODEL.is_dir():
        pytest.skip("--slow: needs guidellm, and the checkpoint of `make model`")
    with serving(tmp_path, "policy=sarathi_serve", "backend=sim", "hardware=h200", "port=0") as live:
        name = live.ask("/v1/models")[1]["data"][0]["id"]
        options = {
            "backend": f"kind=openai_http,target=http://127.0.0.1:{live.port},model={name},request_format=/v1/completions",
            "profile": "kind=constant,rate=5",
            "constraint": "kind=max_requests,count=20",
            "tokenizer": f"kind=hf_auto,model={SMALL_MODEL}",
            "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "output": f"kind=json,path={tmp_path / 'guidellm.json'}",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        command = [guidellm, "run", *words, "--disable-console-interactive"]
        subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True, cwd=tmp_path, timeout=300)
        assert live.stop() == 0
    [benchmark] = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    figures, metrics = summary(live.folder), benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 20, "errored": 0, "incomplete": 0, "total": 20}
    token = 1000 * figures["tpot_seconds"]["mean"]  # GuideLLM's own TPOT has the TTFT in it
    assert metrics["inter_token_latency_ms"]["successful"]["mean"] == pytest.approx(token, rel=0.1)
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 1000 * figures["ttft_seconds"]["mean"]
