"""Trace files in which something is wrong, for each reader of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st
from spoiled_inputs import spoiled_bytes, spoiled_gzip, spoiled_lines

from experiments.workloads import PromptFile, ServeGen, TraceReplay, Workload

AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
    b"2023-11-16 18:15:51.2220670,879,55\r\n"
)
MOONCAKE = [
    f'{{"timestamp": {3000 * row}, "input_length": {7 + row}, "output_length": 5, "hash_ids": [0]}}' for row in range(3)
]
LENGTHS = b"num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n2015,156,2171,12.9\n"
VTC = b"arrival_s,client,prompt_tokens,output_tokens\n0.000000,client13,13,199\n0.207938,client2,36,137\n"
WINDOWS = (
    b"client,window_start_s,rate_req_per_s,iat_cv,arrival_family,arg1,arg2\n0,0,0.01,1.2,Gamma,0.7,3\n0,600,0,,,0,0\n"
    b"1,0,0.02,1,Weibull,1.1,2\n"
)
DATASET = [
    f'{{"client": {client}, "dataset": {{"0": {{"input_tokens": "{{45: 0.5, 60: 0.5}}", "output_tokens": "{{7: 1.0}}"}}}}}}'
    for client in range(2)
]
PROMPTS = [
    '{"token_ids": [1, 2, 3], "max_new_tokens": 4}',
    '{"token_ids": [5], "arrival_time": 0.5, "temperature": 0.7, "client": "a"}',
]

OTHERS: Mapping[str, bytes] = {"whole-windows.csv": WINDOWS, "whole-dataset.jsonl": "\n".join(DATASET).encode()}
"""Files that must lie beside those that are spoiled: ServeGen's data are in two."""

READERS: dict[str, tuple[st.SearchStrategy[bytes], Callable[[str], Workload]]] = {
    "azure": (spoiled_bytes(AZURE), lambda path: TraceReplay(path=path, format="azure")),
    "mooncake": (spoiled_lines(MOONCAKE), lambda path: TraceReplay(path=path, format="mooncake")),
    "unknown": (spoiled_bytes("\n".join(MOONCAKE).encode()), lambda path: TraceReplay(path=path)),
    "lengths": (spoiled_bytes(LENGTHS), lambda path: TraceReplay(path=path, format="lengths", queued=True)),
    "vtc": (spoiled_bytes(VTC), lambda path: TraceReplay(path=path, format="vtc")),
    "prompts": (spoiled_lines(PROMPTS), lambda path: PromptFile(path=path)),
    "windows": (spoiled_bytes(WINDOWS), lambda path: ServeGen(path=path, dataset="whole-dataset.jsonl")),
    "dataset": (spoiled_lines(DATASET), lambda path: ServeGen(path="whole-windows.csv", dataset=path)),
}


class SpoiledTrace(NamedTuple):
    """A file, and the reader that is to find out what is wrong with it."""

    reader: str
    content: bytes
    packed: bool

    def read(self, folder: Path) -> None:
        """Write the file, and make a workload's requests of it."""
        path = folder / (f"{self.reader}.gz" if self.packed else self.reader)
        path.write_bytes(self.content)
        READERS[self.reader][1](str(path)).requests(None)


spoiled_traces = st.one_of(
    st.builds(SpoiledTrace, st.just(name), spoiled_gzip(content) if packed else content, st.just(packed))
    for name, (content, _) in READERS.items()
    for packed in (False, True)
)
