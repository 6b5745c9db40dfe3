"""Makes the files of `conf/workload/traces/` from clones of the repositories that publish them.

    python -m reproduction.papers traces clones=FOLDER traces=FOLDER

clones holds a clone of each repository in `FILES`, under the repository's name; files without a clone are skipped. Each file is cut or converted
from the named commit, and is written, compressed, only if its content has the digest given here.
"""

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import run
from typing import Any

from cbatch import ConfigError


@dataclass(frozen=True)
class Clone:
    """A repository's files at a commit."""

    folder: Path
    commit: str

    def git(self, *arguments: str) -> bytes:
        """Returns what git prints."""
        done = run(["git", "-C", str(self.folder), *arguments], capture_output=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"{self.folder}: git {' '.join(arguments)}: {done.stderr.decode().strip().partition(chr(10))[0]}"
            )
        return done.stdout

    def read(self, path: str) -> bytes:
        return self.git("show", f"{self.commit}:{path}")

    def by_size(self, folder: str) -> list[str]:
        """Returns the paths in a folder, smallest file first; without those that a partial clone lacks."""
        rows = [row.split(maxsplit=4) for row in self.git("ls-tree", "-l", self.commit, folder).decode().splitlines()]
        return [path for _, path in sorted((int(size), path) for *_, size, path in rows if size.isdigit())]


@dataclass(frozen=True)
class File:
    """repository: owner/name on GitHub. make: the content. sha256: its digest."""

    repository: str
    commit: str
    make: Callable[[Clone], bytes]
    sha256: str


def first(path: str, lines: int, clone: Clone) -> bytes:
    """Returns the first lines of a file, a header included."""
    return b"".join(clone.read(path).splitlines(keepends=True)[:lines])


def rates(folder: str, clients: Sequence[int], clone: Clone) -> bytes:
    """Returns ServeGen's windows of some clients in one table, with a header and the client's number."""
    header = "client,window_start_s,rate_req_per_s,iat_cv,arrival_family,arg1,arg2\n"
    lines = [
        f"{n},{line}\n" for n in clients for line in clone.read(f"{folder}/chunk-{n}-trace.csv").decode().splitlines()
    ]
    return "".join([header, *lines]).encode()


def lengths(folder: str, clients: Sequence[int], clone: Clone) -> bytes:
    """Returns ServeGen's distributions of lengths, a client a line."""
    return _lines({"client": n, "dataset": json.loads(clone.read(f"{folder}/chunk-{n}-dataset.json"))} for n in clients)


def conversations(clone: Clone) -> bytes:
    """Returns every fifth of the 600 smallest conversations of agents, one a line."""
    return _lines(json.loads(clone.read(path)) for path in clone.by_size("traces/")[:600:5])


def clients_of_vtc(clone: Clone) -> bytes:
    """Returns the requests of VTC's workload "real" in order of arrival, with the latencies measured under FCFS and under VTC."""
    names = ("FCFS", "VTC")
    logs = [
        json.loads(clone.read(f"fair_bench/{name}/all_results_real.jsonl"))["result"]["responses"] for name in names
    ]
    both = zip(*(sorted(log, key=lambda request: request["req_time"]) for log in logs), strict=True)
    rows = ["arrival_s,client,prompt_tokens,output_tokens,fcfs_ttft_s,fcfs_latency_s,vtc_ttft_s,vtc_latency_s"]
    for pair in both:
        request, times = pair[0], [each[key] for each in pair for key in ("first_token_latency", "request_latency")]
        client = f"client{request['adapter_dir'].rpartition('-')[2]}"
        figures = [f"{request['req_time']:.6f}", client, request["prompt_len"], request["output_len"]]
        rows.append(",".join(map(str, [*figures, *(f"{seconds:.4f}" for seconds in times)])))
    return ("\n".join(rows) + "\n").encode()


def _lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()


AZURE = ("Azure/AzurePublicDataset", "b469a113cedca53ddc3bdea71a143dc4b7d8700c")
SERVEGEN = ("alibaba/ServeGen", "f891d1189eb32b3868dfc443800c4150548c282a")
CLIENTS = (12, 20, 34, 61, 104, 116)
FILES = {
    "azure_llm_2023_conv_rows1-14176.csv.gz": File(
        *AZURE,
        partial(first, "data/AzureLLMInferenceTrace_conv.csv", 14_177),
        "56550f78ee4d5b6e99ff6985943453ff5590684543503ee19147f9635fe09b99",
    ),
    "azure_llm_2023_code_rows1-5740.csv.gz": File(
        *AZURE,
        partial(first, "data/AzureLLMInferenceTrace_code.csv", 5_741),
        "0abf8a2071e63ffdd15d8345471eff5d9cf3d141db9459fc191119261420bf37",
    ),
    "mooncake_fast25_conversation_rows1-7851.jsonl.gz": File(
        "kvcache-ai/Mooncake",
        "3b5a594133958449a1feaf1c9e0fc1b553e34a28",
        partial(first, "FAST25-release/traces/conversation_trace.jsonl", 7_851),
        "24d66442470b35d879d7ddd861640493065c862e15ef5e3efbc1a47b5326afea",
    ),
    "arxiv_summarization_llama2_rows1-18838.csv.gz": File(
        "microsoft/vidur",
        "7d47513363ec447a741ac5e47241580b47724fbf",
        partial(first, "data/processed_traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", 18_839),
        "7021b3c597b0823c0f9cba8273736d745a9de0e826db1ef461e8ffc6ba57c207",
    ),
    "sharegpt_8k_llama2_rows1-20490.csv.gz": File(
        "microsoft/sarathi-serve",
        "72339db5b120614033b317880ad3a05a5e4c9415",
        partial(first, "data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv", 20_491),
        "41be18d2bb6b504543055f45fe54357bf48e7191f1ea8e3411362923c0fd6078",
    ),
    "vtc_real_27clients.csv.gz": File(
        "Ying1123/VTC-artifact",
        "192c2e2014c69c8c6c699d7113c3822e4db632e6",
        clients_of_vtc,
        "f83086d3ca0a7aff54412305e1411015c8527972897607bf1c35f48c8eb5caf6",
    ),
    "servegen_language_m-large_clients12-20-34-61-104-116_trace.csv.gz": File(
        *SERVEGEN,
        partial(rates, "data/language/m-large", CLIENTS),
        "2fb488e210f6fc629c30e6dbfe400aea8a743b4827d3806e94a0b74041784656",
    ),
    "servegen_language_m-large_clients12-20-34-61-104-116_dataset.jsonl.gz": File(
        *SERVEGEN,
        partial(lengths, "data/language/m-large", CLIENTS),
        "4ba9cd5df481a237e8fe97ef5d0513d0c709d6529667abbb8e4a48514e4ba44f",
    ),
    "weka_agents_120conversations.jsonl.xz": File(
        "callanjfox/kv-cache-tester",
        "94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf",
        conversations,
        "6017fcf09331b79cff92ffe609193ba5d361fc91c6433f043d176c89ce4fd3d6",
    ),
}


def main(clones: str, traces: str) -> None:
    """Writes the files whose repository is cloned, and keeps existing files. clones, traces: folders."""
    Path(traces).mkdir(parents=True, exist_ok=True)
    for name, file in FILES.items():
        folder, path = Path(clones, file.repository.partition("/")[2]), Path(traces, name)
        if path.exists():
            print(f"{path}: kept")
        elif not folder.is_dir():
            print(f"{name}: left out; git clone https://github.com/{file.repository} {folder}")
        else:
            content = file.make(Clone(folder, file.commit))
            if hashlib.sha256(content).hexdigest() != file.sha256:
                problem = f"{name}: {folder} gives another content than {file.repository} at {file.commit}"
                raise ConfigError(f"{problem}; make a full clone")
            path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else gzip.compress(content, mtime=0))
            print(f"{path}: written")
